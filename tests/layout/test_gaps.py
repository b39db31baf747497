"""Plans of models whose positions are distances: under packed no gap stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.errors import LayoutError
from pc_rag.layout import lay_out, plan_prompt
from pc_rag.layout.plan import Cached, Fresh, FreshKind, Occurrence, RequestPlan
from pc_rag.pml import parse_prompt, parse_schema
from pc_rag.types import HitKind, ModuleKey, PositionPolicy, Span, Visibility
from tests.support.char_encoder import CharEncoder
from tests.support.plans import shown

SCHEMA = (
    """<schema name="s">Hi <module name="m">a <param name="p" len="9"/> b</module> end</schema>"""
)


def plan(body, policy, *, closes_gaps, max_position=None):
    encoder = CharEncoder(has_bos=False)
    return plan_prompt(
        lay_out(parse_schema(SCHEMA), encoder, visibility=Visibility.PREFIX),
        parse_prompt(f'<prompt schema="s">{body}</prompt>', source="p.xml"),
        encoder,
        policy=policy,
        entry_key=lambda index: ModuleKey(f"key {index}"),
        max_position=max_position,
        closes_gaps=closes_gaps,
    )


def has_gaps(plan):
    return plan.position_ids != tuple(range(plan.num_tokens))


def test_gap_of_a_short_argument_closes_under_packed_only():
    """Under ``reserved`` the positions stay; under ``packed`` only if they are distances."""
    body = '<m p="xyz"/>?'
    reserved = plan(body, PositionPolicy.RESERVED, closes_gaps=True)
    open_, closed = (plan(body, PositionPolicy.PACKED, closes_gaps=c) for c in (False, True))
    assert has_gaps(reserved)
    assert has_gaps(open_)
    assert not has_gaps(closed)
    assert closed.token_ids == open_.token_ids
    assert [kind for kind, _, _ in shown(closed)] == [kind for kind, _, _ in shown(open_)]


def test_module_stays_one_use_when_a_gap_in_it_closes():
    """Its rows, its argument and the rows behind are one occurrence, and the shifts are true."""
    closed = plan('<m p="xyz"/>?', PositionPolicy.PACKED, closes_gaps=True)
    of_module = [part for part in closed.parts if part.label == "m"]
    assert len({part.occurrence for part in of_module}) == 1
    first, argument, last = of_module
    assert argument.kind is FreshKind.ARGUMENT
    assert (first.shift, last.shift) == (0, -6)
    assert last.num_closed == 6
    assert last.hit_kind is HitKind.COMPOSED
    assert first.occurrence.start == first.span.start


def test_uncached_arm_has_the_same_tokens_and_positions_when_gaps_close():
    """Closing comes before the arms part."""
    closed = plan('<m p=""/>?', PositionPolicy.PACKED, closes_gaps=True)
    uncached = closed.without_reuse()
    assert uncached.token_ids == closed.token_ids
    assert uncached.position_ids == closed.position_ids == tuple(range(closed.num_tokens))


def test_limit_counts_what_is_left_when_gaps_close():
    """A prompt fits if its tokens do, though its schema would not."""
    body, packed = '<m p="xyz"/>?', PositionPolicy.PACKED
    num_tokens = plan(body, packed, closes_gaps=True).num_tokens
    assert plan(body, packed, closes_gaps=True, max_position=num_tokens).end == num_tokens
    for limit, closes_gaps in ((num_tokens, False), (num_tokens - 1, True)):
        with pytest.raises(LayoutError, match=f"the model has {limit}"):
            plan(body, packed, closes_gaps=closes_gaps, max_position=limit)


@st.composite
def plans(draw):
    parts, end = [], 0
    for number in range(draw(st.integers(1, 6))):
        start = end + draw(st.integers(0, 5))
        length = draw(st.integers(1, 4))
        ids, span = tuple(range(length)), Span(start, start + length)
        key = ModuleKey(f"key {draw(st.integers(0, 2))}")
        if draw(st.booleans()):
            first = draw(st.integers(0, 8))
            rows = Span(first, first + length)
            parts.append(
                Cached(label=key, key=key, token_ids=ids, span=span, rows=rows, encoded_start=3)
            )
        else:
            use = Occurrence(key, start - number) if draw(st.booleans()) else None
            parts.append(Fresh(token_ids=ids, span=span, label=key, occurrence=use))
        end = span.end
    return RequestPlan(tuple(parts))


@given(plans())
def test_closing_keeps_tokens_and_which_parts_are_one_use(before):
    """No gap is left, doing it twice changes nothing, and occurrences are told apart as before."""
    closed = before.without_gaps()
    assert not has_gaps(closed)
    assert closed.token_ids == before.token_ids
    assert closed.without_gaps() == closed
    uses = [[part.occurrence for part in each.parts] for each in (before, closed)]
    for one in range(len(uses[0])):
        for other in range(one):
            if uses[0][one] == uses[0][other]:
                assert uses[1][one] == uses[1][other]
