"""What is refused, and with which words."""

from __future__ import annotations

import pytest
import transformers
from transformers import (
    BartConfig,
    CLIPTextConfig,
    DeepseekV3Config,
    FalconMambaConfig,
    Gemma3TextConfig,
    GemmaConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MptConfig,
    Qwen3NextConfig,
    RwkvConfig,
    Zamba2Config,
)

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.detection.support import check_supported
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import tiny_config, tiny_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_configuration_is_accepted_when_the_architecture_is_known(name):
    """Everything else is found out on the model itself."""
    check_supported(tiny_config(name))


def rope(kind, **values):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **values}


def with_fields(config, **fields):
    for name, value in fields.items():
        setattr(config, name, value)
    return config


RECURRENT = ("attention in every layer", "key and a value per token in every layer")
SELECTED = ("full attention", "selected tokens only")


@pytest.mark.parametrize(
    ("config", "capability", "words"),
    [
        (BartConfig(), "decoder-only", "encoder-decoder"),
        (CLIPTextConfig(), "causal language model", "no clip_text_model model"),
        (MptConfig(attn_config={"alibi": False}), "position encoding", "attn_config.alibi"),
        (MambaConfig(), *RECURRENT),
        (FalconMambaConfig(), *RECURRENT),
        (RwkvConfig(), *RECURRENT),
        (JambaConfig(), *RECURRENT),
        (Zamba2Config(), *RECURRENT),
        (Qwen3NextConfig(), *RECURRENT),
        (Llama4TextConfig(), "full attention", "chunks of 8192 tokens"),
        (with_fields(DeepseekV3Config(), index_topk=8), *SELECTED),
        (
            Gemma3TextConfig(use_bidirectional_attention=True),
            "causal attention",
            "use_bidirectional_attention",
        ),
        (tiny_config("llama", rope_parameters=rope("dynamic")), "a rotation", "'dynamic'"),
        (
            Gemma3TextConfig(
                rope_parameters={
                    "sliding_attention": rope("default"),
                    "full_attention": rope("dynamic"),
                }
            ),
            "a rotation that does not depend on the request",
            "'dynamic'",
        ),
        (
            with_fields(LlamaConfig(), rope_parameters=rope("spiral")),
            "a known rotation",
            "'spiral'",
        ),
        (
            tiny_config("llama", rope_parameters=rope("default", mrope_section=[2, 3, 3])),
            "one position per token",
            "mrope_section",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20],
)
def test_model_is_refused_when_it_lacks_a_capability(config, capability, words):
    """The error names architecture, property and need before any weight is read."""
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    assert caught.value.capability.startswith(capability)
    assert caught.value.architecture == type(config).__name__
    assert type(config).__name__ in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["RecurrentGemma", "Bamba", "FalconH1", "Zamba", "Mamba2"])
def test_model_is_refused_when_transformers_calls_it_stateful(name):
    """Recurrent and hybrid models, whatever their configurations name their layers."""
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    assert caught.value.capability == "attention in every layer"


def test_model_is_accepted_when_its_setting_asks_for_nothing():
    """Fields that are there and off."""
    check_supported(with_fields(GemmaConfig(), index_topk=None, use_bidirectional_attention=False))


def test_model_is_refused_when_only_its_code_tells():
    """No head, or recurrence."""
    headless = LlamaModel(tiny_config("llama"))
    with pytest.raises(UnsupportedModelError, match="no logits"):
        check_supported(headless.config, headless)
    model, _ = tiny_model("llama")
    model._is_stateful = True
    with pytest.raises(UnsupportedModelError, match="recurrent"):
        check_supported(model.config, model)


def test_model_is_refused_when_it_takes_images():
    """A composite configuration is not a text model's."""
    config = LlamaConfig()
    config.vision_config = {}
    with pytest.raises(UnsupportedModelError, match="images"):
        check_supported(config)
