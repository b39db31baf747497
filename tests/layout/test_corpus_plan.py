"""Retrieved chunks become plans without PML."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pc_rag.errors import LayoutError, PromptError
from pc_rag.layout import Cached, EntryPiece, FreshKind, MemberRows, TextPiece, plan_chunks
from pc_rag.types import HitKind, ModuleKey, PositionPolicy, Span
from tests.support.char_encoder import decode


def text(characters):
    return TextPiece(tuple(map(ord, characters)))


def chunk(characters, *, encoded_start=6, context_is_prefix=True):
    return EntryPiece(
        label=characters[:1],
        key=ModuleKey(characters),
        token_ids=tuple(map(ord, characters)),
        encoded_start=encoded_start,
        context_is_prefix=context_is_prefix,
    )


def prefix(characters):
    return EntryPiece(
        label="prefix",
        key=ModuleKey(characters),
        token_ids=tuple(map(ord, characters)),
        encoded_start=0,
        context_is_prefix=True,
        is_prefix=True,
    )


def shown(plan):
    return [
        (
            str(part.hit_kind) if isinstance(part, Cached) else str(part.kind),
            decode(part.token_ids),
            part.span.start,
        )
        for part in plan.parts
    ]


PIECES = [prefix("PREFIX"), chunk("aaaa"), text("--"), chunk("bb"), text("Why?")]


def test_spans_follow_each_other_when_packed():
    """The prefix and the chunk right behind it are exact, later chunks composed."""
    assert shown(plan_chunks(PIECES, policy=PositionPolicy.PACKED)) == [
        ("exact", "PREFIX", 0),
        ("exact", "aaaa", 6),
        ("text", "--", 10),
        ("composed", "bb", 12),
        ("text", "Why?", 14),
    ]


def test_chunks_lie_in_their_slots_when_reserved():
    """Slot i starts i slot lengths behind the prefix; text in front of a chunk shares its slot."""
    plan = plan_chunks(PIECES, policy=PositionPolicy.RESERVED, slot_tokens=10)
    assert shown(plan) == [
        ("exact", "PREFIX", 0),
        ("exact", "aaaa", 6),
        ("text", "--", 16),
        ("composed", "bb", 18),
        ("text", "Why?", 20),
    ]


def test_slots_are_pushed_when_text_fills_them():
    """Text is never lost: what does not fit pushes the next chunk, until a gap takes it up."""
    pieces = [text("=" * 9), chunk("aaaa"), chunk("bb"), chunk("c"), text("?")]
    plan = plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=6)
    assert [part.span.start for part in plan.parts] == [0, 9, 13, 15, 16]
    plan = plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=9)
    assert [part.span.start for part in plan.parts] == [0, 9, 13, 18, 19]


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([prefix("PREFIX"), chunk("a")], HitKind.EXACT),
        ([prefix("PREFIX"), chunk("a", encoded_start=7)], HitKind.COMPOSED),
        ([prefix("PREFIX"), chunk("a", context_is_prefix=False)], HitKind.COMPOSED),
        ([prefix("PREFIX"), text("x"), chunk("a", encoded_start=7)], HitKind.COMPOSED),
        ([text("PREFIX"), chunk("a")], HitKind.COMPOSED),
        ([chunk("a", encoded_start=0)], HitKind.EXACT),
        ([chunk("a", encoded_start=3)], HitKind.COMPOSED),
        ([text(""), chunk("a", encoded_start=0)], HitKind.EXACT),
        ([chunk("x", encoded_start=0), chunk("a", encoded_start=1)], HitKind.COMPOSED),
        ([prefix("PRE"), prefix("FIX"), chunk("a")], HitKind.COMPOSED),
    ],
)
def test_hit_is_exact_when_its_context_is_all_before_it(pieces, kind):
    """A chunk is exact right behind the prefix it was encoded behind, with nothing fresh before."""
    plan = plan_chunks([*pieces, text("?")], policy=PositionPolicy.PACKED)
    assert plan.cached[-1].hit_kind is kind


def test_same_chunk_moves_twice_when_it_is_placed_twice():
    """Both occurrences read the same entry, at different shifts (pitfall 2)."""
    plan = plan_chunks([chunk("aa"), chunk("aa"), text("?")], policy=PositionPolicy.PACKED)
    first, second = plan.cached
    assert first.key == second.key
    assert (first.shift, second.shift) == (-6, -4)


def test_last_token_is_computed_when_all_are_stored():
    """Cached chunks only, empty question (pitfall 6)."""
    plan = plan_chunks([prefix("PREFIX"), chunk("aaaa"), text("")], policy=PositionPolicy.PACKED)
    *_, last = plan.fresh
    assert (last.kind, last.span, last.label) == (FreshKind.REPAIR, Span(9, 10), "a")
    assert plan.num_cached_tokens == 9


def test_last_token_is_computed_when_a_chunk_of_one_token_ends_the_prompt():
    """The stored part vanishes as a whole."""
    plan = plan_chunks([text("x"), chunk("a")], policy=PositionPolicy.PACKED)
    assert shown(plan) == [("text", "x", 0), ("repair", "a", 1)]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 10_000])
def test_chunk_of_any_length_is_placed_when_packed(num_tokens):
    """Empty, single token, and long chunks are right (pitfall 10)."""
    piece = EntryPiece(
        label="c",
        key=ModuleKey("c"),
        token_ids=(1,) * num_tokens,
        encoded_start=0,
        context_is_prefix=True,
    )
    plan = plan_chunks([piece, text("?")], policy=PositionPolicy.PACKED)
    assert plan.num_cached_tokens == num_tokens
    assert plan.end == num_tokens + 1


def test_chunk_is_refused_with_numbers_when_it_is_longer_than_its_slot():
    """Its token count and the limit are named (pitfall 10)."""
    pieces = [prefix("PREFIX"), chunk("aaaa"), text("?")]
    assert plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=4)
    with pytest.raises(LayoutError, match="chunk 'a' has 4 tokens, a slot holds 3"):
        plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=3)


@pytest.mark.parametrize("slot_tokens", [None, 0])
def test_reserved_is_refused_when_it_has_no_slot_length(slot_tokens):
    """A corpus chooses its slot length at creation."""
    with pytest.raises(LayoutError, match="needs a slot length"):
        plan_chunks(PIECES, policy=PositionPolicy.RESERVED, slot_tokens=slot_tokens)


def test_order_is_refused_when_a_prefix_stands_behind_a_chunk():
    """Slots are counted from the end of the prefix."""
    with pytest.raises(LayoutError, match="prefix 'prefix' stands behind chunk 'a'"):
        plan_chunks([chunk("a"), prefix("P")], policy=PositionPolicy.PACKED)


def test_overflow_is_refused_with_numbers_when_positions_run_out():
    """The limit is exact."""
    assert plan_chunks(PIECES, policy=PositionPolicy.PACKED, max_position=18)
    with pytest.raises(LayoutError, match=r"18 tokens .* up to 18, the model has 17"):
        plan_chunks(PIECES, policy=PositionPolicy.PACKED, max_position=17)


def test_prompt_is_refused_when_it_has_no_token():
    """There is nothing to generate from."""
    with pytest.raises(PromptError, match="no token"):
        plan_chunks([text("")], policy=PositionPolicy.PACKED)


def head(characters, num_read):
    return replace(chunk(characters), num_read=num_read)


def tail(characters, label="a"):
    return TextPiece(tuple(map(ord, characters)), label=label)


def test_leading_rows_are_read_when_only_a_head_stands_in_the_prompt():
    """Its tokens attended nothing behind them; the hit is partial, even where all is exact."""
    pieces = [prefix("PREFIX"), head("abcd", 3), text("--"), head("efgh", 2), text("Why?")]
    plan = plan_chunks(pieces, policy=PositionPolicy.PACKED)
    assert shown(plan) == [
        ("exact", "PREFIX", 0),
        ("partial", "abc", 6),
        ("text", "--", 9),
        ("partial", "ef", 11),
        ("text", "Why?", 13),
    ]
    assert [part.rows for part in plan.cached[1:]] == [Span(0, 3), Span(0, 2)]
    assert [part.shift for part in plan.cached[1:]] == [0, 5]


@pytest.mark.parametrize("num_read", [4, 9])
def test_hit_is_whole_when_every_token_is_read(num_read):
    """A head that lacks no token is no part."""
    plan = plan_chunks(
        [prefix("P"), head("abcd", num_read), text("?")], policy=PositionPolicy.PACKED
    )
    assert plan.cached[-1].hit_kind is HitKind.COMPOSED
    assert plan.cached[-1].rows == Span(0, 4)


def test_head_fits_its_slot_when_its_chunk_would_not():
    """A slot holds what stands in the prompt; the next chunk begins in the next slot."""
    pieces = [prefix("P"), head("abcdef", 4), chunk("gh"), text("?")]
    plan = plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=5)
    assert [part.span.start for part in plan.parts] == [0, 1, 6, 8]
    with pytest.raises(LayoutError, match="has 4 tokens, a slot holds 3"):
        plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=3)


def test_tail_is_labelled_text_when_it_stands_in_the_prompt():
    """It is computed like text and moves no slot; only its label says what it is."""
    pieces = [prefix("P"), text("-"), tail("cd"), text("--"), chunk("ef"), tail("d"), text("?")]
    plan = plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=8)
    assert shown(plan) == [
        ("exact", "P", 0),
        ("text", "-", 1),
        ("part", "cd", 2),
        ("text", "--", 4),
        ("composed", "ef", 6),
        ("part", "d", 8),
        ("text", "?", 9),
    ]
    assert [part.label for part in plan.fresh] == ["", "a", "", "a", ""]
    assert plan.num_repaired_tokens == 0


def test_parts_stay_apart_when_nothing_is_reused():
    """Head and tail of one chunk side by side are two parts in the uncached arm too."""
    pieces = [head("abcd", 2), tail("cd"), head("abcd", 3), tail("d")]
    plan = plan_chunks(pieces, policy=PositionPolicy.PACKED)
    bare = plan.without_reuse()
    assert shown(bare) == [
        ("uncached", "ab", 0),
        ("part", "cd", 2),
        ("uncached", "abc", 4),
        ("part", "d", 7),
    ]
    assert bare.token_ids == plan.token_ids


def test_last_token_is_computed_when_a_head_ends_the_prompt():
    """It is cut off the rows that are read, and is one part with them in the uncached arm."""
    plan = plan_chunks([text("x"), head("abcd", 3)], policy=PositionPolicy.PACKED)
    assert shown(plan) == [("text", "x", 0), ("partial", "ab", 1), ("repair", "c", 3)]
    assert shown(plan.without_reuse()) == [("text", "x", 0), ("uncached", "abc", 1)]


JOINT = replace(chunk("aaaa--bb"), label="joint")


def members(*rows):
    """Some of the chunks of a scaffold, by their rows."""
    named = tuple(MemberRows(label, Span(*span)) for label, *span in rows)
    return replace(JOINT, members=named)


def test_scaffold_is_one_part_a_chunk_when_it_is_read_as_a_whole():
    """Each with the separator behind it, from one entry; exact as the first chunk is."""
    together = members(("a", 0, 6), ("b", 6, 8))
    plan = plan_chunks([prefix("PREFIX"), together, chunk("cc")], policy=PositionPolicy.PACKED)
    assert shown(plan)[1:4] == [("exact", "aaaa--", 6), ("exact", "bb", 12), ("composed", "c", 14)]
    parts = plan.cached[1:3]
    assert [(part.label, part.rows) for part in parts] == [("a", Span(0, 6)), ("b", Span(6, 8))]
    assert {(part.key, part.shift) for part in parts} == {(JOINT.key, 0)}


def test_chunks_of_a_scaffold_are_composed_when_they_stand_apart():
    """But for the first behind the prefix, whose rows attended nothing else."""
    pieces = [
        prefix("PREFIX"),
        members(("a", 0, 4)),
        text("?"),
        members(("b", 6, 8)),
        text("Why"),
    ]
    plan = plan_chunks(pieces, policy=PositionPolicy.PACKED)
    assert shown(plan)[1:4] == [("exact", "aaaa", 6), ("text", "?", 10), ("composed", "bb", 11)]
    assert plan.cached[2].shift == 11 - (6 + 6)


def test_later_rows_are_not_exact_when_they_stand_right_behind_the_prefix():
    """They attended the rows before them, which are not there."""
    pieces = [prefix("PREFIX"), members(("b", 6, 8)), text("Why")]
    assert shown(plan_chunks(pieces, policy=PositionPolicy.PACKED))[1][0] == "composed"


@pytest.mark.parametrize("slot_tokens", [4, 10])
def test_scaffold_takes_a_slot_a_chunk_when_positions_are_reserved(slot_tokens):
    """Its chunks lie without a gap, and what is behind it lies where it would without it."""
    together = members(("a", 0, 6), ("b", 6, 8))
    pieces = [prefix("PREFIX"), together, chunk("cc"), text("Why")]
    plan = plan_chunks(pieces, policy=PositionPolicy.RESERVED, slot_tokens=slot_tokens)
    starts = [part.span.start for part in plan.cached]
    assert starts == [0, 6, 12, 6 + 2 * slot_tokens]
