"""E1, E2 and E3 on every architecture, at the level of one forward pass and of decoding."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from pc_rag.errors import LayoutError
from pc_rag.layout.plan import Fresh, FreshKind, RequestPlan
from pc_rag.types import Placement, Span
from tests.support.architectures import ARCHITECTURES, WINDOW
from tests.support.reference import assembled_logits, full_logits, masked_logits
from tests.support.requests import Workbench, cached
from tests.support.tiny_models import tiny_model

PREFIX = tuple(range(10, 27))
CHUNKS = (tuple(range(40, 71)), tuple(range(90, 103)), tuple(range(120, 145)))
QUESTION = (200, 3, 77, 14)
ANSWER = (65, 9, 150)
FIXED = [name for name, row in ARCHITECTURES.items() if row.placement is Placement.FIXED]
MOVABLE = [name for name in ARCHITECTURES if name not in FIXED]
TURNED = [name for name, row in ARCHITECTURES.items() if row.placement is Placement.ROTATE]
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@cache
def bench_of(name):
    return Workbench(tiny_model(name)[0])


def close(name):
    return {"atol": ARCHITECTURES[name].tolerance, "rtol": 0.0}


def fresh(token_ids, start, kind=FreshKind.TEXT):
    return Fresh(token_ids=token_ids, span=Span(start, start + len(token_ids)), kind=kind)


def packed_plan(name, bench, *, repaired):
    """Prefix, three chunks with separators, the last ones moved where that is possible."""
    prefix = bench.encode(PREFIX, start=0)
    parts, position = [cached(prefix, start=0)], len(PREFIX)
    for number, ids in enumerate(CHUNKS):
        start = position if name in FIXED else len(PREFIX)
        chunk = bench.encode(ids, start=start, context=(prefix,))
        link = repaired if number else 0
        if link:
            parts.append(fresh(ids[:link], position, FreshKind.REPAIR))
        parts.append(cached(chunk, start=position + link, rows=Span(link, len(ids))))
        parts.append(fresh((5, 6), position + len(ids)))
        position += len(ids) + 2
    return RequestPlan((*parts, fresh(QUESTION, position)))


def behind(plan, token_ids):
    """The plan with tokens behind it that were generated."""
    return RequestPlan((*plan.parts, fresh(tuple(token_ids), plan.end))) if token_ids else plan


@every_architecture
def test_positions_are_those_that_the_architecture_is_known_for(name):
    """Encodings, windows and placement were found on the model, and none of them by its name."""
    row, positions = ARCHITECTURES[name], bench_of(name).runner.positions
    found = [(type(each.encoding).__name__.lower(), each.window) for each in positions.layers]
    assert found == list(row.layers)
    assert positions.placement is row.placement


@every_architecture
def test_e1_prefix_chunk_and_question_equal_full_prefill(name):
    """E1, pitfall 7: a chunk longer than windows are; a question of one token gives the same."""
    bench = bench_of(name)
    prefix = bench.encode(PREFIX, start=0)
    chunk = bench.encode(CHUNKS[0], start=len(PREFIX), context=(prefix,))
    assert len(CHUNKS[0]) > WINDOW
    end = len(PREFIX) + len(CHUNKS[0])
    plan = RequestPlan(
        (cached(prefix, start=0), cached(chunk, start=len(PREFIX)), fresh(QUESTION, end))
    )
    expected = full_logits(bench.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(bench.logits(plan), expected, **close(name))
    short = RequestPlan((*plan.parts[:2], fresh(QUESTION[:1], end)))
    expected_short = full_logits(bench.model, short.token_ids, short.position_ids)
    torch.testing.assert_close(bench.logits(short), expected_short, **close(name))
    other = bench.encode(CHUNKS[1] + CHUNKS[0][13:-1] + (7,), start=len(PREFIX), context=(prefix,))
    wrong = RequestPlan((plan.parts[0], cached(other, start=len(PREFIX)), plan.parts[2]))
    assert (bench.logits(wrong) - expected).abs().max() > 1e-3, "the logits ignore the chunk"


@every_architecture
@pytest.mark.parametrize(("repaired", "settle"), [(0, False), (3, True)])
def test_e2_moved_entries_equal_the_reference_while_an_answer_is_decoded(name, repaired, settle):
    """E2: prefix-visible entries at other places, repaired or not, and several tokens behind."""
    bench = bench_of(name)
    plan = packed_plan(name, bench, repaired=repaired)
    found = bench.decode(plan, ANSWER, settle=settle)
    for length, logits in enumerate(found):
        longer = behind(plan, ANSWER[:length])
        expected = assembled_logits(bench.model, longer, bench.modules)
        torch.testing.assert_close(logits, expected, **close(name))


@every_architecture
@pytest.mark.parametrize("settle", [False, True])
def test_e2_reserved_gaps_equal_one_masked_forward_pass(name, settle):
    """E2: entries where they were encoded, gaps between them wider and narrower than windows."""
    bench = bench_of(name)
    prefix = bench.encode(PREFIX, start=0)
    parts = [cached(prefix, start=0)]
    for ids, start in zip(CHUNKS, (20, 60, 180), strict=True):
        chunk = bench.encode(ids, start=start, context=(prefix,))
        parts += [cached(chunk, start=start), fresh((7, 8), start + len(ids) + 3)]
    plan = RequestPlan((*parts, fresh(QUESTION, 214)))
    found = bench.decode(plan, ANSWER[:1], settle=settle)
    for length, logits in enumerate(found):
        longer = behind(plan, ANSWER[:length])
        expected = masked_logits(bench.model, longer, bench.modules)
        torch.testing.assert_close(logits, expected, **close(name))


@every_architecture
def test_e2_entries_that_saw_themselves_only_equal_one_masked_forward_pass(name):
    """E2: one masked pass gives the same wherever they were encoded; one of them stands twice."""
    bench = bench_of(name)
    parts, position = [], 0
    for ids, gap in zip((*CHUNKS, CHUNKS[1]), (0, 2, 300, 0), strict=True):
        position += gap
        start = position if name in FIXED else 0
        parts.append(cached(bench.encode(ids, start=start), start=position))
        position += len(ids)
    plan = RequestPlan((*parts, fresh(QUESTION, position)))
    expected = masked_logits(bench.model, plan, bench.modules)
    torch.testing.assert_close(bench.logits(plan), expected, **close(name))


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize("shift", [1, 517])
def test_e3_a_moved_entry_equals_one_encoded_there(name, shift):
    """E3, pitfall 8: placing an entry elsewhere gives the KV of encoding it there, near and far."""
    bench = bench_of(name)
    here, there = (bench.encode(CHUNKS[0], start=start) for start in (3, 3 + shift))
    moved = bench.runner.positions.place(here.keys, shift)
    torch.testing.assert_close(moved, there.keys, **close(name))
    torch.testing.assert_close(here.values, there.values, **close(name))
    is_turned = bool((here.keys - there.keys).abs().max() > 1e-2)
    assert is_turned is (name in TURNED)


@pytest.mark.parametrize("name", FIXED)
def test_e3_an_entry_of_learned_positions_cannot_stand_elsewhere(name):
    """Keys and values of the same tokens at another start are other ones; nothing moves them."""
    bench = bench_of(name)
    here, there = (bench.encode(CHUNKS[0], start=start) for start in (3, 20))
    assert (here.keys - there.keys).abs().max() > 1e-2
    assert (here.values - there.values).abs().max() > 1e-2
    with pytest.raises(LayoutError, match="17 position IDs"):
        bench.runner.positions.place(here.keys, 17)
    plan = RequestPlan((cached(here, start=20), fresh(QUESTION, 60)))
    with pytest.raises(LayoutError, match="learned positions"):
        bench.logits(plan)


@every_architecture
def test_uncached_pass_equals_full_prefill(name):
    """Reuse off: the same ids and position IDs, gaps included, in an ordinary prefill."""
    bench = bench_of(name)
    parts = (fresh(PREFIX, 0), fresh(CHUNKS[0], 30), fresh(QUESTION, 90))
    plan = RequestPlan(parts)
    expected = full_logits(bench.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(bench.logits(plan), expected, **close(name))
