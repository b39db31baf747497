"""The catalog's promises about documents, chunks and their owners."""

from __future__ import annotations

import threading

import pytest

from pc_rag.corpus.catalog import Catalog, DocumentChange, NewChunk, chunk_id_of
from pc_rag.corpus.documents import Document
from pc_rag.errors import IngestError, StoreError
from tests.support.catalog import chunks_of, entry_of, texts_of


@pytest.fixture
def catalog(tmp_path):
    with Catalog(tmp_path / "store", tokenizer_id="bytes") as opened:
        yield opened


def add(catalog, document, **arguments):
    return catalog.add_document(document, chunks_of(document), chunking="lines", **arguments)


def test_document_answers_when_it_is_added(catalog):
    """Its record and its chunks in order, a repeated chunk included."""
    document = Document("one\ntwo\none", id="d", source="a.md", metadata={"k": "v"})
    assert add(catalog, document) is DocumentChange.ADDED
    record = catalog.document("d")
    assert (record.id, record.source, record.metadata) == ("d", "a.md", {"k": "v"})
    assert texts_of(catalog.chunks_of("d")) == ["one", "two", "one"]
    assert catalog.chunk(chunk_id_of("two")).token_ids == tuple(b"two")
    assert catalog.stats().num_tokens == 6


def test_adding_is_a_no_op_when_the_text_is_unchanged(catalog):
    """Pitfall 39: the same document twice changes nothing and says so before it is split."""
    document = Document("one\ntwo", id="d")
    add(catalog, document)
    before = (catalog.generation(), catalog.stats(), catalog.document("d"))
    assert catalog.compare(document, chunking="lines") is DocumentChange.UNCHANGED
    assert add(catalog, document) is DocumentChange.UNCHANGED
    assert (catalog.generation(), catalog.stats(), catalog.document("d")) == before


def test_chunks_stay_when_only_metadata_changes(catalog):
    """Pitfall 39: a metadata edit touches no chunk and no entry."""
    add(catalog, Document("one", id="d", metadata={"date": "1"}), entries=[entry_of("one")])
    moved = Document("one", id="d", source="moved.md", metadata={"date": "1"})
    assert catalog.add_document(moved, [], chunking="lines") is DocumentChange.METADATA
    edited = Document("one", id="d", source="moved.md", metadata={"date": "2"})
    assert catalog.compare(edited, chunking="lines") is DocumentChange.METADATA
    assert catalog.add_document(edited, [], chunking="lines") is DocumentChange.METADATA
    record = catalog.document("d")
    assert (record.source, record.metadata) == ("moved.md", {"date": "2"})
    assert texts_of(catalog.chunks_of("d")) == ["one"]
    assert catalog.entries.of_chunk(chunk_id_of("one")) == (entry_of("one"),)
    assert not catalog.unowned().chunk_ids


def test_new_version_replaces_the_old_one_when_the_text_changes(catalog):
    """Shared chunks stay, dropped ones lose their owner, new ones come."""
    add(catalog, Document("one\ntwo", id="d"))
    assert add(catalog, Document("two\nthree", id="d")) is DocumentChange.UPDATED
    assert texts_of(catalog.chunks_of("d")) == ["two", "three"]
    assert catalog.unowned().chunk_ids == (chunk_id_of("one"),)
    assert catalog.stats().num_tombstones == 0


def test_document_is_updated_when_it_is_chunked_in_another_way(catalog):
    """Other chunk settings make other chunks of the same text."""
    document = Document("one\ntwo", id="d")
    add(catalog, document)
    assert catalog.compare(document, chunking="whole") is DocumentChange.UPDATED
    whole = [NewChunk("one\ntwo", (1, 2))]
    assert catalog.add_document(document, whole, chunking="whole") is DocumentChange.UPDATED
    assert texts_of(catalog.chunks_of("d")) == ["one\ntwo"]


@pytest.mark.parametrize(
    ("chunks", "entries"),
    [
        ([NewChunk("new", (1,)), NewChunk("bad", ())], []),
        ([NewChunk(" new", (1,))], []),
        ([NewChunk("new", (1,))], [entry_of("of another document")]),
    ],
    ids=["no tokens", "not stripped", "unknown chunk"],
)
def test_old_version_answers_when_the_new_one_fails(catalog, chunks, entries):
    """Pitfall 41: a version that cannot be added leaves the old one whole."""
    add(catalog, Document("old", id="d", metadata={"version": "1"}))
    before = (catalog.generation(), catalog.stats(), catalog.document("d"))
    new = Document("new", id="d", metadata={"version": "2"})
    with pytest.raises((IngestError, StoreError)):
        catalog.add_document(new, chunks, chunking="lines", entries=entries)
    assert (catalog.generation(), catalog.stats(), catalog.document("d")) == before
    assert texts_of(catalog.chunks_of("d")) == ["old"]
    assert catalog.chunk(chunk_id_of("new")) is None


def test_one_tombstone_is_left_when_one_of_many_documents_goes(catalog):
    """Pitfall 40: 201 one-line documents of one source, one dropped."""
    documents = [Document(f"line {n}", source="lines.txt") for n in range(201)]
    for document in documents:
        assert add(catalog, document) is DocumentChange.ADDED
    (dropped,) = catalog.owners(chunk_id_of("line 77"))
    assert catalog.remove_document(dropped.id)
    assert not catalog.remove_document(dropped.id)
    stats = catalog.stats()
    assert (stats.num_documents, stats.num_tombstones, stats.num_chunks) == (200, 1, 200)
    assert catalog.unowned().chunk_ids == (chunk_id_of("line 77"),)
    assert len(catalog.documents(source="lines.txt")) == 200
    assert catalog.document(dropped.id) is None
    assert catalog.chunks_of(dropped.id) == ()
    for document in documents:
        if document.text != "line 77":
            assert add(catalog, document) is DocumentChange.UNCHANGED


def test_shared_chunk_stays_when_one_of_its_owners_goes(catalog):
    """Two documents with a chunk in common both own it."""
    add(catalog, Document("shared\nfirst", id="a"))
    add(catalog, Document("shared\nsecond", id="b"))
    shared = chunk_id_of("shared")
    assert [owner.id for owner in catalog.owners(shared)] == ["a", "b"]
    catalog.remove_document("a")
    assert [owner.id for owner in catalog.owners(shared)] == ["b"]
    assert catalog.unowned().chunk_ids == (chunk_id_of("first"),)
    catalog.remove_document("b")
    assert shared in catalog.unowned().chunk_ids


def test_removed_document_is_added_when_it_comes_back(catalog):
    """Its tombstone goes, and its chunks need no new entries."""
    document = Document("one", id="d")
    add(catalog, document, entries=[entry_of("one")])
    catalog.remove_document("d")
    assert catalog.compare(document, chunking="lines") is DocumentChange.ADDED
    assert add(catalog, document) is DocumentChange.ADDED
    assert catalog.stats().num_tombstones == 0
    assert catalog.entries.of_chunk(chunk_id_of("one")) == (entry_of("one"),)


def test_only_a_tenants_document_is_found_when_two_have_the_same_text(catalog):
    """Pitfall 37: documents without ids, one text, two tenants."""
    for tenant in ("a", "b"):
        metadata = {"tenant": tenant, "lang": "en"}
        assert add(catalog, Document("same", metadata=metadata)) is DocumentChange.ADDED
    add(catalog, Document("only b", metadata={"tenant": "b"}))
    same, only_b = chunk_id_of("same"), chunk_id_of("only b")
    assert catalog.chunks_where({"tenant": "a"}) == {same}
    assert catalog.chunks_where({"tenant": "b"}) == {same, only_b}
    assert catalog.chunks_where({"tenant": "b", "lang": "en"}) == {same}
    assert catalog.chunks_where({"tenant": "c"}) == frozenset()
    assert catalog.chunks_where({}) == {same, only_b}
    (owner,) = catalog.owners(same, where={"tenant": "a"})
    assert owner.metadata["tenant"] == "a"
    catalog.remove_document(owner.id)
    assert catalog.chunks_where({"tenant": "a"}) == frozenset()


def test_filter_takes_any_text_when_it_holds_quotes(catalog):
    """Metadata is bound, never part of a statement."""
    metadata = {"it's": "1 OR 1=1; --", "a\0b": "é🙂"}
    add(catalog, Document("one", metadata=metadata))
    assert catalog.chunks_where(metadata) == {chunk_id_of("one")}
    assert catalog.chunks_where({"it's": "1"}) == frozenset()


def test_everything_unowned_goes_when_it_is_purged(catalog):
    """Chunks, entries, vectors, tokens and tombstones; live ones stay."""
    add(catalog, Document("dead\nshared", id="a"), entries=[entry_of("dead"), entry_of("shared")])
    add(catalog, Document("shared", id="b"))
    catalog.remove_document("a")
    unowned = catalog.unowned()
    assert unowned.module_keys == (entry_of("dead").key,)
    assert unowned.document_ids == ("a",)
    assert unowned.num_bytes == entry_of("dead").num_bytes
    assert catalog.purge(unowned) == 1
    assert catalog.chunk(chunk_id_of("dead")) is None
    assert catalog.entries.keys() == {entry_of("shared").key}
    stats = catalog.stats()
    assert (stats.num_tombstones, stats.num_unowned_chunks, stats.num_chunks) == (0, 0, 1)
    assert catalog.purge(catalog.unowned()) == 0


def test_readopted_chunk_stays_when_a_purge_comes_late(catalog):
    """Between ``unowned`` and ``purge`` a document takes the chunk up again."""
    document = Document("one", id="d")
    add(catalog, document, entries=[entry_of("one")])
    add(catalog, Document("late", id="late"))
    catalog.remove_document("d")
    catalog.remove_document("late")
    unowned = catalog.unowned()
    catalog.entries.record([entry_of("late")])
    add(catalog, document)
    add(catalog, Document("two", id="e"), entries=[entry_of("two")])
    catalog.remove_document("e")
    assert catalog.purge(unowned) == 0
    assert texts_of(catalog.chunks_of("d")) == ["one"]
    assert catalog.entries.of_chunk(chunk_id_of("one")) == ()
    assert catalog.entries.keys() == {entry_of("two").key, entry_of("late").key}
    assert set(catalog.unowned().chunk_ids) == {chunk_id_of("two"), chunk_id_of("late")}


def test_generation_changes_when_documents_do(catalog):
    """A process that holds an index knows by it whether the index is current."""
    generations = [catalog.generation()]
    for change in (
        lambda: add(catalog, Document("one", id="d")),
        lambda: add(catalog, Document("two", id="d")),
        lambda: catalog.remove_document("d"),
    ):
        change()
        generations.append(catalog.generation())
    assert len(set(generations)) == 4


def test_tokens_are_kept_apart_when_two_tokenizers_use_a_catalog(tmp_path, catalog):
    """Another model's token ids are never handed out."""
    add(catalog, Document("one", id="d"))
    with Catalog(tmp_path / "store", tokenizer_id="other") as other:
        (chunk,) = other.chunks_of("d")
        assert (chunk.text, chunk.token_ids) == ("one", None)
        assert other.stats().num_tokens == 0
        other.record_tokens(chunk.id, (7, 8))
        assert other.chunk(chunk.id).token_ids == (7, 8)
    assert catalog.chunk(chunk_id_of("one")).token_ids == tuple(b"one")


def test_settings_last_when_a_catalog_is_opened_again(tmp_path, catalog):
    """The slot length of a corpus is fixed at its creation."""
    assert catalog.setting("slot_tokens") is None
    catalog.put_setting("slot_tokens", "256")
    catalog.put_setting("slot_tokens", "512")
    with Catalog(tmp_path / "store", tokenizer_id="bytes") as again:
        assert again.setting("slot_tokens") == "512"


def test_nothing_is_lost_when_threads_write_at_once(catalog):
    """Every acknowledged document answers, and shared chunks are stored once."""

    def write(worker):
        for n in range(10):
            add(catalog, Document(f"shared\nown {worker} {n}", id=f"{worker}-{n}"))

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(catalog.documents()) == 40
    assert len(catalog.owners(chunk_id_of("shared"))) == 40
    assert catalog.stats().num_chunks == 41
    assert catalog.generation() == 40
