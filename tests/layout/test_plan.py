"""A plan is in order, and knows what it holds."""

from __future__ import annotations

import pytest

from pc_rag.errors import LayoutError
from pc_rag.layout import Cached, Fresh, FreshKind, RequestPlan, Reused, split_cached
from pc_rag.types import ModuleKey, Span


def cached(start, token_ids, *, encoded_start=0, label="m"):
    return Cached(
        label=label,
        key=ModuleKey(label),
        token_ids=token_ids,
        span=Span(start, start + len(token_ids)),
        rows=Span(0, len(token_ids)),
        encoded_start=encoded_start,
    )


def test_plan_is_refused_when_parts_overlap():
    """Two tokens never share a position ID."""
    with pytest.raises(LayoutError, match="starts at position ID 2, before the previous part's"):
        RequestPlan((cached(0, (1, 2, 3)), Fresh(token_ids=(4,), span=Span(2, 3))))


def test_plan_is_refused_when_tokens_and_positions_differ():
    """Every token has one position ID."""
    with pytest.raises(LayoutError, match="2 tokens has 1 position IDs"):
        RequestPlan((Fresh(token_ids=(4, 5), span=Span(0, 1)),))
    with pytest.raises(LayoutError, match="1 tokens, 2 position IDs and 1 rows"):
        Cached(
            label="m",
            key=ModuleKey("m"),
            token_ids=(1,),
            span=Span(0, 2),
            rows=Span(0, 1),
            encoded_start=0,
        )


def test_counts_agree_when_a_plan_mixes_parts():
    """Cached, reused, repaired and fresh tokens add up; positions keep their gaps."""
    plan = RequestPlan(
        (
            Reused(token_ids=(9,), span=Span(0, 1)),
            cached(4, (1, 2), encoded_start=1),
            Fresh(token_ids=(3,), span=Span(6, 7), kind=FreshKind.REPAIR, label="m"),
            Fresh(token_ids=(5, 6), span=Span(8, 10)),
        )
    )
    assert plan.token_ids == (9, 1, 2, 3, 5, 6)
    assert plan.position_ids == (0, 4, 5, 6, 8, 9)
    assert (plan.num_tokens, plan.num_cached_tokens, plan.num_repaired_tokens) == (6, 3, 1)
    assert plan.end == 10
    assert plan.cached[0].shift == 3
    uncached = plan.without_reuse()
    assert (uncached.token_ids, uncached.position_ids) == (plan.token_ids, plan.position_ids)
    assert not uncached.num_cached_tokens


@pytest.mark.parametrize("num_leading", [-1, 0, 1, 3, 4])
def test_halves_join_when_a_part_is_split(num_leading):
    """Cutting moves no token and no key."""
    part = cached(5, (1, 2, 3), encoded_start=2)
    halves = [half for half in split_cached(part, num_leading) if half is not None]
    assert RequestPlan(tuple(halves)).token_ids == part.token_ids
    assert RequestPlan(tuple(halves)).position_ids == (5, 6, 7)
    assert {half.shift for half in halves} == {part.shift}
    assert [row for half in halves for row in range(half.rows.start, half.rows.end)] == [0, 1, 2]
