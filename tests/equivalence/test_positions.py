"""E1 to E3 on rotations that are scaled or interleaved, and in bfloat16 (pitfalls 7 and 8)."""

from __future__ import annotations

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from pc_rag.layout.plan import Fresh, RequestPlan
from pc_rag.model.positions import RopeStyle
from pc_rag.types import Span
from tests.support.reference import assembled_logits, full_logits, masked_logits
from tests.support.requests import Workbench, cached
from tests.support.tiny_models import tiny_config, tiny_model

PREFIX = tuple(range(10, 27))
CHUNKS = (tuple(range(40, 71)), tuple(range(90, 130)))
QUESTION = (200, 3, 77)
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 1e4,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 1e4,
    },
}


def cohere():
    """A tiny Cohere model: neighbouring channels are rotated, one norm per layer."""
    plain = tiny_config("llama").to_dict()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        "initializer_range", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    config = CohereConfig(**{name: plain[name] for name in names}, pad_token_id=0, logit_scale=1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CohereForCausalLM(config).eval()


@pytest.fixture(params=["cohere", *SCALED])
def bench(request):
    if request.param == "cohere":
        return Workbench(cohere())
    return Workbench(tiny_model("llama", rope_parameters=SCALED[request.param])[0])


def fresh(token_ids, start):
    return Fresh(token_ids=token_ids, span=Span(start, start + len(token_ids)))


def test_e1_prefix_chunk_question_equals_full_prefill(bench):
    """E1: one chunk behind its prefix; also with a one-token question (pitfall 7)."""
    prefix = bench.encode(PREFIX, start=0)
    chunk = bench.encode(CHUNKS[0], start=len(PREFIX), context=(prefix,))
    end = len(PREFIX) + len(CHUNKS[0])
    for question in (QUESTION, QUESTION[:1]):
        plan = RequestPlan(
            (cached(prefix, start=0), cached(chunk, start=len(PREFIX)), fresh(question, end))
        )
        expected = full_logits(bench.model, plan.token_ids, plan.position_ids)
        torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)


@pytest.mark.parametrize("settle", [False, True])
def test_e2_moved_module_entries_equal_one_masked_forward_pass(bench, settle):
    """E2: entries that saw themselves only, wherever they lie, also far away."""
    entries = [bench.encode(ids, start=0) for ids in CHUNKS]
    parts = [cached(entries[0], start=0), fresh((5, 6), 31), cached(entries[1], start=700)]
    plan = RequestPlan((*parts, fresh(QUESTION, 740)))
    expected = masked_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan, settle=settle), expected, **TOLERANCE)


@pytest.mark.parametrize("shift", [1, 64, 517])
def test_e3_a_moved_entry_equals_one_encoded_there(bench, shift):
    """E3, pitfall 8: never quietly unscaled, never the wrong pairs."""
    here, there = (bench.encode(CHUNKS[0], start=start) for start in (3, 3 + shift))
    moved = bench.runner.positions.place(here.keys, shift)
    torch.testing.assert_close(moved, there.keys, **TOLERANCE)
    torch.testing.assert_close(here.values, there.values, **TOLERANCE)
    is_interleaved = isinstance(bench.model, CohereForCausalLM)
    style = bench.runner.positions.layers[0].encoding.style
    assert (style is RopeStyle.INTERLEAVED) is is_interleaved


def test_pitfall_2_the_same_chunk_twice_equals_the_reference():
    """Pitfall 2: one entry at two places of one prompt; its keys differ by the rotation."""
    bench = Workbench(tiny_model("llama")[0])
    prefix = bench.encode(PREFIX, start=0)
    chunk = bench.encode(CHUNKS[0], start=17, context=(prefix,))
    plan = RequestPlan(
        (
            cached(prefix, start=0),
            cached(chunk, start=17),
            cached(chunk, start=48),
            fresh(QUESTION, 79),
        )
    )
    expected = assembled_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)
    view_keys = [bench.runner.positions.place(chunk.keys, shift) for shift in (0, 31)]
    assert (view_keys[0] - view_keys[1]).abs().max() > 1e-2


def test_e2_bfloat16_is_as_near_the_truth_as_stock_attention():
    """In bfloat16 the error against float32 is at most twice that of a stock forward pass."""
    exact = Workbench(tiny_model("llama")[0])
    low = Workbench(tiny_model("llama", dtype=torch.bfloat16)[0])
    logits = {}
    for bench in (exact, low):
        prefix = bench.encode(PREFIX, start=0)
        chunk = bench.encode(CHUNKS[1], start=17, context=(prefix,))
        plan = RequestPlan((cached(prefix, start=0), cached(chunk, start=17), fresh(QUESTION, 57)))
        logits[bench.runner.dtype] = bench.logits(plan)
    truth = full_logits(exact.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(logits[torch.float32], truth, **TOLERANCE)
    stock = full_logits(low.model, plan.token_ids, plan.position_ids).float()
    ours, theirs = ((x - truth).norm() for x in (logits[torch.bfloat16], stock))
    assert ours <= 2 * theirs
