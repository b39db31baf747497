"""E1, E2, E3 and E7 at the level of one forward pass: assembled KV gives the true logits."""

from __future__ import annotations

import pytest
import torch

from pc_rag.layout.plan import Fresh, FreshKind, RequestPlan
from pc_rag.model.assembly import assemble
from pc_rag.model.attention import pieces
from pc_rag.types import Span
from tests.support.reference import assembled_logits, full_logits, masked_logits
from tests.support.requests import Workbench, cached
from tests.support.tiny_models import FAMILIES, tiny_model

PREFIX = tuple(range(10, 27))
CHUNKS = (tuple(range(40, 71)), tuple(range(90, 103)), tuple(range(120, 160)))
QUESTION = (200, 3, 77, 14, 9)
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(params=FAMILIES)
def bench(request):
    return Workbench(tiny_model(request.param)[0])


def fresh(token_ids, start, kind=FreshKind.TEXT):
    return Fresh(token_ids=token_ids, span=Span(start, start + len(token_ids)), kind=kind)


def packed_plan(bench, *, separators=True, link=0):
    """Prefix, three chunks behind each other (the last ones moved), question."""
    prefix = bench.encode(PREFIX, start=0)
    chunks = [bench.encode(c, start=len(PREFIX), context=(prefix,)) for c in CHUNKS]
    parts = [cached(prefix, start=0)]
    position = len(PREFIX)
    for number, chunk in enumerate(chunks):
        repaired = link if number else 0
        if repaired:
            ids = chunk.address.token_ids[:repaired]
            parts.append(fresh(ids, position, FreshKind.REPAIR))
        rows = Span(repaired, chunk.num_tokens)
        parts.append(cached(chunk, start=position + repaired, rows=rows))
        position += chunk.num_tokens
        if separators:
            parts.append(fresh((5, 6), position))
            position += 2
    parts.append(fresh(QUESTION, position))
    return RequestPlan(tuple(parts))


def test_e1_prefix_chunk_question_equals_full_prefill(bench):
    """E1: prefix, one chunk and a question give full prefill's logits."""
    prefix = bench.encode(PREFIX, start=0)
    chunk = bench.encode(CHUNKS[0], start=len(PREFIX), context=(prefix,))
    start = len(PREFIX) + len(CHUNKS[0])
    plan = RequestPlan(
        (cached(prefix, start=0), cached(chunk, start=len(PREFIX)), fresh(QUESTION, start))
    )
    expected = full_logits(bench.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)
    other = bench.encode(CHUNKS[1] + CHUNKS[0][13:], start=len(PREFIX), context=(prefix,))
    wrong = RequestPlan(
        (cached(prefix, start=0), cached(other, start=len(PREFIX)), fresh(QUESTION, start))
    )
    assert (bench.logits(wrong) - expected).abs().max() > 1e-2, "the logits ignore the chunk"


@pytest.mark.parametrize("separators", [True, False])
@pytest.mark.parametrize("link", [0, 1, 8])
@pytest.mark.parametrize("settle", [False, True])
def test_e2_moved_prefix_entries_equal_the_reference(bench, separators, link, settle):
    """E2: moved entries, fresh text between them and repaired tokens give the oracle's logits."""
    plan = packed_plan(bench, separators=separators, link=link)
    expected = assembled_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan, settle=settle), expected, **TOLERANCE)


def test_e2_holds_when_queries_are_rotated_one_segment_at_a_time(bench, monkeypatch):
    """E2: many long prompts rotate segment by segment, to bound memory; the logits are the same."""
    monkeypatch.setattr(pieces, "_LARGEST_ROTATION", 0)
    plan = packed_plan(bench, link=8)
    expected = assembled_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)


def test_e2_module_visible_entries_equal_one_masked_forward_pass(bench):
    """E2: entries that saw themselves only equal one pass under a block mask, wherever they lie."""
    chunks = [bench.encode(c, start=0) for c in CHUNKS]
    position, parts = 0, []
    for chunk in chunks:
        parts.append(cached(chunk, start=position))
        position += chunk.num_tokens
    plan = RequestPlan((*parts, fresh(QUESTION, position)))
    expected = masked_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)


def test_e2_gaps_between_spans_equal_one_masked_forward_pass(bench):
    """E2: under reserved positions entries lie where they were encoded and gaps stay."""
    prefix = bench.encode(PREFIX, start=0)
    parts = [cached(prefix, start=0)]
    for number, ids in enumerate(CHUNKS):
        start = len(PREFIX) + 50 * number
        chunk = bench.encode(ids, start=start, context=(prefix,))
        parts += [cached(chunk, start=start), fresh((7, 8), start + len(ids) + 3)]
    plan = RequestPlan((*parts, fresh(QUESTION, 400)))
    expected = masked_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)
    torch.testing.assert_close(
        assembled_logits(bench.model, plan, bench.modules), expected, **TOLERANCE
    )


def test_e2_both_oracles_agree_when_no_entry_was_moved(bench):
    """The two reference computations are independent and must not differ."""
    prefix = bench.encode(PREFIX, start=0)
    chunk = bench.encode(CHUNKS[2], start=30, context=(prefix,))
    plan = RequestPlan((cached(prefix, start=0), cached(chunk, start=30), fresh(QUESTION, 90)))
    torch.testing.assert_close(
        assembled_logits(bench.model, plan, bench.modules),
        masked_logits(bench.model, plan, bench.modules),
        **TOLERANCE,
    )


@pytest.mark.parametrize("num_read", [1, 12, len(CHUNKS[0]) - 1])
def test_e1_head_of_a_chunk_equals_full_prefill(bench, num_read):
    """E1 for a part: a chunk's first tokens attended nothing behind them (pitfall 38)."""
    prefix = bench.encode(PREFIX, start=0)
    chunk = bench.encode(CHUNKS[0], start=len(PREFIX), context=(prefix,))
    rows = Span(0, num_read)
    plan = RequestPlan(
        (
            cached(prefix, start=0),
            cached(chunk, start=len(PREFIX), rows=rows),
            fresh(QUESTION, len(PREFIX) + num_read),
        )
    )
    expected = full_logits(bench.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)
    alone = bench.encode(CHUNKS[0][:num_read], start=len(PREFIX), context=(prefix,))
    torch.testing.assert_close(chunk.keys[:, :, :num_read], alone.keys, **TOLERANCE)
    torch.testing.assert_close(chunk.values[:, :, :num_read], alone.values, **TOLERANCE)


@pytest.mark.parametrize("link", [0, 3])
@pytest.mark.parametrize("settle", [False, True])
def test_e2_moved_heads_equal_the_reference(bench, link, settle):
    """E2 for parts: heads placed elsewhere, repaired or not, give the oracle's logits."""
    prefix = bench.encode(PREFIX, start=0)
    parts, position = [cached(prefix, start=0)], len(PREFIX)
    for ids, num_read in zip(CHUNKS, (len(CHUNKS[0]), 9, 25), strict=True):
        chunk = bench.encode(ids, start=len(PREFIX), context=(prefix,))
        repaired = link if len(parts) > 1 else 0
        if repaired:
            parts.append(fresh(ids[:repaired], position, FreshKind.REPAIR))
        rows = Span(repaired, num_read)
        parts += [cached(chunk, start=position + repaired, rows=rows)]
        parts += [fresh((5, 6), position + num_read)]
        position += num_read + 2
    plan = RequestPlan((*parts, fresh(QUESTION, position)))
    expected = assembled_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan, settle=settle), expected, **TOLERANCE)


def test_e2_module_visible_heads_equal_one_masked_forward_pass(bench):
    """E2 for parts: heads of entries that saw themselves only equal one pass under a block mask."""
    parts, position = [], 0
    for ids, num_read in zip(CHUNKS, (20, 13, 1), strict=True):
        parts.append(cached(bench.encode(ids, start=0), start=position, rows=Span(0, num_read)))
        parts.append(fresh((5, 6), position + num_read))
        position += num_read + 2
    plan = RequestPlan((*parts, fresh(QUESTION, position)))
    expected = masked_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)


@pytest.mark.parametrize("shift", [1, 64, 517])
def test_e3_a_moved_entry_equals_one_encoded_there(bench, shift):
    """E3: placing a module-visible entry elsewhere gives the KV of encoding it there."""
    here = bench.encode(CHUNKS[0], start=3)
    there = bench.encode(CHUNKS[0], start=3 + shift)
    moved = bench.runner.positions.place(here.keys, shift)
    torch.testing.assert_close(moved, there.keys, **TOLERANCE)
    torch.testing.assert_close(here.values, there.values, **TOLERANCE)
    assert (here.keys - there.keys).abs().max() > 1e-2, "the shift changed nothing"


def test_e7_uncached_arm_equals_generate_when_greedy(bench):
    """E7: greedy tokens of the uncached arm are those of ``model.generate``."""
    prompt = PREFIX + CHUNKS[0] + QUESTION
    plan = RequestPlan((fresh(prompt, 0),))
    view = assemble(plan, {}, bench.runner, num_new_tokens=24)
    logits = bench.runner.prefill(view, prompt, range(len(prompt)))
    ours = []
    for position in range(len(prompt), len(prompt) + 24):
        ours.append(int(logits.argmax()))
        logits = bench.runner.decode(view, ours[-1], position)
    theirs = bench.model.generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, len(prompt) :].tolist()  # fmt: skip
    assert ours == theirs


def test_uncached_arm_equals_full_prefill_when_reuse_is_off(bench):
    """Reuse off keeps ids and positions and gives an ordinary prefill."""
    plan = packed_plan(bench).without_reuse()
    expected = full_logits(bench.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(bench.logits(plan), expected, **TOLERANCE)


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
