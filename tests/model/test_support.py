"""What is refused, and with which words."""

from __future__ import annotations

import pytest
from transformers import (
    BartConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    Qwen2Config,
    Qwen3NextConfig,
    SmolLM3Config,
)

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.support import check_supported
from tests.support.tiny_models import FAMILIES, tiny_config, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_model_is_accepted_when_it_rotates_and_attends_fully(family):
    """The families that this version serves."""
    model, _ = tiny_model(family)
    check_supported(model.config)
    check_supported(model.config, model)


def rope(kind, **values):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **values}


@pytest.mark.parametrize(
    ("config", "capability"),
    [
        (BartConfig(), "decoder-only"),
        (GPT2Config(), "position encoding"),
        (BloomConfig(), "position encoding"),
        (FalconMambaConfig(), "attention in every layer"),
        (Qwen3NextConfig(), "attention in every layer"),
        (Gemma2Config(), "full attention"),
        (Gemma2Config(sliding_window=8192), "plain attention scores"),
        (Gemma3TextConfig(sliding_window=10**6), "one rotation for all layers"),
        (GptOssConfig(), "full attention"),
        (MistralConfig(sliding_window=4096), "full attention"),
        (Qwen2Config(use_sliding_window=True, sliding_window=64), "full attention"),
        (SmolLM3Config(), "one rotation for all layers"),
        (DeepseekV3Config(), "keys and values per head"),
        (tiny_config("llama", rope_parameters=rope("dynamic")), "a rotation that does not"),
        (
            tiny_config(
                "llama",
                rope_parameters=rope(
                    "longrope",
                    short_factor=[1.0] * 8,
                    long_factor=[2.0] * 8,
                    original_max_position_embeddings=1024,
                ),
            ),
            "a rotation that does not",
        ),
        (tiny_config("llama", max_position_embeddings=0), "context length"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_model_is_refused_when_it_lacks_a_capability(config, capability):
    """The error names architecture and capability before any weight is read."""
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    assert caught.value.capability.startswith(capability)
    assert caught.value.architecture == type(config).__name__
    assert type(config).__name__ in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(sliding_window=None),
        MistralConfig(sliding_window=4096, max_position_embeddings=4096),
        Qwen2Config(use_sliding_window=False, sliding_window=64),
        tiny_config("llama", rope_parameters=rope("yarn", original_max_position_embeddings=1024)),
        tiny_config("llama", rope_parameters=rope("linear")),
    ],
    ids=["no-window", "wide-window", "window-off", "yarn", "linear"],
)
def test_model_is_accepted_when_the_setting_has_no_effect(config):
    """A window that no prompt reaches, and fixed scaling, change nothing."""
    check_supported(config)


def test_model_is_refused_when_only_its_code_tells():
    """No head, attention sinks, recurrence or its own attention code."""
    headless = LlamaModel(tiny_config("llama"))
    with pytest.raises(UnsupportedModelError, match="no logits"):
        check_supported(headless.config, headless)
    for change, capability in (
        ({"_is_stateful": True}, "attention in every layer"),
        ({"_supports_attention_backend": False}, "attention interface"),
        ({"_supports_sdpa": False}, "attention interface"),
    ):
        model, _ = tiny_model("llama")
        for name, value in change.items():
            setattr(model, name, value)
        with pytest.raises(UnsupportedModelError) as caught:
            check_supported(model.config, model)
        assert caught.value.capability == capability


def test_model_is_refused_when_it_takes_images():
    """A composite configuration is not a text model's."""
    config = LlamaConfig()
    config.vision_config = {}
    with pytest.raises(UnsupportedModelError, match="images"):
        check_supported(config)
