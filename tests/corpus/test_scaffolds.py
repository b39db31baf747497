"""Scaffolds of a corpus: made, kept, and gone with their chunks."""

from __future__ import annotations

import shutil

import pytest

from pc_rag.corpus import Document
from pc_rag.errors import IngestError, LayoutError, StoreFull
from pc_rag.types import HitKind, MissReason
from tests.support.corpora import CAT, DOG, FISH, SHORT, TEXTS, chunk_uses, named, opened
from tests.support.counted_corpora import counted_corpus
from tests.support.processes import run_script
from tests.support.scaffolds import (
    CAT_ID,
    DOG_ID,
    FISH_ID,
    SEPARATOR,
    num_keys,
    prompt,
    read,
)

HEAD = "Read this first.\n"


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add(named(cat=CAT, dog=DOG, fish=FISH))
        yield corpus


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
    from tests.support.corpora import CAT, DOG, SHORT, chunk_uses, opened
    from tests.support.scaffolds import CAT_ID, DOG_ID, prompt

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
        (CAT_ID, ["got a single text", "pass a list of ids"]),
        (None, ["got a NoneType", "pass a list of ids"]),
        ([None, DOG_ID], ["an id of a chunk is a str; got NoneType"]),
        ([DOG_ID, ["x"], {}], ["got dict, list", "chunk.id"]),
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


def test_nothing_is_left_when_the_store_has_room_for_a_part_only(monkeypatch):
    """Behind two prefixes, of which the second is refused: the first goes again."""
    with counted_corpus() as counted:
        counted.corpus.add(TEXTS)
        counted.corpus.adopt_prefix(HEAD).result(60)
        before = counted.entries.stats()[0].num_entries
        put = counted.entries.put

        def put_one(entry, *, pinned=False):
            put(entry, pinned=pinned)
            counted.entries.is_full = True

        monkeypatch.setattr(counted.entries, "put", put_one)
        with pytest.raises(StoreFull):
            counted.corpus.scaffold([CAT_ID, DOG_ID])
        assert counted.entries.stats()[0].num_entries == before
        assert counted.corpus.scaffolds == ()


def test_scaffold_is_complete_when_an_adoption_ends_meanwhile(corpus, monkeypatch):
    """An adoption that had passed all scaffolds before this one was known: it is encoded here."""
    record = corpus._catalog.scaffolds.record
    adopted = []

    def adopt_first(*arguments, **options):
        if not adopted:
            adopted.append(corpus.adopt_prefix(HEAD).result(60))
        return record(*arguments, **options)

    monkeypatch.setattr(corpus._catalog.scaffolds, "record", adopt_first)
    report = corpus.scaffold([CAT_ID, DOG_ID])
    assert adopted == [3]
    assert (report.num_prefixes, report.num_encoded) == (2, 2)
    uses = chunk_uses(corpus.generate(f"{HEAD}{CAT}{SEPARATOR}{DOG} Why?", SHORT))
    assert [use.hit_kind for use in uses] == [HitKind.EXACT] * 2


def test_nothing_is_left_when_a_prefix_is_forgotten_meanwhile(corpus, monkeypatch):
    """What was encoded behind it leaves the store with it."""
    corpus.adopt_prefix(HEAD).result(60)
    record = corpus._catalog.scaffolds.record

    def forget_first(*arguments, **options):
        corpus.forget_prefix(HEAD)
        return record(*arguments, **options)

    monkeypatch.setattr(corpus._catalog.scaffolds, "record", forget_first)
    corpus.scaffold([CAT_ID, DOG_ID])
    stats = corpus.stats()
    assert stats.catalog.num_entries == 3 + 1
    assert stats.store[0].num_entries == 3 + 1 + 1, "the corpus's own prefix"


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


def test_scaffold_is_complete_when_it_came_during_an_adoption(corpus, monkeypatch):
    """An adoption encodes what was made known while it encoded the rest."""
    encode_live = corpus._prefixes._encode_live
    made = []

    def scaffold_meanwhile(prefix):
        num_encoded = encode_live(prefix)
        if not made:
            made.append(corpus.scaffold([CAT_ID, DOG_ID]))
        return num_encoded

    monkeypatch.setattr(corpus._prefixes, "_encode_live", scaffold_meanwhile)
    assert corpus.adopt_prefix(HEAD).result(60) == 3 + 1
    assert made[0].num_prefixes == 1
    uses = chunk_uses(corpus.generate(f"{HEAD}{CAT}{SEPARATOR}{DOG} Why?", SHORT))
    assert [use.hit_kind for use in uses] == [HitKind.EXACT] * 2


@pytest.mark.parametrize(
    "begin", [lambda c: c.adopt_prefix(HEAD).result(60), lambda c: c.warm(TEXTS).result(60)]
)
def test_scaffold_stays_gone_when_it_was_dropped_while_it_was_encoded(corpus, monkeypatch, begin):
    """What works in the background brings nothing back, and leaves no bytes of it."""
    corpus.scaffold([CAT_ID, DOG_ID])
    ((_, key, _), _) = read(corpus.plan(prompt(corpus, CAT, DOG)))
    corpus.engine.store.remove(key)
    make = corpus._scaffolds._make

    def drop_first(*arguments, **options):
        assert corpus.unscaffold([CAT_ID, DOG_ID]) is True
        return make(*arguments, **options)

    monkeypatch.setattr(corpus._scaffolds, "_make", drop_first)
    begin(corpus)
    assert corpus.scaffolds == ()
    assert corpus.stats().catalog.num_entries == sum(
        t.num_entries for t in corpus.stats().store
    ) - len(corpus.prefixes)


def test_one_entry_is_reported_when_all_prefixes_share_it():
    """Under visibility ``module`` chunks see no prefix: bytes are counted once."""
    with counted_corpus(visibility="module") as counted:
        counted.corpus.add(TEXTS)
        counted.corpus.adopt_prefix(HEAD).result(60)
        before = counted.stats
        report = counted.corpus.scaffold([CAT_ID, DOG_ID])
        assert (report.num_prefixes, report.num_entries, report.num_encoded) == (1, 3, 1)
        assert counted.stats.entry_bytes - before.entry_bytes == report.num_bytes


def test_entry_is_noted_again_when_the_scaffold_was_collected_meanwhile(tmp_path):
    """What a request stored of a former scaffold goes with the new one, too."""
    with opened(tmp_path, has_retrieval=False, tenant="other") as maker:
        maker.add(named(cat=CAT, dog=DOG))
        maker.scaffold([CAT_ID, DOG_ID])
        with opened(tmp_path, has_retrieval=False) as corpus:
            asked = prompt(corpus, CAT, DOG)
            request = corpus.plan(asked)
            ((_, key, _), _) = read(request)
            for _ in range(2):
                corpus.generate(asked, SHORT)
                assert not corpus.engine.source.missing([request.recipes[key]])
                assert maker.remove("dog")
                maker.gc()
                assert corpus.engine.source.missing([request.recipes[key]]) == [key]
                corpus.engine.store.remove(key)  # out of this process's memory
                maker.add(named(dog=DOG))
                maker.scaffold([CAT_ID, DOG_ID])


def test_scaffold_is_dropped_when_a_chunk_of_it_is_gone(corpus):
    """Also before gc; then it is not back when its document is."""
    corpus.scaffold([CAT_ID, DOG_ID])
    corpus.remove("dog")
    assert corpus.unscaffold([CAT_ID, DOG_ID]) is True
    corpus.add(named(dog=DOG))
    assert corpus.scaffolds == ()


def test_scaffold_is_left_out_when_it_does_not_fit_behind_an_adopted_prefix():
    """Its chunks fit apart, and are encoded."""
    with opened(context_limit=280) as corpus:
        corpus.add(TEXTS)
        corpus.scaffold([CAT_ID, DOG_ID])
        assert corpus.adopt_prefix("x" * 180).result(60) == len(TEXTS)
