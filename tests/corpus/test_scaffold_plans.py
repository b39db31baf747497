"""Where chunks of a scaffold are read from its entry, and where they are not."""

from __future__ import annotations

import pytest

from pc_rag.corpus import PromptFormat
from pc_rag.corpus.parts import HeadTokens
from pc_rag.corpus.places import ChunkPlace, KnownScaffold, ScaffoldPlace, place_scaffolds
from pc_rag.corpus.places import side_by_side as arranged
from pc_rag.layout.plan import Cached, Fresh, FreshKind
from pc_rag.types import HitKind, MissReason, Span
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    TEXTS,
    chunk_uses,
    named,
    opened,
    request_of,
    same_in_both_arms,
)
from tests.support.scaffolds import (
    CAT_ID,
    DOG_ID,
    FISH_ID,
    SEPARATOR,
    num_keys,
    prompt,
    read,
    texts_read,
)


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add(named(cat=CAT, dog=DOG, fish=FISH))
        yield corpus


def test_scaffold_is_read_as_a_whole_when_its_chunks_stand_together(corpus):
    """One entry; first behind the prefix it is exact, and separators are read too."""
    corpus.scaffold([CAT_ID, DOG_ID])
    request = corpus.plan(prompt(corpus, CAT, DOG, FISH))
    assert texts_read(request) == [CAT + SEPARATOR, DOG, FISH]
    kinds = [kind for _, _, kind in read(request)]
    assert kinds == [HitKind.EXACT, HitKind.EXACT, HitKind.COMPOSED]
    assert num_keys(request) == 2
    completion = corpus.generate(prompt(corpus, CAT, DOG, FISH), SHORT)
    uses = [(use.label, use.hit_kind) for use in chunk_uses(completion)]
    assert uses == list(zip((CAT_ID, DOG_ID, FISH_ID), kinds, strict=True))


def test_scaffold_is_composed_when_it_is_moved(corpus):
    """Behind another chunk it is not what full prefill computes, and says so."""
    corpus.scaffold([CAT_ID, DOG_ID])
    request = corpus.plan(prompt(corpus, FISH, CAT, DOG))
    assert texts_read(request) == [FISH, CAT + SEPARATOR, DOG]
    kinds = [kind for _, _, kind in read(request)]
    assert kinds == [HitKind.EXACT, HitKind.COMPOSED, HitKind.COMPOSED]


def test_chunks_are_read_apart_when_other_text_separates_them(corpus):
    """Each where it stands, from one entry, without its separators."""
    corpus.scaffold([CAT_ID, DOG_ID, FISH_ID])
    request = corpus.plan(prompt(corpus, CAT, DOG, FISH, between=" -- "))
    assert texts_read(request) == [CAT, DOG, FISH]
    assert num_keys(request) == 1
    kinds = [kind for _, _, kind in read(request)]
    assert kinds == [HitKind.EXACT, HitKind.COMPOSED, HitKind.COMPOSED]
    fresh = [bytes(part.token_ids).decode() for part in request.plan.fresh[:2]]
    assert fresh == [" -- ", " -- "]


def test_only_the_separator_that_is_not_there_is_left_out(corpus):
    """Two that stand together are read together."""
    corpus.scaffold([CAT_ID, DOG_ID, FISH_ID])
    request = corpus.plan(prompt(corpus, CAT + SEPARATOR + DOG, FISH, between=" -- "))
    assert texts_read(request) == [CAT + SEPARATOR, DOG, FISH]
    assert num_keys(request) == 1


@pytest.mark.parametrize(
    "texts",
    [(CAT, DOG), (DOG, CAT, FISH), (CAT, FISH, DOG), (CAT, DOG[:-1], FISH)],
    ids=["some", "order", "between", "head"],
)
def test_single_entries_are_read_when_a_scaffold_does_not_fit(corpus, texts):
    """Not all of its chunks, another order, or one in part: as without it."""
    before = corpus.plan(prompt(corpus, *texts))
    corpus.scaffold([CAT_ID, DOG_ID, FISH_ID])
    assert corpus.plan(prompt(corpus, *texts)) == before
    assert num_keys(before) >= 2


def test_longest_scaffold_is_read_when_several_fit(corpus):
    """Also where a shorter one stands first."""
    for ids in ([CAT_ID, DOG_ID], [DOG_ID, FISH_ID, CAT_ID], [FISH_ID, CAT_ID]):
        corpus.scaffold(ids)
    request = corpus.plan(prompt(corpus, CAT, DOG, FISH, CAT))
    assert texts_read(request) == [CAT, DOG + SEPARATOR, FISH + SEPARATOR, CAT]
    assert num_keys(request) == 2


def test_scaffold_is_read_twice_when_it_stands_twice(corpus):
    """Pitfall 2: both places read the same entry, one of them moved."""
    corpus.scaffold([CAT_ID, DOG_ID])
    request = corpus.plan(prompt(corpus, CAT, DOG, CAT, DOG))
    assert num_keys(request) == 1
    shifts = {part.shift for part in request.plan.cached if part.label != "(prefix)"}
    assert shifts == {0, len(f"{CAT}{SEPARATOR}{DOG}{SEPARATOR}")}
    uses = chunk_uses(corpus.generate(prompt(corpus, CAT, DOG, CAT, DOG), SHORT))
    assert [use.label for use in uses] == [CAT_ID, DOG_ID] * 2


def test_separator_is_that_of_the_prompt_format():
    """A scaffold of another format is read apart: its separators are not there."""
    with opened(prompt_format=PromptFormat(separator=" ## ")) as corpus:
        corpus.add(TEXTS)
        corpus.scaffold([CAT_ID, DOG_ID])
        together = corpus.plan(prompt(corpus, CAT, DOG, between=" ## "))
        assert texts_read(together) == [f"{CAT} ## ", DOG]
        assert texts_read(corpus.plan(prompt(corpus, CAT, DOG))) == [CAT, DOG]


def test_remark_stands_at_every_chunk_when_the_prefix_is_another(corpus):
    """As for single entries."""
    corpus.scaffold([CAT_ID, DOG_ID])
    request = corpus.plan(f"Look: {CAT}{SEPARATOR}{DOG} Why?")
    assert num_keys(request) == 1
    assert request.remarks == dict.fromkeys((CAT_ID, DOG_ID), MissReason.OTHER_PREFIX)


def test_scaffold_is_linked_at_its_start_only_when_links_are_repaired():
    """Its chunks saw each other already; what stood before it, none did."""
    with opened(repair="link:5") as corpus:
        corpus.add(TEXTS)
        corpus.scaffold([CAT_ID, DOG_ID])
        first = corpus.plan(prompt(corpus, CAT, DOG, FISH)).plan
        assert [p.label for p in first.fresh if p.kind is FreshKind.REPAIR] == [FISH_ID]
        for between in (SEPARATOR, " | "):
            plan = corpus.plan(prompt(corpus, FISH, CAT, DOG, between=between)).plan
            repaired = [part for part in plan.fresh if part.kind is FreshKind.REPAIR]
            assert [bytes(part.token_ids).decode() for part in repaired] == [CAT[:5]]
        answer = corpus.generate(prompt(corpus, FISH, CAT, DOG), SHORT)
        assert [use.label for use in chunk_uses(answer)] == [FISH_ID, CAT_ID, DOG_ID]
        assert answer.metrics.num_repaired_tokens == 5


def test_later_chunks_do_not_move_when_positions_are_reserved():
    """A scaffold takes as many slots as it has chunks, also where its separators do not fit."""
    size = max(map(len, TEXTS))
    for slot_tokens in (80, size):
        with opened(position_policy="reserved", slot_tokens=slot_tokens) as corpus:
            corpus.add(TEXTS)
            alone = corpus.plan(prompt(corpus, CAT, DOG, FISH))
            corpus.scaffold([CAT_ID, DOG_ID])
            request = corpus.plan(prompt(corpus, CAT, DOG, FISH))
            cat, dog, fish = request.plan.cached[-3:]
            assert (cat.key, cat.span.end) == (dog.key, dog.span.start)
            assert fish.span == alone.plan.cached[-1].span
            assert cat.hit_kind is HitKind.EXACT
            question = Fresh(token_ids=fish.token_ids, span=fish.span)
            assert question.span.start >= cat.span.start + 2 * slot_tokens


def test_retrieved_chunks_stand_side_by_side_when_all_of_a_scaffold_are_found(corpus):
    """In its order, at the place of the best of them; the answer says so."""
    question = "A dog and a cat on the mat, and fish in the lake"
    plain = [chunk.id for chunk in corpus.search(question, 3)]
    last, first = plain[2], plain[0]
    corpus.scaffold([last, first])
    request = request_of(corpus, question, 3)
    assert [part.label for part in request.plan.cached[1:]] == [last, first, plain[1]]
    answer = corpus.answer(question, 3, config=SHORT)
    assert [chunk.id for chunk in answer.chunks] == [last, first, plain[1]]
    assert [use.label for use in chunk_uses(answer)] == [last, first, plain[1]]
    assert [part.label for part in request_of(corpus, question, 2).plan.cached[1:]] == plain[:2]


def test_answers_are_those_of_the_uncached_arm_when_all_is_one_scaffold(corpus):
    """What is read is exact, so both arms give the same tokens; E5: twice the same."""
    corpus.scaffold([CAT_ID, DOG_ID, FISH_ID])
    asked = prompt(corpus, CAT, DOG, FISH)
    assert same_in_both_arms(lambda reuse: corpus.generate(asked, SHORT, reuse=reuse))
    bare = corpus.plan(asked).plan.without_reuse()
    assert [part.label for part in bare.fresh if part.kind is FreshKind.UNCACHED] == [
        "(prefix)", CAT_ID, DOG_ID, FISH_ID,
    ]  # fmt: skip
    once, twice = (corpus.generate(asked, SHORT).token_ids for _ in range(2))
    assert once == twice


def test_pieces_are_kept_when_scaffolds_are_placed():
    """Of equals the one that is separated as it was encoded is read, wherever it stands."""
    a, b = ChunkPlace("a", "A"), ChunkPlace("b", "B")
    dash, line = KnownScaffold("1", ("a", "b"), (1,)), KnownScaffold("2", ("a", "b"), (2, 3))
    known = {"a": [dash, line]}
    assert place_scaffolds([(9,), a, (2,), (3,), b, (4,)], known) == [
        (9,), ScaffoldPlace(line, (a, b), Span(0, 2)), (4,),
    ]  # fmt: skip
    apart = place_scaffolds([a, (7,), b], known)
    assert apart == [
        ScaffoldPlace(dash, (a, b), Span(0, 1)), (7,), ScaffoldPlace(dash, (a, b), Span(1, 2)),
    ]  # fmt: skip


def test_order_is_kept_when_no_scaffold_is_there_as_a_whole():
    """Only whole scaffolds move chunks, the longest first, and each chunk once."""
    known = {
        "a": [KnownScaffold("1", ("a", "b"), ()), KnownScaffold("2", ("a", "c", "e"), ())],
        "b": [KnownScaffold("3", ("b", "x"), ())],
    }
    assert arranged(["d", "b", "c"], known) == ["d", "b", "c"]
    assert arranged(["d", "b", "c", "a"], known) == ["d", "a", "b", "c"]
    assert arranged(["d", "b", "e", "c", "a"], known) == ["d", "b", "a", "c", "e"]


def test_parts_are_cached_when_a_scaffold_ends_the_prompt(corpus):
    """The very last token is computed, and counts for its chunk."""
    corpus.scaffold([CAT_ID, DOG_ID])
    plan = corpus.plan(f"{CAT}{SEPARATOR}{DOG}").plan
    assert [type(part) for part in plan.parts] == [Cached, Cached, Fresh]
    uses = chunk_uses(corpus.generate(f"{CAT}{SEPARATOR}{DOG}", SHORT))
    assert [(use.label, use.num_tokens) for use in uses] == [
        (CAT_ID, len(CAT + SEPARATOR)), (DOG_ID, len(DOG)),
    ]  # fmt: skip


def test_single_entries_are_read_when_only_a_head_of_a_chunk_stands_there():
    """A part of the last chunk is no whole scaffold, and is read from that chunk's entry."""
    head = HeadTokens((1, 2, 3), num_read=2, num_chars=2)
    cut = [ChunkPlace("a", "one"), (9,), ChunkPlace("b", "tw", head)]
    known = KnownScaffold("s", ("a", "b"), (9,))
    assert place_scaffolds(cut, {"a": [known]}) == cut
    assert place_scaffolds([*cut[:2], ChunkPlace("b", "two")], {"a": [known]}) != cut
