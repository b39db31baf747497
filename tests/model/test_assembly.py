"""From a plan to a view: which rows, where, and how much room."""

from __future__ import annotations

import pytest
import torch

from pc_rag.errors import EntryNotFound
from pc_rag.layout.plan import Fresh, RequestPlan, Reused
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.attention.kv_view import Segment
from pc_rag.types import Span
from tests.support.requests import Workbench, cached
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def bench():
    return Workbench(tiny_model("llama")[0])


def fresh(token_ids, start):
    return Fresh(token_ids=token_ids, span=Span(start, start + len(token_ids)))


def test_segments_read_the_plans_rows_in_place(bench):
    """A part of an entry is a view of its rows; its shift is the plan's."""
    entry = bench.encode(tuple(range(40, 60)), start=3)
    plan = RequestPlan(
        (fresh((1, 2), 0), cached(entry, start=7, rows=Span(4, 12)), fresh((9,), 20))
    )
    view = assemble(plan, bench.entries, bench.runner, num_new_tokens=5)
    (segment,) = view.segments
    assert (segment.span, segment.shift) == (Span(7, 15), 0)
    assert torch.equal(segment.keys, entry.keys[:, :, 4:12])
    assert segment.keys.data_ptr() == entry.keys[:, :, 4:12].data_ptr()
    assert segment.values.data_ptr() == entry.values[:, :, 4:12].data_ptr()
    moved = RequestPlan((cached(entry, start=10), fresh((9,), 40)))
    assert assemble(moved, bench.entries, bench.runner).segments[0].shift == 7


def test_buffer_has_room_for_fresh_and_new_tokens(bench):
    """Also where that is more than a granule."""
    plan = RequestPlan((fresh(tuple(range(200)), 0),))
    view = assemble(plan, {}, bench.runner, num_new_tokens=400)
    view.tail.reserve(600)
    assert view.tail.num_rows == 0


def test_reused_runs_are_segments_too(bench):
    """KV of the exact prefix cache comes as it is handed in; reused parts need no buffer rows."""
    entry = bench.encode(tuple(range(5)), start=0)
    plan = RequestPlan((Reused(token_ids=(0, 1, 2, 3, 4), span=Span(0, 5)), fresh((9,), 5)))
    run = Segment(entry.keys, entry.values, Span(0, 5))
    view = assemble(plan, {}, bench.runner, reused=[run])
    assert view.segments == (run,)


def test_entry_of_another_dtype_is_read_in_the_compute_dtype(bench):
    """Storage may be smaller than compute."""
    entry = bench.encode(tuple(range(70, 80)), start=0)
    half = type(entry).__new__(type(entry))
    for name, value in (
        ("address", entry.address),
        ("keys", entry.keys.bfloat16()),
        ("values", entry.values.bfloat16()),
    ):
        object.__setattr__(half, name, value)
    plan = RequestPlan((cached(entry, start=0), fresh((9,), 10)))
    (segment,) = assemble(plan, {entry.address.key: half}, bench.runner).segments
    assert segment.keys.dtype is segment.values.dtype is torch.float32
    torch.testing.assert_close(segment.keys, entry.keys, atol=5e-2, rtol=5e-2)


def test_entry_that_was_not_leased_is_named(bench):
    """The plan and the leases must agree."""
    entry = bench.encode((1, 2, 3), start=0)
    plan = RequestPlan((cached(entry, start=0), fresh((9,), 3)))
    with pytest.raises(EntryNotFound, match=entry.address.key[:12]):
        assemble(plan, {}, bench.runner)


def test_fresh_tokens_come_with_their_positions():
    """In order, gaps where stored KV stands."""
    plan = RequestPlan((fresh((1, 2), 0), fresh((), 2), fresh((3,), 9)))
    assert fresh_tokens(plan) == ([1, 2, 3], [0, 1, 9])


def test_empty_rows_are_nothing(bench):
    """A cached part without tokens does not reach the kernel, which would crash on it."""
    entry = bench.encode(tuple(range(40, 60)), start=0)
    whole = RequestPlan((cached(entry, start=0), fresh((9,), 20)))
    plan = RequestPlan(
        (cached(entry, start=0), cached(entry, start=20, rows=Span(5, 5)), fresh((9,), 20))
    )
    assert torch.equal(bench.logits(plan), bench.logits(whole))
