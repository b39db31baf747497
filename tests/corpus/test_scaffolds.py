"""Scaffolds of a corpus: made, kept, read where they fit, and gone with their chunks."""

from __future__ import annotations

import shutil

import pytest

from pc_rag.corpus import Document, PromptFormat, chunk_id_of
from pc_rag.corpus.places import ChunkPlace, KnownScaffold, ScaffoldPlace, place_scaffolds
from pc_rag.corpus.places import side_by_side as arranged
from pc_rag.errors import IngestError, LayoutError, StoreFull
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
from tests.support.counted_corpora import counted_corpus
from tests.support.processes import run_script

CAT_ID, DOG_ID, FISH_ID = map(chunk_id_of, TEXTS)
SEPARATOR = "\n\n"


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add(named(cat=CAT, dog=DOG, fish=FISH))
        yield corpus


def prompt(corpus, *texts, between=SEPARATOR, before="", question="Who sat?"):
    """A question about texts, as the corpus would put it."""
    return corpus.prompt_format.messages(question, [before + between.join(texts)])


def read(request):
    """What is read of chunks: text, key and hit kind of each part."""
    parts = [part for part in request.plan.cached if part.label != "(prefix)"]
    return [(bytes(part.token_ids).decode(), part.key, part.hit_kind) for part in parts]


def texts_read(request):
    return [text for text, _, _ in read(request)]


def num_keys(request):
    return len({key for _, key, _ in read(request)})


def test_cost_is_reported_when_a_scaffold_is_made():
    """1 + m entries; tokens and bytes of the joint one, and what the store then holds."""
    with counted_corpus() as counted:
        counted.corpus.add(TEXTS)
        before, num_before = counted.stats, counted.num_encoded
        report = counted.corpus.scaffold([CAT_ID, DOG_ID, FISH_ID])
        per_token = counted.corpus.engine.bytes_per_token
        assert report.chunk_ids == (CAT_ID, DOG_ID, FISH_ID)
        assert report.num_tokens == len(SEPARATOR.join(TEXTS).encode())
        assert report.num_bytes == report.num_tokens * per_token
        assert (report.num_entries, report.num_prefixes, report.num_encoded) == (4, 1, 1)
        assert counted.num_encoded == num_before + 1
        after = counted.stats
        assert after.num_scaffolds == 1
        assert after.num_entries == before.num_entries + 1
        assert after.entry_bytes == before.entry_bytes + report.num_bytes


def test_nothing_is_encoded_when_a_scaffold_is_there_already():
    """Idempotent; an evicted entry is encoded again."""
    with counted_corpus() as counted:
        counted.corpus.add(TEXTS)
        counted.corpus.scaffold([CAT_ID, DOG_ID])
        num_encoded = counted.num_encoded
        assert counted.corpus.scaffold([CAT_ID, DOG_ID]).num_encoded == 0
        assert counted.num_encoded == num_encoded
        assert counted.corpus.scaffolds == ((CAT_ID, DOG_ID),)
        ((_, key, _), _) = read(counted.corpus.plan(prompt(counted.corpus, CAT, DOG)))
        counted.entries.remove(key)
        assert counted.corpus.scaffold([CAT_ID, DOG_ID]).num_encoded == 1


RESTARTED = """
    import json, sys
    from pathlib import Path
    from tests.corpus.test_scaffolds import CAT, CAT_ID, DOG, DOG_ID, SHORT, prompt
    from tests.support.corpora import chunk_uses, opened

    with opened(Path(sys.argv[1]), has_retrieval=False) as corpus:
        uses = chunk_uses(corpus.generate(prompt(corpus, CAT, DOG), SHORT))
        again = corpus.scaffold([CAT_ID, DOG_ID]).num_encoded
        print(json.dumps([list(corpus.scaffolds), [use.hit_kind for use in uses], again]))
"""


def test_scaffold_is_read_when_another_process_opens_the_corpus(tmp_path):
    """Pitfall 43: full hits under another hash seed, and nothing to encode."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add(TEXTS)
        corpus.scaffold([CAT_ID, DOG_ID])
    assert run_script(RESTARTED, tmp_path, seed="7") == [
        [[CAT_ID, DOG_ID]], ["exact", "exact"], 0,
    ]  # fmt: skip


def test_scaffold_is_read_when_another_opening_made_it(tmp_path):
    """A corpus follows what others do to its folder."""
    with opened(tmp_path, has_retrieval=False) as one:
        one.add(TEXTS)
        assert num_keys(one.plan(prompt(one, CAT, DOG))) == 2
        with opened(tmp_path, has_retrieval=False) as other:
            other.scaffold([CAT_ID, DOG_ID])
        assert num_keys(one.plan(prompt(one, CAT, DOG))) == 1


def test_scaffold_stays_when_it_is_pinned_and_the_store_is_full(tmp_path):
    """Pitfall 45: what is pinned is never evicted; also where it was stored unpinned before."""
    with opened(tmp_path, memory_bytes=1_000, disk_bytes=1_000_000) as corpus:
        corpus.add([CAT, DOG])
        corpus.scaffold([CAT_ID, DOG_ID])
        assert corpus.scaffold([CAT_ID, DOG_ID], pinned=True).num_encoded == 0
        report = corpus.add([f"Fact {i}: {FISH}" for i in range(30)])
        assert report.num_evicted
        assert corpus.scaffold([CAT_ID, DOG_ID]).num_encoded == 0


@pytest.mark.parametrize(
    ("ids", "messages"),
    [
        ([], ["got 0 chunks"]),
        ([CAT_ID], ["got 1 chunks", "at least 2"]),
        (CAT_ID, ["got 0 chunks"]),
        ([CAT_ID, DOG_ID, CAT_ID], [f"repeated: {CAT_ID}"]),
        (["x", DOG_ID, "y"], ["no document has: x, y"]),
        (["x", "x"], ["repeated: x", "no document has: x"]),
    ],
)
def test_scaffold_is_refused_when_its_chunks_cannot_be(corpus, ids, messages):
    """All that is wrong in one message, and nothing is made."""
    with pytest.raises(IngestError) as caught:
        corpus.scaffold(ids)
    for message in messages:
        assert message in str(caught.value)
    assert corpus.scaffolds == ()


def test_scaffold_is_refused_when_it_is_longer_than_the_context():
    """With the numbers; each chunk alone would fit."""
    with opened(context_limit=280) as corpus:
        corpus.add(TEXTS)
        num_tokens = len(SEPARATOR.join(TEXTS).encode())
        with pytest.raises(LayoutError, match=rf"{num_tokens} tokens.* context ends at 280"):
            corpus.scaffold([CAT_ID, DOG_ID, FISH_ID])
        assert corpus.scaffolds == ()


def test_nothing_is_left_when_the_store_has_no_room():
    """Neither a scaffold that every request would encode anew, nor bytes."""
    with counted_corpus() as counted:
        counted.corpus.add(TEXTS)
        before = counted.stats
        counted.entries.is_full = True
        with pytest.raises(StoreFull):
            counted.corpus.scaffold([CAT_ID, DOG_ID])
        assert counted.corpus.scaffolds == ()
        assert counted.stats == before


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


def test_every_chunk_is_a_miss_when_the_entry_was_evicted(corpus):
    """The request encodes the joint entry, and the next one reads it."""
    corpus.scaffold([CAT_ID, DOG_ID])
    ((_, key, _), _) = read(corpus.plan(prompt(corpus, CAT, DOG)))
    corpus.engine.store.remove(key)
    uses = chunk_uses(corpus.generate(prompt(corpus, CAT, DOG), SHORT))
    assert [use.miss_reason for use in uses] == [MissReason.NOT_STORED] * 2
    assert sum(use.num_encoded_tokens for use in uses) == len(f"{CAT}{SEPARATOR}{DOG}")
    uses = chunk_uses(corpus.generate(prompt(corpus, CAT, DOG), SHORT))
    assert [use.hit_kind for use in uses] == [HitKind.EXACT] * 2


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


def test_scaffold_is_gone_when_a_document_of_it_changes(corpus):
    """It is read no more at once, and gc reclaims it: its entry, bytes and chunk."""
    report = corpus.scaffold([CAT_ID, DOG_ID])
    ((_, key, _), _) = read(corpus.plan(prompt(corpus, CAT, DOG)))
    corpus.add(named(dog="Another dog slept in the sun all day and barked at nobody."))
    assert corpus.scaffolds == ()
    assert key not in {each for _, each, _ in read(corpus.plan(prompt(corpus, CAT, DOG)))}
    before = corpus.stats().catalog
    collected = corpus.gc()
    assert (collected.num_chunks, collected.num_entries) == (1, 2)
    after = corpus.stats().catalog
    num_bytes = report.num_bytes + len(DOG) * corpus.engine.bytes_per_token
    assert before.entry_bytes - after.entry_bytes == collected.num_bytes == num_bytes
    assert not corpus.engine.store.remove(key), "it has left the store"
    assert corpus.unscaffold([CAT_ID, DOG_ID]) is False


def test_scaffold_is_back_when_its_document_is_before_gc(corpus):
    """A tombstone is no loss until it is reclaimed."""
    corpus.scaffold([CAT_ID, DOG_ID])
    corpus.remove("dog")
    assert corpus.scaffolds == ()
    corpus.add(named(dog=DOG))
    assert corpus.scaffolds == ((CAT_ID, DOG_ID),)
    assert corpus.gc().num_entries == 0
    assert num_keys(corpus.plan(prompt(corpus, CAT, DOG))) == 1


def test_entry_stays_when_a_chunk_has_the_text_of_a_scaffold(corpus):
    """They share a key: dropping the one must not take the other's KV."""
    joint = f"{CAT}{SEPARATOR}{DOG}"
    corpus.add([Document(joint, id="joint", is_whole=True)])
    assert corpus.scaffold([CAT_ID, DOG_ID]).num_encoded == 0
    assert corpus.unscaffold([CAT_ID, DOG_ID]) is True
    (use,) = chunk_uses(corpus.generate(prompt(corpus, joint), SHORT))
    assert use.hit_kind is HitKind.EXACT


def test_entries_leave_the_store_when_a_scaffold_is_dropped(corpus):
    """The chunks keep theirs; dropping it again drops nothing."""
    before = corpus.stats().catalog
    corpus.scaffold([CAT_ID, DOG_ID])
    ((_, key, _), _) = read(corpus.plan(prompt(corpus, CAT, DOG)))
    assert corpus.unscaffold([DOG_ID, CAT_ID]) is False
    assert corpus.unscaffold([CAT_ID, DOG_ID]) is True
    assert corpus.unscaffold([CAT_ID, DOG_ID]) is False
    assert not corpus.engine.store.remove(key)
    assert corpus.stats().catalog == before
    uses = chunk_uses(corpus.generate(prompt(corpus, CAT, DOG), SHORT))
    assert [use.hit_kind for use in uses] == [HitKind.EXACT, HitKind.COMPOSED]


HEAD = "Read this first.\n"


def test_scaffold_is_encoded_behind_a_prefix_that_is_adopted(corpus):
    """Exact behind it too; what comes later is encoded behind both; forgetting takes both back."""
    corpus.scaffold([CAT_ID, DOG_ID])
    assert corpus.adopt_prefix(HEAD).result(60) == 4
    asked = f"{HEAD}{CAT}{SEPARATOR}{DOG} Why?"
    uses = chunk_uses(corpus.generate(asked, SHORT))
    assert [use.hit_kind for use in uses] == [HitKind.EXACT] * 2
    report = corpus.scaffold([DOG_ID, FISH_ID])
    assert (report.num_prefixes, report.num_entries, report.num_encoded) == (2, 6, 2)
    num_removed = corpus.forget_prefix(HEAD)
    assert num_removed == 1 + 3 + 2, "the prefix, three chunks, two scaffolds"
    assert corpus.stats().catalog.num_entries == 3 + 2


def test_scaffolds_are_encoded_again_when_the_store_was_deleted(tmp_path):
    """Pitfall 42: what went with the folder is restored, scaffolds too."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add(TEXTS)
        corpus.upkeep.restore()
        corpus.scaffold([CAT_ID, DOG_ID])
    shutil.rmtree(tmp_path / "kv")
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.upkeep.restore()
        assert corpus.scaffold([CAT_ID, DOG_ID]).num_encoded == 0


def test_entry_is_noted_when_a_request_made_it_under_another_model(tmp_path):
    """What another dtype stores for a request goes with the scaffold."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add(TEXTS)
        corpus.scaffold([CAT_ID, DOG_ID])
    with opened(tmp_path, has_retrieval=False, tenant="other") as corpus:
        corpus.generate(prompt(corpus, CAT, DOG), SHORT)
        ((_, key, _), _) = read(corpus.plan(prompt(corpus, CAT, DOG)))
    with opened(tmp_path, has_retrieval=False) as corpus:
        assert corpus.unscaffold([CAT_ID, DOG_ID]) is True
        assert not corpus.engine.store.remove(key)


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
