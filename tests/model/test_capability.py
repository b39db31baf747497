"""What a loaded model can do, as people read it."""

from __future__ import annotations

import pytest

from pc_rag.model.capability import LayerKind, capabilities_of
from pc_rag.model.loading import wrap_model
from pc_rag.types import Placement, Visibility
from tests.support.tiny_models import tiny_model


def capabilities(name, **changes):
    limit = changes.pop("max_position", None)
    return capabilities_of(wrap_model(*tiny_model(name, **changes), max_position=limit))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", [LayerKind(3, "RoPE, halves, 16 of 16 channels", None)]),
        ("gptj", [LayerKind(2, "RoPE, interleaved pairs, 8 of 16 channels", None)]),
        ("llama-yarn", [LayerKind(2, "RoPE, halves, 16 of 16 channels, YaRN factor 4", None)]),
        ("deepseek_v3", [LayerKind(2, "RoPE, halves, the last 8 of 24 channels", None)]),
        (
            "gemma3_text",
            [
                LayerKind(1, "RoPE, halves, 32 of 32 channels", 16),
                LayerKind(1, "RoPE, halves, 32 of 32 channels, linear scaling factor 8", None),
            ],
        ),
        (
            "cohere2",
            [
                LayerKind(1, "RoPE, interleaved pairs, 16 of 16 channels", 16),
                LayerKind(1, "no positions", None),
            ],
        ),
        ("bloom", [LayerKind(2, "ALiBi, slopes from 0.00391 to 0.25", None)]),
        ("gpt2", [LayerKind(2, "learned positions", None)]),
    ],
)
def test_layers_are_described_when_they_are_alike_or_not(name, layers):
    """Each kind once, with its count and window."""
    assert capabilities(name).layers == tuple(layers)


def test_regime_is_named_when_frequencies_are_frozen():
    """Short or long factors."""
    assert "LongRoPE with short factors" in capabilities("phi3").layers[0].encoding
    long = capabilities("phi3", max_position=2048)
    assert "LongRoPE with long factors" in long.layers[0].encoding
    assert long.max_position == 2048


def test_numbers_are_the_models_own():
    """Bytes of 3 layers, 2 heads, 16 + 16 channels in float32, and the rest."""
    plain = capabilities("llama")
    assert plain.bytes_per_token == 3 * 2 * (16 + 16) * 4
    assert (plain.architecture, plain.max_position) == ("LlamaForCausalLM", 2048)
    assert plain.placement is Placement.ROTATE
    assert plain.visibilities == tuple(Visibility)
    assert (plain.softcap, plain.has_sinks, plain.has_latent_attention) == (None, False, False)
    assert plain.self_check.own_difference < plain.self_check.tolerance
    assert capabilities("gemma2").softcap == 5.0
    assert capabilities("gpt_oss").has_sinks
    assert capabilities("deepseek_v2").has_latent_attention
    assert capabilities("gpt2").placement is Placement.FIXED
