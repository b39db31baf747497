"""Repair turns stored tokens into fresh ones and changes nothing else."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from pc_rag.errors import ConfigError
from pc_rag.layout import (
    Cached,
    Fresh,
    FreshKind,
    LinkRepair,
    NoRepair,
    RequestPlan,
    Reused,
    apply_repair,
    parse_repair,
    with_fresh_end,
)
from pc_rag.types import ModuleKey, Span


def cached(label, start, num_tokens):
    return Cached(
        label=label,
        key=ModuleKey(label),
        token_ids=tuple(range(start, start + num_tokens)),
        span=Span(start, start + num_tokens),
        rows=Span(0, num_tokens),
        encoded_start=3,
    )


def is_chunk(part):
    return part.label.startswith("chunk")


PLAN = RequestPlan(
    (
        cached("prefix", 0, 4),
        cached("chunk a", 4, 5),
        Fresh(token_ids=(99,), span=Span(9, 10)),
        cached("chunk b", 10, 5),
        cached("chunk c", 20, 2),
        Fresh(token_ids=(98,), span=Span(30, 31)),
    )
)


@pytest.mark.parametrize(
    ("text", "repair"),
    [("none", NoRepair()), ("link:1", LinkRepair(1)), ("link:32", LinkRepair(32))],
)
def test_policy_survives_when_it_is_read_and_written(text, repair):
    """Configurations hold policies as text."""
    assert parse_repair(text) == repair
    assert str(repair) == text
    assert pickle.loads(pickle.dumps(repair)) == repair


@pytest.mark.parametrize(
    "text", ["", "None", "link", "link:", "link:0", "link:-1", "link:a", "link:8 ", "blend:0.1"]
)
def test_policy_is_refused_when_it_is_malformed(text):
    """A malformed value is an error that says what is allowed."""
    with pytest.raises(ConfigError, match="none"):
        parse_repair(text)


def test_plan_is_unchanged_when_nothing_is_repaired():
    """The paper's way."""
    assert apply_repair(PLAN, NoRepair(), is_chunk) == PLAN


def test_heads_of_later_chunks_are_fresh_when_they_are_linked():
    """The first chunk, the prefix and the request's text stay as they are."""
    plan = apply_repair(PLAN, LinkRepair(3), is_chunk)
    assert plan.parts[:3] == PLAN.parts[:3]
    assert [(p.label, p.span) for p in plan.fresh if p.kind is FreshKind.REPAIR] == [
        ("chunk b", Span(10, 13)),
        ("chunk c", Span(20, 22)),
    ]
    (rest,) = (part for part in plan.cached if part.label == "chunk b")
    assert (rest.rows, rest.span, rest.shift) == (Span(3, 5), Span(13, 15), 7)
    assert plan.num_repaired_tokens == 5
    assert (plan.token_ids, plan.position_ids) == (PLAN.token_ids, PLAN.position_ids)


def test_second_chunk_is_linked_when_the_first_is_computed():
    """A chunk that missed the store is a chunk all the same."""
    missed = Fresh(token_ids=(1, 2), span=Span(0, 2), kind=FreshKind.UNCACHED, label="chunk a")
    plan = apply_repair(RequestPlan((missed, cached("chunk b", 2, 4))), LinkRepair(1), is_chunk)
    assert plan.num_repaired_tokens == 1


def test_both_are_seen_when_a_chunk_is_placed_twice():
    """The second occurrence follows another chunk, so it is linked."""
    twice = RequestPlan((cached("chunk a", 0, 4), cached("chunk a", 4, 4)))
    assert apply_repair(twice, LinkRepair(2), is_chunk).fresh[0].span == Span(4, 6)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_last_token_is_computed_when_it_was_reused(num_tokens):
    """The exact prefix cache may hold a whole prompt; its last token is computed again."""
    plan = RequestPlan((Reused(token_ids=(7,) * num_tokens, span=Span(0, num_tokens)),))
    ended = with_fresh_end(plan)
    assert ended.fresh[-1].span == Span(num_tokens - 1, num_tokens)
    assert (ended.token_ids, ended.position_ids) == (plan.token_ids, plan.position_ids)
    assert ended.num_cached_tokens == num_tokens - 1


def test_plan_is_unchanged_when_it_ends_fresh():
    """Nothing is recomputed without need."""
    assert with_fresh_end(PLAN) == PLAN


def test_only_the_start_of_an_entry_is_recomputed_when_it_is_read_in_parts():
    """What lies further in it attended what lies before it, together or apart."""
    first = cached("chunk b", 10, 5)
    rest = replace(cached("chunk c", 15, 3), key=first.key, rows=Span(5, 8))
    plan = RequestPlan((cached("chunk a", 4, 5), first, rest, replace(rest, span=Span(20, 23))))
    repaired = apply_repair(plan, LinkRepair(2), is_chunk)
    assert [(part.label, part.span) for part in repaired.fresh] == [("chunk b", Span(10, 12))]
    assert repaired.cached[-2:] == plan.cached[-2:]
