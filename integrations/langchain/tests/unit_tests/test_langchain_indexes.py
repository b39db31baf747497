from __future__ import annotations

import threading

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_pc_rag import PromptCacheIndex

from pc_rag.errors import IngestError, StoreIOError
from tests.support.corpora import CAT, DOG, FISH, SHORT, TEXTS, chunk_uses
from tests.support.langchain_stores import (
    WordEmbeddings,
    counted_corpus,
    texts_as_documents,
    word_store,
)

CLEANUPS = [None, "incremental", "full", "scoped_full"]
EDITED = "The cat slept under the mat while snow fell on the roof of the new barn."


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


def _index(counted, store=None, **options):
    store = word_store() if store is None else store
    return PromptCacheIndex(vectorstore=store, corpus=counted.corpus, **options)


def _run(destination, documents, records, **options):
    """LangChain's ``index()``, without its warning of SHA-1."""
    options = {"source_id_key": "source", "key_encoder": "sha256"} | options
    return index(documents, records, destination, **options)


def _records():
    records = InMemoryRecordManager("tests")
    records.create_schema()
    return records


class BlindStore(InMemoryVectorStore):
    """A store that cannot look documents up by their ids."""

    def get_by_ids(self, ids, /):
        raise NotImplementedError

    async def aget_by_ids(self, ids, /):
        raise NotImplementedError


class FailingStore(InMemoryVectorStore):
    """A store that refuses what it is told to."""

    is_down = False

    def add_documents(self, documents, ids=None, **kwargs):
        if self.is_down:
            message = "the database is down"
            raise ConnectionError(message)
        return super().add_documents(documents, ids, **kwargs)

    async def aadd_documents(self, documents, ids=None, **kwargs):
        return self.add_documents(documents, ids, **kwargs)

    def delete(self, ids=None, **kwargs):
        return False if self.is_down else super().delete(ids, **kwargs)


class OwnIdStore(InMemoryVectorStore):
    """A store that gives every document an id of its own."""

    def add_documents(self, documents, ids=None, **kwargs):
        own = [f"own-{len(self.store) + i}" for i in range(len(documents))]
        return super().add_documents(documents, own, **kwargs)


def test_every_document_is_a_hit_when_upserted(counted):
    """Pitfall 35: each text is one chunk, served from the store in a prompt of any shape."""
    response = _index(counted).upsert(texts_as_documents(CAT, f"\n{DOG}  ", FISH, source="a.txt"))
    assert len(set(response["succeeded"])) == 3
    num_encoded = counted.num_encoded
    answer = counted.corpus.generate(f"Source: a.txt\n{DOG}--{CAT}\n\n{FISH} Who sat?", SHORT)
    assert [use.hit_kind is not None for use in chunk_uses(answer)] == [True] * 3
    assert counted.num_encoded == num_encoded


def test_document_is_one_chunk_when_longer_than_the_corpus_would_cut(counted):
    """What the user's splitter made is not split again."""
    text = " ".join(TEXTS * 3)
    _index(counted).upsert(texts_as_documents(text))
    assert counted.chunks_in(f"Read: {text}") == [text]


def test_stored_document_is_returned_as_it_is_when_retrieved(counted):
    """No key is put into metadata, ids are kept, and the caller's documents are not changed."""
    given = [Document(page_content=CAT, metadata={"n": 1, "tags": ["a"]}, id="cat")]
    given += texts_as_documents(DOG, n=2)
    copies = [document.model_copy(deep=True) for document in given]
    documents = _index(counted, k=1)
    documents.upsert(given)
    assert given == copies
    assert documents.invoke("Who sat on the mat?") == given[:1]
    assert documents.invoke("Which dog barked?")[0].metadata == {"n": 2}


@pytest.mark.parametrize(("call", "expected"), [({}, 2), ({"k": 1}, 1), ({"k": 3}, 3)])
async def test_k_documents_return_when_asked_for(counted, call, expected):
    """``k`` of a call goes before the constructor's, in both worlds."""
    documents = _index(counted, k=2)
    documents.upsert(texts_as_documents())
    assert len(documents.invoke("rain", **call)) == expected
    assert len(await documents.ainvoke("rain", **call)) == expected


async def test_other_searches_are_the_stores_when_named(counted):
    """Search type and arguments reach the vector store."""
    documents = _index(counted, search_type="mmr", search_kwargs={"k": 2, "fetch_k": 3})
    documents.upsert(texts_as_documents())
    expected = documents.vectorstore.max_marginal_relevance_search("rain", k=2, fetch_k=3)
    assert documents.invoke("rain") == expected
    assert await documents.ainvoke("rain") == expected


async def test_only_the_tenants_document_returns_when_filtered(counted):
    """Pitfall 37: one text of two tenants is one entry and two documents, told apart by filters."""
    documents = _index(counted, search_kwargs={"filter": lambda d: d.metadata["tenant"] == "a"})
    num_before = counted.num_encoded
    documents.upsert(texts_as_documents(CAT, tenant="a") + texts_as_documents(CAT, tenant="b"))
    assert [d.metadata["tenant"] for d in documents.invoke(CAT)] == ["a"]
    assert [d.metadata["tenant"] for d in await documents.ainvoke(CAT)] == ["a"]
    assert counted.num_encoded - num_before == 2  # the text, and the corpus's prefix
    documents.delete([documents.invoke(CAT)[0].id])
    assert documents.invoke(CAT) == []
    assert counted.chunks_in(CAT) == [CAT]  # the other tenant's still


@pytest.mark.parametrize("metadata", [{"n": 2}, {"source": "b.txt"}, {}])
def test_nothing_is_encoded_when_only_metadata_changed(counted, metadata):
    """Pitfall 39: an edit of metadata reaches the vector store and costs no encoding."""
    documents = _index(counted)
    documents.upsert([Document(page_content=CAT, metadata={"n": 1}, id="cat")])
    num_encoded = counted.num_encoded
    edited = Document(page_content=CAT, metadata=metadata, id="cat")
    documents.upsert([edited])
    assert counted.num_encoded == num_encoded
    assert documents.get(["cat"]) == [edited]
    assert counted.stats.num_documents == 1


def test_new_text_is_a_hit_and_the_old_is_not_when_replaced(counted):
    """A document of the same id replaces the former one in both places."""
    documents = _index(counted)
    documents.upsert([Document(page_content=CAT, id="1")])
    documents.upsert([Document(page_content=EDITED, id="1")])
    assert counted.chunks_in(f"{CAT} {EDITED}") == [EDITED]
    assert [d.page_content for d in documents.invoke("cat")] == [EDITED]


async def _upsert(documents, items, *, is_async):
    return await documents.aupsert(items) if is_async else documents.upsert(items)


@pytest.mark.parametrize("is_async", [False, True])
async def test_old_version_answers_when_encoding_the_new_one_fails(counted, is_async):
    """Pitfall 41: the error surfaces; the old document is retrieved, and its text is a hit."""
    documents = _index(counted)
    documents.upsert([Document(page_content=CAT, id="1"), Document(page_content=DOG, id="2")])
    counted.entries.broken.add("put")
    with pytest.raises(StoreIOError):
        await _upsert(documents, [Document(page_content=EDITED, id="1")], is_async=is_async)
    counted.entries.broken.clear()
    assert [d.page_content for d in documents.get(["1"])] == [CAT]
    assert counted.chunks_in(f"{CAT} {DOG}") == [CAT, DOG]


@pytest.mark.parametrize("is_async", [False, True])
async def test_corpus_goes_back_when_the_vector_store_fails(counted, is_async):
    """What the store did not take is not in the corpus; what it replaced still is."""
    documents = _index(counted, FailingStore(WordEmbeddings()))
    documents.upsert([Document(page_content=CAT, id="1")])
    documents.vectorstore.is_down = True
    items = [Document(page_content=EDITED, id="1"), Document(page_content=DOG, id="2")]
    with pytest.raises(ConnectionError, match="the database is down"):
        await _upsert(documents, items, is_async=is_async)
    assert counted.chunks_in(f"{CAT} {EDITED} {DOG}") == [CAT]
    assert counted.stats.num_documents == 1


def test_nothing_is_taken_in_when_one_document_cannot_be(counted):
    """A document that is refused leaves the ones before it out too: the store has none of them."""
    documents = _index(counted)
    bad = Document(page_content="a lone surrogate \ud800 in it", id="2")
    with pytest.raises(IngestError, match="surrogate"):
        documents.upsert([Document(page_content=CAT, id="1"), bad])
    assert documents.get(["1", "2"]) == []
    assert counted.stats.num_documents == 0
    assert counted.num_encoded == 0


def test_original_error_stays_when_going_back_fails_too(counted):
    """The first error is raised, with a note of the second."""
    documents = _index(counted, FailingStore(WordEmbeddings()))
    documents.upsert([Document(page_content=CAT, id="1")])
    documents.vectorstore.is_down = True
    documents.vectorstore.get_by_ids = lambda ids: 1 / 0
    with pytest.raises(ConnectionError) as caught:
        documents.upsert([Document(page_content=DOG, id="1")])
    assert "ZeroDivisionError" in caught.value.__notes__[0]


def test_documents_without_text_are_taken_when_upserted(counted):
    """An empty document has no chunk; the store has it like any other."""
    documents = _index(counted)
    response = documents.upsert([Document(page_content=" \n", id="1"), Document(page_content=CAT)])
    assert len(documents.get(response["succeeded"])) == 2
    assert counted.chunks_in(f" \n {CAT}") == [CAT]


def test_ids_of_the_store_are_used_when_it_gives_its_own(counted):
    """A store that ignores ids can be deleted from by the ids that it returned."""
    documents = _index(counted, OwnIdStore(WordEmbeddings()))
    num_before = counted.num_encoded
    response = documents.upsert(texts_as_documents(CAT, DOG))
    assert response["succeeded"] == ["own-0", "own-1"]
    assert counted.num_encoded - num_before == 3
    assert counted.stats.num_documents == 2
    assert documents.delete(["own-0"])["num_deleted"] == 1
    assert counted.chunks_in(f"{CAT} {DOG}") == [DOG]


@pytest.mark.parametrize("kind", [InMemoryVectorStore, BlindStore])
@pytest.mark.parametrize("is_async", [False, True])
async def test_real_deletions_are_counted_when_some_ids_are_missing(counted, kind, is_async):
    """Missing and repeated ids do not count, also where the store cannot look ids up."""
    documents = _index(counted, kind(WordEmbeddings()))
    documents.upsert([Document(page_content=CAT, id="1"), Document(page_content=DOG, id="2")])
    ids = ["1", "gone", "1"]
    response = await documents.adelete(ids) if is_async else documents.delete(ids)
    assert response == {"succeeded": ["1"], "num_deleted": 1, "failed": [], "num_failed": 0}
    assert counted.chunks_in(f"{CAT} {DOG}") == [DOG]
    assert [d.page_content for d in documents.invoke("cat dog")] == [DOG]


def test_refusal_is_told_when_the_store_does_not_delete(counted):
    """Documents that the store keeps are failures, and still hits."""
    documents = _index(counted, FailingStore(WordEmbeddings()))
    documents.upsert([Document(page_content=CAT, id="1")])
    documents.vectorstore.is_down = True
    assert documents.delete(["1", "gone"]) == {
        "succeeded": [],
        "num_deleted": 0,
        "failed": ["1"],
        "num_failed": 1,
    }
    assert counted.chunks_in(CAT) == [CAT]


def test_bytes_go_when_the_user_collects_garbage(counted):
    """A deletion leaves a tombstone and the entry; ``gc`` takes both."""
    documents = _index(counted)
    documents.upsert([Document(page_content=CAT, id="1")])
    documents.delete(["1"])
    assert counted.stats.num_tombstones == 1
    report = counted.corpus.gc()
    assert (report.num_documents, report.num_entries) == (1, 1)


def test_indexes_keep_apart_when_they_share_a_corpus(counted):
    """With namespaces of their own, documents of the same id do not replace each other."""
    first, second = _index(counted, namespace="a/"), _index(counted, namespace="b/")
    first.upsert([Document(page_content=CAT, id="1")])
    second.upsert([Document(page_content=DOG, id="1")])
    assert counted.chunks_in(f"{CAT} {DOG}") == [CAT, DOG]
    second.delete(["1"])
    assert counted.chunks_in(f"{CAT} {DOG}") == [CAT]


async def test_event_loop_is_free_when_documents_are_encoded(counted):
    """Encoding runs in another thread than the loop's."""
    threads = set()
    put = counted.entries.put

    def noted(entry, **options):
        threads.add(threading.get_ident())
        put(entry, **options)

    counted.entries.put = noted
    await _index(counted).aupsert(texts_as_documents())
    assert threads
    assert threading.get_ident() not in threads


# index() in every cleanup mode


@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_nothing_is_encoded_when_the_same_documents_are_indexed_twice(counted, cleanup):
    """A second run skips everything."""
    documents, records = _index(counted), _records()
    items = texts_as_documents(source="a.txt")
    first = _run(documents, items, records, cleanup=cleanup)
    num_encoded = counted.num_encoded
    second = _run(documents, items, records, cleanup=cleanup)
    assert (first["num_added"], second["num_skipped"]) == (3, 3)
    assert counted.num_encoded == num_encoded
    assert counted.chunks_in(" ".join(TEXTS)) == list(TEXTS)


@pytest.mark.parametrize("cleanup", CLEANUPS)
async def test_one_chunk_is_encoded_when_one_document_changed(counted, cleanup):
    """The changed text is encoded; its former version goes where the mode cleans up."""
    documents, records = _index(counted), _records()
    _run(documents, texts_as_documents(source="a.txt"), records, cleanup=cleanup)
    num_encoded = counted.num_encoded
    result = await aindex(
        texts_as_documents(EDITED, DOG, FISH, source="a.txt"),
        records,
        documents,
        cleanup=cleanup,
        source_id_key="source",
        key_encoder="sha256",
    )
    assert counted.num_encoded - num_encoded == 1
    assert result["num_deleted"] == (cleanup is not None)
    expected = [CAT, EDITED] if cleanup is None else [EDITED]
    assert counted.chunks_in(f"{CAT} {EDITED}") == expected
    retrieved = [d.page_content for d in documents.invoke("cat mat roof barn fell", k=9)]
    assert sorted(retrieved) == sorted([*expected, DOG, FISH])


@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_nothing_is_encoded_when_only_metadata_is_indexed_anew(counted, cleanup):
    """Pitfall 39: ``index()`` takes other metadata for another document; its text is known."""
    documents, records = _index(counted), _records()
    _run(documents, texts_as_documents(source="a.txt", page="1"), records, cleanup=cleanup)
    num_encoded = counted.num_encoded
    result = _run(documents, texts_as_documents(source="a.txt", page="2"), records, cleanup=cleanup)
    assert result["num_added"] == 3
    assert counted.num_encoded == num_encoded
    assert counted.chunks_in(" ".join(TEXTS)) == list(TEXTS)


@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_only_new_text_is_encoded_when_batches_tear_a_source_apart(counted, cleanup):
    """``index()`` then deletes and adds again what did not change, which encodes nothing."""
    documents, records = _index(counted), _records()
    items = texts_as_documents(*TEXTS, *(f"Line {i} of the source." for i in range(9)), source="a")
    _run(documents, items, records, cleanup=cleanup, batch_size=2)
    num_encoded = counted.num_encoded
    items[5] = Document(page_content="A new line.", metadata={"source": "a"})
    for _ in range(2):
        _run(documents, items, records, cleanup=cleanup, batch_size=2, force_update=True)
    assert counted.num_encoded - num_encoded == 1
    texts = [d.page_content for d in documents.invoke("line", k=99)]
    assert set(texts) >= {d.page_content for d in items}
    assert counted.chunks_in(" ".join(TEXTS)) == list(TEXTS)


def test_one_tombstone_is_left_when_one_of_many_lines_is_dropped(counted):
    """Pitfall 40: of 201 one-line documents of a source one goes; the others answer."""
    documents, records = _index(counted), _records()
    items = texts_as_documents(*(f"Line number {i} of the file." for i in range(201)), source="a")
    _run(documents, items, records, cleanup="full")
    num_encoded = counted.num_encoded
    result = _run(documents, items[:100] + items[101:], records, cleanup="full")
    assert result["num_deleted"] == 1
    assert (counted.stats.num_documents, counted.stats.num_tombstones) == (200, 1)
    assert counted.num_encoded == num_encoded
    assert len(documents.invoke("line", k=999)) == 200


def test_nothing_is_recorded_when_a_document_of_a_batch_is_refused(counted):
    """``index()`` sees the error, so the documents are tried again next time."""
    documents, records = _index(counted), _records()
    counted.entries.broken.add("put")
    with pytest.raises(StoreIOError):
        _run(documents, texts_as_documents(source="a.txt"), records, cleanup="full")
    counted.entries.broken.clear()
    assert _run(documents, texts_as_documents(source="a.txt"), records)["num_added"] == 3
    assert counted.chunks_in(" ".join(TEXTS)) == list(TEXTS)
