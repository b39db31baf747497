"""Documents are taken in once, whole or not at all, and the report says what it cost."""

from __future__ import annotations

import shutil
import string

import pytest

from pc_rag.corpus import Corpus, Document, read_paths
from pc_rag.errors import IngestError, LayoutError, StoreIOError
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.types import HitKind, MissReason, Tier
from tests.support.corpora import (
    CAT,
    DOG,
    EMBEDDING,
    FISH,
    SHORT,
    TEXTS,
    chunk_uses,
    named,
    opened,
    request_of,
    tiny_engine,
)

LONG = " ".join(f"word{number}" for number in range(1600))[:10_000]


MEDIUM = LONG[:2_000]


@pytest.fixture
def corpus():
    with opened() as corpus:
        yield corpus


def test_nothing_is_encoded_when_the_same_folder_is_added_twice(corpus, tmp_path):
    """Pitfall 39: files read again are known, chunk by chunk."""
    files = tmp_path / "files"
    files.mkdir()
    for number, text in enumerate(TEXTS):
        (files / f"{number}.txt").write_text(text)
    first = corpus.add(read_paths([files]))
    second = corpus.add(read_paths([files]))
    assert (first.num_added, first.num_encoded) == (3, 3)
    assert (second.num_unchanged, second.num_documents, second.num_encoded) == (3, 3, 0)
    (files / "1.txt").write_text(f"{DOG} It was brown.")
    third = corpus.add(read_paths([files]))
    assert (third.num_updated, third.num_unchanged, third.num_encoded) == (1, 2, 1)


def test_nothing_is_encoded_when_only_metadata_changes(corpus):
    """Pitfall 39: the edit shows, the chunks stay."""
    corpus.add([Document(CAT, id="c", metadata={"page": "1"})])
    report = corpus.add([Document(CAT, id="c", source="new.txt", metadata={"page": "2"})])
    assert (report.num_metadata_only, report.num_encoded) == (1, 0)
    (chunk,) = corpus.search("cat", 1)
    assert (chunk.metadata, chunk.sources) == ({"page": "2"}, ("new.txt",))


def test_unchanged_text_is_not_split_or_tokenised_again(corpus, monkeypatch):
    """The catalog knows its chunks and their tokens; so re-adding costs a comparison."""
    texts = named(a=MEDIUM, b=CAT)
    first = corpus.prepare(texts)
    corpus.add(first)
    tokenizer = corpus.engine.loaded.tokenizer
    monkeypatch.setattr(type(tokenizer), "encode_text", None)
    again = corpus.prepare(texts)
    assert [each.chunks for each in again] == [each.chunks for each in first]
    assert corpus.add(again).num_unchanged == 2


def test_one_tombstone_is_left_when_one_of_many_documents_goes():
    """Pitfall 40: 201 one-line documents of one source, one dropped."""
    lines = [f"Line {number} tells of the number {number}." for number in range(201)]
    with opened() as corpus:
        report = corpus.add(Document(line, id=str(i), source="s") for i, line in enumerate(lines))
        assert (report.num_added, report.num_encoded) == (201, 201)
        assert corpus.remove("77")
        assert not corpus.remove("77")
        stats = corpus.stats().catalog
        assert (stats.num_tombstones, stats.num_documents, stats.num_chunks) == (1, 200, 200)
        found = corpus.search("Line 77 tells of the number 77", 201)
        assert sorted(chunk.text for chunk in found) == sorted(lines[:77] + lines[78:])
        assert corpus.answer("Line 76", 1, config=SHORT).chunks[0].text in lines


def test_old_version_answers_when_encoding_the_new_one_fails(corpus, monkeypatch):
    """Pitfall 41: a document changes in one step, or not at all."""
    corpus.add([Document(CAT, id="a")])
    before = corpus.answer("cat", 1, config=SHORT)

    def fail(*arguments, **keywords):
        raise StoreIOError("the medium is gone")

    with monkeypatch.context() as patch:
        patch.setattr(corpus.engine.store, "put", fail)
        with pytest.raises(StoreIOError):
            corpus.add([Document(DOG, id="a")])
    after = corpus.answer("cat", 1, config=SHORT)
    assert [chunk.text for chunk in after.chunks] == [CAT]
    assert after.completion.token_ids == before.completion.token_ids
    assert chunk_uses(after)[0].hit_kind is HitKind.EXACT
    assert corpus.add([Document(DOG, id="a")]).num_updated == 1
    assert [chunk.text for chunk in corpus.search("cat", 2)] == [DOG]


def test_documents_before_are_in_when_one_is_refused(corpus):
    """A bad document stops the ingest; what came before it answers."""

    def documents():
        yield CAT
        yield DOG
        yield Document("lone \ud800 surrogate")

    with pytest.raises(IngestError, match="surrogate"):
        corpus.add(documents())
    assert {chunk.text for chunk in corpus.search("dog", 5)} == {CAT, DOG}
    assert all(use.is_hit for use in chunk_uses(corpus.answer("dog", 2, config=SHORT)))


@pytest.mark.parametrize("text", ["", " \n\t ", "\u3000"])
def test_document_has_no_chunk_when_it_is_blank(corpus, text):
    """Pitfall 10: it is known, and answers nothing."""
    report = corpus.add([text, CAT])
    assert (report.num_added, report.num_encoded) == (2, 1)
    assert [chunk.text for chunk in corpus.search("cat", 5)] == [CAT]


def test_document_of_one_token_is_answered_from(corpus):
    """Pitfall 10: the shortest chunk there is."""
    corpus.add(["x"])
    answer = corpus.answer("x", 1, config=SHORT)
    uncached = corpus.answer("x", 1, config=SHORT, reuse=False)
    assert chunk_uses(answer)[0].num_tokens == 1
    assert answer.completion.token_ids == uncached.completion.token_ids


def test_document_of_ten_thousand_tokens_is_cut(corpus):
    """Pitfall 10: every word is in a chunk, and no chunk is too long."""
    (prepared,) = corpus.prepare([LONG])
    assert sum(len(chunk.token_ids) for chunk in prepared.chunks) > 9_500
    assert max(len(chunk.token_ids) for chunk in prepared.chunks) <= 200
    assert " ".join(chunk.text for chunk in prepared.chunks).split() == LONG.split()
    assert corpus.add([prepared]).num_encoded == len(prepared.chunks)


def test_chunk_is_refused_when_it_is_longer_than_a_slot():
    """Pitfall 10: with its tokens and the slot's, before anything is encoded."""
    settings = {"position_policy": "reserved", "slot_tokens": 40}
    with tiny_engine(**settings) as engine, Corpus(
        engine, embedding=EMBEDDING, chunk_tokens=100
    ) as corpus:  # fmt: skip
        with pytest.raises(LayoutError, match=rf"{len(CAT)} tokens, a slot holds 40"):
            corpus.add(["short", CAT])
        assert [chunk.text for chunk in corpus.search("cat", 3)] == ["short"]


@pytest.mark.parametrize("documents", [CAT, Document(CAT)])
def test_single_document_is_refused_when_a_list_is_wanted(corpus, documents):
    """A text is an iterable of one-character texts to Python."""
    with pytest.raises(IngestError, match="pass a list"):
        corpus.add(documents)
    with pytest.raises(IngestError, match="pass a list"):
        corpus.prepare(documents)
    assert corpus.stats().catalog.num_documents == 0


def test_entries_are_encoded_again_when_the_store_was_deleted(tmp_path):
    """Pitfall 42: the catalog alone does not make a chunk stored."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
        before = corpus.answer("dog", 2, config=SHORT)
    shutil.rmtree(tmp_path / "kv")
    with opened(tmp_path) as corpus:
        answer = corpus.answer("dog", 2, config=SHORT)
        assert [use.miss_reason for use in chunk_uses(answer)] == [MissReason.NOT_STORED] * 2
        assert answer.completion.metrics.num_cache_creation_tokens
        assert answer.completion.token_ids == before.completion.token_ids
        report = corpus.add(TEXTS)
        assert (report.num_unchanged, report.num_encoded) == (3, 1)
        assert all(use.is_hit for use in chunk_uses(corpus.answer("dog", 3, config=SHORT)))


def test_eviction_is_told_when_more_is_ingested_than_the_cap_holds(tmp_path):
    """Pitfall 45: pinned chunks stay, and the report says what went."""
    texts = [f"{letter * 3} is chunk number {i}. {CAT}" for i, letter in
             enumerate(string.ascii_lowercase[:12])]  # fmt: skip
    with opened(tmp_path, disk_bytes=700_000, memory_bytes=200_000) as corpus:
        pinned = corpus.add([DOG, FISH], pinned=True)
        assert (pinned.num_dropped, pinned.num_evicted) == (0, 0)
        report = corpus.add(texts)
        disk = corpus.stats().store[-1]
        assert report.num_evicted == disk.num_evictions > 0
        assert disk.resident_bytes <= 700_000
        uses = chunk_uses(corpus.answer("dog barked at every passing train", 1, config=SHORT))
        assert uses[0].is_hit
        lost = corpus.answer("aaa is chunk number 0", 1, config=SHORT)
        assert chunk_uses(lost)[0].miss_reason is MissReason.NOT_STORED


def test_drops_are_told_when_pins_leave_no_room(tmp_path):
    """Pitfall 45: what the store refused is counted, and still answered from."""
    with opened(tmp_path, disk_bytes=300_000) as corpus:
        report = corpus.add([*TEXTS, *(f"Fact {i}: {CAT}" for i in range(6))], pinned=True)
        assert report.num_dropped > 0
        assert report.num_encoded == 9
        assert corpus.stats().catalog.num_entries == 9 - report.num_dropped
        assert corpus.answer("Fact 5", 2, config=SHORT).completion.token_ids


def test_stored_entries_are_pinned_when_they_are_added_again_as_pinned(tmp_path):
    """A pin is asked for the chunk, be it stored already or not."""
    with opened(tmp_path, disk_bytes=500_000, memory_bytes=1_000) as corpus:
        corpus.add([DOG])
        assert corpus.add([DOG], pinned=True).num_encoded == 0
        corpus.add([f"Fact {i}: {CAT}" for i in range(12)])
        key = request_of(corpus, "a dog barked at every passing train", 1).plan.cached[-1].key
        assert corpus.engine.store.remove(key), "it was evicted in spite of its pin"


@pytest.mark.parametrize("num_prefixes", [1, 2])
def test_estimate_is_what_the_store_then_holds(tmp_path, num_prefixes):
    """Pitfall 48: within 5 %, the prefixes included."""
    with opened(tmp_path) as corpus:
        if num_prefixes > 1:
            corpus.adopt_prefix("Another head: ").result()
        prepared = corpus.prepare([MEDIUM, CAT, MEDIUM])
        estimate = corpus.estimate(prepared)
        report = corpus.add(prepared)
        (disk,) = (stats for stats in corpus.stats().store if stats.tier is Tier.DISK)
        assert estimate.num_bytes == pytest.approx(disk.resident_bytes, rel=0.05)
        prefix_tokens = sum(len(prefix.token_ids) for prefix in corpus._prefixes.encoded)
        assert report.num_bytes + prefix_tokens * 768 == estimate.num_bytes
        assert estimate.num_chunks * num_prefixes == report.num_encoded
        assert (estimate.num_documents, estimate.num_unchanged) == (3, 0)
        nothing = corpus.estimate(corpus.prepare([MEDIUM, CAT]))
        assert (nothing.num_chunks, nothing.num_bytes, nothing.num_unchanged) == (0, 0, 2)


def test_nothing_is_estimated_when_nothing_is_added(corpus):
    """The prefix alone is not encoded by an ingest."""
    assert corpus.estimate([]).num_bytes == 0


def test_progress_rises_to_the_report_when_an_ingest_runs(corpus):
    """One call an entry, and the last says what the report says."""
    seen = []
    report = corpus.add(TEXTS, on_progress=seen.append)
    assert [progress.num_chunks for progress in seen] == [1, 2, 3]
    assert seen[-1].num_tokens == report.num_encoded_tokens == sum(map(len, TEXTS))
    assert seen[-1].num_bytes == report.num_bytes == sum(map(len, TEXTS)) * 768
    assert 0 < seen[0].seconds <= seen[-1].seconds <= report.seconds
    assert report.tokens_per_second > 0


def test_chunk_is_encoded_once_when_two_documents_share_it(corpus):
    """The text is the chunk; both documents own it, also within one document."""
    report = corpus.add([Document(CAT, id="a"), Document(CAT, id="b", source="b")])
    assert (report.num_added, report.num_encoded) == (2, 1)
    (chunk,) = corpus.search("cat", 3)
    assert chunk.sources == ("", "b")
    corpus.remove("a")
    assert corpus.gc().num_entries == 0
    assert chunk_uses(corpus.answer("cat", 1, config=SHORT))[0].is_hit


def test_published_entries_are_known_when_an_earlier_run_was_cut_off(monkeypatch):
    """Entries that were stored but not noted are noted the next time, so that gc finds them."""
    with opened() as corpus:
        with monkeypatch.context() as patch:
            patch.setattr(corpus._catalog, "add_document", lambda *a, **k: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                corpus.add([Document(CAT, id="a")])
        report = corpus.add([Document(CAT, id="a")])
        assert (report.num_added, report.num_encoded) == (1, 0)
        assert corpus.stats().catalog.num_entries == 1
        corpus.remove("a")
        assert corpus.gc().num_entries == 1


def test_entry_goes_with_its_chunk_when_a_question_had_it_encoded(corpus):
    """What was encoded on demand is reclaimed too, though no ingest noted it."""
    corpus.add([Document(CAT, id="a")])
    key = request_of(corpus, "cat", 1).plan.cached[-1].key
    corpus.engine.store.remove(key)
    corpus._catalog.entries.forget([key])
    corpus.answer("cat", 1, config=SHORT)
    corpus.remove("a")
    report = corpus.gc()
    assert (report.num_entries, report.num_bytes) == (1, len(CAT) * 768)
    assert not corpus.engine.store.remove(key)


@pytest.mark.parametrize("kind", [MemoryTier, DiskTier])
def test_bytes_are_free_when_a_removed_document_is_collected(tmp_path, kind):
    """Collecting takes the entries of what no document owns, and nothing else."""
    store = MemoryTier(10**8) if kind is MemoryTier else DiskTier(tmp_path)
    with tiny_engine(store) as engine, Corpus(engine, embedding=EMBEDDING) as corpus:
        shared = f"{CAT}\n\n{FISH}"
        corpus.add([Document(CAT + "\n\n" + DOG * 3, id="a"), Document(shared, id="b")])
        before = store.stats()[0]
        assert corpus.remove("a")
        assert corpus.gc().num_documents == 1
        after = store.stats()[0]
        assert after.num_entries < before.num_entries
        assert after.resident_bytes < before.resident_bytes
        stats = corpus.stats().catalog
        assert (stats.num_tombstones, stats.num_unowned_chunks) == (0, 0)
        assert all(use.is_hit for use in chunk_uses(corpus.answer("cat", 4, config=SHORT)))
        again = corpus.gc()
        assert (again.num_chunks, again.num_entries, again.num_bytes) == (0, 0, 0)


def test_item_is_refused_when_it_is_no_document():
    """The documents before it are taken in."""
    with opened(has_retrieval=False) as corpus:
        with pytest.raises(IngestError, match="123 is a int"):
            corpus.add([CAT, 123])
        assert corpus.stats().catalog.num_documents <= 1
        with pytest.raises(IngestError, match="123 is a int"):
            corpus.prepare([123])
