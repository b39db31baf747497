"""How the exact prefix cache sees a plan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pc_rag.layout.plan import Cached, Fresh, FreshKind, RequestPlan, Reused
from pc_rag.layout.reuse import plan_symbols, with_reused
from pc_rag.types import ModuleKey, Span


def entry(key, start, num_tokens, *, first_row=0):
    return Cached(
        label=key,
        key=ModuleKey(key),
        token_ids=tuple(range(num_tokens)),
        span=Span(start, start + num_tokens),
        rows=Span(first_row, first_row + num_tokens),
        encoded_start=0,
    )


def fresh(token_ids, start, kind=FreshKind.TEXT, label=""):
    span = Span(start, start + len(token_ids))
    return Fresh(token_ids=tuple(token_ids), span=span, kind=kind, label=label)


PLAN = RequestPlan(
    (
        fresh((1, 2, 3), 0),
        entry("a", 3, 10),
        fresh((4, 5), 15, FreshKind.REPAIR, "b"),
        entry("b", 17, 8, first_row=2),
        fresh((6, 7, 8), 30),
    )
)


def test_tokens_are_their_ids_and_entries_one_symbol():
    """Positions are those of the tokens, and of an entry its first."""
    symbols, positions = plan_symbols(PLAN)
    assert [s for s in symbols if isinstance(s, int)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [isinstance(s, str) for s in symbols] == [False] * 3 + [True, False, False, True] + (
        [False] * 3
    )
    assert positions == [0, 1, 2, 3, 15, 16, 17, 30, 31, 32]


def test_symbol_of_an_entry_tells_key_and_rows():
    """Other rows are other KV, also at the same place."""
    symbols = [
        plan_symbols(RequestPlan((part,)))[0][0]
        for part in (
            entry("a", 3, 10),
            entry("b", 3, 10),
            entry("a", 3, 9),
            entry("a", 3, 9, first_row=1),
        )
    ]
    assert len(set(symbols)) == 4
    assert plan_symbols(RequestPlan((entry("a", 3, 10),)))[0][0] == symbols[0]


@given(num_symbols=st.integers(0, 10))
def test_leading_tokens_become_reused_and_nothing_else_changes(num_symbols):
    """Ids, positions and symbols stay; exactly the leading tokens are reused."""
    plan = with_reused(PLAN, num_symbols)
    assert plan.token_ids == PLAN.token_ids
    assert plan.position_ids == PLAN.position_ids
    assert plan_symbols(plan) == plan_symbols(PLAN)
    assert plan.cached == PLAN.cached
    reused = [i for p in plan.parts if isinstance(p, Reused) for i in p.token_ids]
    leading = plan_symbols(PLAN)[0][:num_symbols]
    assert reused == [symbol for symbol in leading if isinstance(symbol, int)]
    assert all(part.token_ids for part in plan.parts)


def test_rest_of_a_cut_part_keeps_kind_and_label():
    """A repaired run that is reused in part is still a repair of its chunk."""
    plan = with_reused(PLAN, 5)
    (rest,) = [p for p in plan.fresh if p.label]
    assert rest == fresh((5,), 16, FreshKind.REPAIR, "b")


def test_plan_is_the_same_when_nothing_is_held():
    """No match, no change."""
    assert with_reused(PLAN, 0) == PLAN
