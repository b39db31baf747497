"""What is said of models is what was found on them, and the README says the same."""

from __future__ import annotations

import pytest
import torch

from pc_rag.model.detection.capabilities import capabilities_of
from pc_rag.model.loading import wrap_model
from pc_rag.types import Placement, Visibility
from tests.support.architectures import ARCHITECTURES
from tests.support.support_table import README, REFUSED, refusal_of, row_of, with_tables
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_words_are_those_that_people_know_when_a_model_is_described(name):
    """What detection sees on a model reads as its paper or its model card says it."""
    expected = ARCHITECTURES[name]
    row = row_of(name)
    assert (row.encoding, row.placement) == (expected.encoding, expected.placement.value)
    has_window = [window is not None for window in expected.windows]
    assert row.windows == (
        "every layer" if all(has_window) else "some layers" if any(has_window) else ""
    )


def test_numbers_are_the_models_when_it_is_described():
    """Layers of a kind, windows, capping, bytes and limits."""
    model, tokenizer = tiny_model("gemma2")
    found = capabilities_of(wrap_model(model, tokenizer, name="tiny"))
    assert (found.name, found.architecture) == ("tiny", "Gemma2ForCausalLM")
    assert found.placement is Placement.ROTATE
    assert found.visibilities == tuple(Visibility)
    assert [(kind.num_layers, kind.window, kind.softcap) for kind in found.layers] == [
        (1, 16, 5.0), (1, None, 5.0),
    ]  # fmt: skip
    assert [(kind.rotary_dim, kind.key_dim) for kind in found.layers] == [(32, 32), (32, 32)]
    assert not any(kind.has_sinks for kind in found.layers)
    assert found.bytes_per_token == 2 * 2 * 2 * 32 * 4  # layers, heads, keys and values, bytes
    assert (found.dtype, found.max_position) == ("float32", 2048)
    assert found.self_check.own_difference <= found.self_check.tolerance


def test_factors_are_named_when_frequencies_are_held():
    """LongRoPE serves its original length with short factors, and all of it with long ones."""
    model = tiny_model("phi3")
    short, long = (capabilities_of(wrap_model(*model, max_position=n)) for n in (None, 2048))
    assert (short.layers[0].encoding, short.max_position) == (
        "RoPE, partial, LongRoPE (short factors)",
        1024,
    )
    assert (long.layers[0].encoding, long.max_position) == (
        "RoPE, partial, LongRoPE (long factors)",
        2048,
    )


def test_sinks_are_told_when_a_model_has_them():
    """GPT-OSS has a learned logit per head."""
    assert row_of("gpt_oss").remarks == "attention sinks"


def test_bytes_follow_the_dtype_when_it_is_narrower():
    """bfloat16 takes half of float32."""
    sizes = [
        capabilities_of(wrap_model(*tiny_model("llama", dtype=dtype))).bytes_per_token
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_what_is_needed_when_a_model_is_listed_as_refused(name):
    """What it lacks and an advice, as the README quotes them."""
    refusal = refusal_of(name)
    assert refusal.lacks
    assert len(refusal.needed) > 20


def test_listed_model_is_found_out_when_it_is_not_refused(monkeypatch):
    """The list of refusals cannot go stale."""
    monkeypatch.setitem(REFUSED, "Llama", ("LlamaConfig", {}))
    with pytest.raises(LookupError, match="not refused any more"):
        refusal_of("Llama")


def test_readme_has_the_tables_when_it_is_read():
    """Tables of supported and refused models are those that were found."""
    page = README.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m tests.support.support_table --write"
