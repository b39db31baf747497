from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_pc_rag import PromptCacheIndex, PromptCacheVectorStore
from langchain_pc_rag._ingestion import _turns

from pc_rag.errors import IngestError
from tests.support.corpora import CAT, DOG, FISH, TEXTS
from tests.support.langchain_stores import WordEmbeddings, counted_corpus, texts_as_documents

EDITED = "The cat slept under the mat while snow fell on the roof of the new barn."
TIMEOUT = 60


class HeldStore(InMemoryVectorStore):
    """A store whose async methods wait, and do what they are told when they may go on.

    A call sets ``has_begun``, and goes on with ``may_go_on``.
    """

    def __init__(self):
        super().__init__(WordEmbeddings())
        self.has_begun, self.may_go_on = asyncio.Event(), asyncio.Event()
        self.is_held = True

    async def _hold(self):
        self.has_begun.set()
        if self.is_held:
            await self.may_go_on.wait()

    async def aadd_documents(self, documents, ids=None, **kwargs):
        await self._hold()
        return await super().aadd_documents(documents, ids, **kwargs)

    async def adelete(self, ids=None, **kwargs):
        super().delete(ids[:1])
        await self._hold()
        super().delete(ids[1:])


class ThreadStore(InMemoryVectorStore):
    """A store without async methods of its own, whose additions can be held."""

    aadd_documents = VectorStore.aadd_documents
    aadd_texts = VectorStore.aadd_texts
    adelete = VectorStore.adelete

    def __init__(self):
        super().__init__(WordEmbeddings())
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.is_held = False

    def _hold(self):
        self.has_begun.set()
        if self.is_held:
            assert self.may_go_on.wait(TIMEOUT)

    def add_documents(self, documents, ids=None, **kwargs):
        self._hold()
        return super().add_documents(documents, ids, **kwargs)

    def delete(self, ids=None, **kwargs):
        self._hold()
        super().delete(ids, **kwargs)


class TornStore(InMemoryVectorStore):
    """A store that does the first part of what it is told, then raises or refuses."""

    def __init__(self, error=None, *, is_blind=False):
        super().__init__(WordEmbeddings())
        self.error, self.is_blind, self.is_torn = error, is_blind, False

    def add_documents(self, documents, ids=None, **kwargs):
        if not self.is_torn:
            return super().add_documents(documents, ids, **kwargs)
        super().add_documents(documents[:1], ids and ids[:1], **kwargs)
        raise self.error

    async def aadd_documents(self, documents, ids=None, **kwargs):
        return self.add_documents(documents, ids, **kwargs)

    def delete(self, ids=None, **kwargs):
        super().delete(ids[:1] if self.is_torn else ids, **kwargs)
        if self.is_torn and self.error is not None:
            raise self.error
        return not self.is_torn

    async def adelete(self, ids=None, **kwargs):
        return self.delete(ids, **kwargs)

    def get_by_ids(self, ids, /):
        if self.is_blind:
            raise NotImplementedError
        return super().get_by_ids(ids)

    async def aget_by_ids(self, ids, /):
        return self.get_by_ids(ids)


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


def _index(counted, store):
    return PromptCacheIndex(vectorstore=store, corpus=counted.corpus)


async def _upsert(documents, items, *, is_async):
    return await documents.aupsert(items) if is_async else documents.upsert(items)


async def _delete(documents, ids, *, is_async):
    return await documents.adelete(ids) if is_async else documents.delete(ids)


def _named(**texts):
    return [Document(page_content=text, id=name) for name, text in texts.items()]


def _last_of(store, document_id):
    """The end of the latest turn that somebody wants of a document."""
    return _turns._last[id(store), document_id]


def _wait_for_place(store, document_id, end, work):
    """Until work stands behind the turn that ends with ``end``, or is done without waiting."""
    while _last_of(store, document_id) is end and not work.done():
        threading.Event().wait(0.001)


async def _cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("kind", ["index", "store"])
async def test_corpus_has_nothing_when_an_addition_is_cancelled_in_the_store(counted, kind):
    """Neither documents with ids nor those with random ones stay behind."""
    store = HeldStore()
    if kind == "index":
        work = _index(counted, store).aupsert(texts_as_documents())
    else:
        wrapper = PromptCacheVectorStore(store, counted.corpus)
        work = wrapper.aadd_documents([*texts_as_documents(CAT, DOG), *_named(f=FISH)])
    task = asyncio.create_task(work)
    await store.has_begun.wait()
    assert counted.stats.num_documents == 3
    await _cancelled(task)
    assert store.store == {}
    assert counted.stats.num_documents == 0
    assert counted.chunks_in(" ".join(TEXTS)) == []


async def test_old_version_answers_when_its_replacement_is_cancelled(counted):
    """What the cancelled addition would have replaced is a hit again."""
    store = HeldStore()
    store.is_held = False
    documents = _index(counted, store)
    await documents.aupsert(_named(a=CAT))
    store.is_held = True
    store.has_begun.clear()
    task = asyncio.create_task(documents.aupsert(_named(a=EDITED, b=DOG)))
    await store.has_begun.wait()
    await _cancelled(task)
    assert counted.chunks_in(f"{CAT} {EDITED} {DOG}") == [CAT]


async def test_corpus_has_nothing_when_an_addition_is_cancelled_while_encoding(counted):
    """The thread that encodes ends first, then its documents go; the store is not asked."""
    has_begun, may_go_on = threading.Event(), threading.Event()
    put, store = counted.entries.put, HeldStore()

    def held(entry, **options):
        has_begun.set()
        assert may_go_on.wait(TIMEOUT)
        put(entry, **options)

    counted.entries.put = held
    task = asyncio.create_task(_index(counted, store).aupsert(texts_as_documents()))
    await asyncio.to_thread(has_begun.wait, TIMEOUT)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not store.has_begun.is_set()
    assert counted.stats.num_documents == 0


@pytest.mark.parametrize("is_deletion", [False, True])
async def test_corpus_follows_when_a_store_goes_on_in_its_thread(counted, is_deletion):
    """What runs in a thread cannot be cancelled: both have the outcome when the caller knows."""
    store = ThreadStore()
    documents = _index(counted, store)
    if is_deletion:
        await documents.aupsert(_named(a=CAT, b=DOG))
    store.has_begun.clear()
    store.is_held = True
    work = documents.adelete(["a"]) if is_deletion else documents.aupsert(_named(a=CAT, b=DOG))
    task = asyncio.create_task(work)
    await asyncio.to_thread(store.has_begun.wait, TIMEOUT)
    task.cancel()
    await asyncio.sleep(0)
    store.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    held = [document.page_content for document in documents.get(["a", "b"])]
    assert held == ([DOG] if is_deletion else [CAT, DOG])
    assert counted.chunks_in(f"{CAT} {DOG}") == held


@pytest.mark.parametrize(
    ("error", "is_async"),
    # an interrupt in a task would end the event loop, and the test with it
    [(KeyboardInterrupt, False), (ConnectionError, False), (ConnectionError, True)],
)
async def test_corpus_has_what_the_store_took_when_an_addition_is_torn(counted, error, is_async):
    """Part of the batch is in both; the error, or the interrupt, is the store's."""
    store = TornStore(error("torn"))
    store.is_torn = True
    documents = _index(counted, store)
    with pytest.raises(error) as caught:
        await _upsert(documents, _named(a=CAT, b=DOG), is_async=is_async)
    assert caught.value is store.error
    assert [d.page_content for d in documents.get(["a", "b"])] == [CAT]
    assert counted.chunks_in(f"{CAT} {DOG}") == [CAT]
    assert counted.stats.num_documents == 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_random_ids_are_dropped_when_a_store_without_lookup_fails(counted, is_async):
    """Ids that the store was never told can be dropped, whatever it can tell."""
    store = TornStore(ConnectionError("torn"), is_blind=True)
    store.is_torn = True
    wrapper, items = PromptCacheVectorStore(store, counted.corpus), texts_as_documents()
    with pytest.raises(ConnectionError):
        await wrapper.aadd_documents(items) if is_async else wrapper.add_documents(items)
    assert counted.stats.num_documents == 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_nothing_is_left_under_random_ids_when_the_store_tells_too_few(counted, is_async):
    """Documents that the store names no ids of could never be deleted again."""

    class Terse(TornStore):
        def add_documents(self, documents, ids=None, **kwargs):
            return super().add_documents(documents, ids, **kwargs)[:1]

    store = PromptCacheVectorStore(Terse(), counted.corpus)
    if not is_async:
        with pytest.raises(IngestError, match="1 ids for 3 documents"):
            store.add_documents(texts_as_documents())
    else:
        with pytest.raises(IngestError, match="1 ids for 3 documents"):
            await store.aadd_documents(texts_as_documents())
    assert counted.stats.num_documents == 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_corpus_follows_the_store_when_a_deletion_is_torn(counted, is_async):
    """Of three documents one is gone; the error surfaces, and the two others are hits."""
    store = TornStore(ConnectionError("torn"))
    documents = _index(counted, store)
    documents.upsert(_named(a=CAT, b=DOG, c=FISH))
    store.is_torn = True
    with pytest.raises(ConnectionError, match="torn"):
        await _delete(documents, ["a", "b", "c"], is_async=is_async)
    assert len(store.store) == 2
    assert counted.stats.num_documents == 2
    assert counted.chunks_in(" ".join(TEXTS)) == [DOG, FISH]


async def test_corpus_follows_the_store_when_a_deletion_is_cancelled(counted):
    """What the store had deleted by then is no hit; the rest is."""
    store = HeldStore()
    documents = _index(counted, store)
    documents.upsert(_named(a=CAT, b=DOG, c=FISH))
    task = asyncio.create_task(documents.adelete(["a", "b", "c"]))
    await store.has_begun.wait()
    await _cancelled(task)
    assert counted.chunks_in(" ".join(TEXTS)) == [DOG, FISH]


@pytest.mark.parametrize("is_blind", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_failed_ids_are_those_kept_when_a_store_deletes_some(counted, is_blind, is_async):
    """A store that says no after a part; one that cannot look up is taken at its word."""
    store = TornStore(is_blind=is_blind)
    documents = _index(counted, store)
    documents.upsert(_named(a=CAT, b=DOG, c=FISH))
    store.is_torn, ids = True, ["a", "b", "c"]
    response = await _delete(documents, ids, is_async=is_async)
    deleted = [] if is_blind else ["a"]
    failed = ids if is_blind else ["b", "c"]
    assert (response["succeeded"], response["failed"]) == (deleted, failed)
    assert counted.chunks_in(" ".join(TEXTS)) == (list(TEXTS) if is_blind else [DOG, FISH])


def test_corpus_stays_when_a_torn_store_cannot_look_up(counted):
    """Nobody can tell what is gone; a hit on it does no harm, a miss would."""
    store = TornStore(ConnectionError("torn"), is_blind=True)
    documents = _index(counted, store)
    documents.upsert(_named(a=CAT, b=DOG))
    store.is_torn = True
    with pytest.raises(ConnectionError):
        documents.delete(["a", "b"])
    assert counted.chunks_in(f"{CAT} {DOG}") == [CAT, DOG]


@pytest.mark.parametrize("second", ["upsert", "delete"])
async def test_corpus_and_store_agree_when_coroutines_work_on_one_id(counted, second):
    """The second waits for the first, though another wrapper of the store began it."""
    store = HeldStore()
    documents, wrapper = _index(counted, store), PromptCacheVectorStore(store, counted.corpus)
    first = asyncio.create_task(documents.aupsert(_named(a=CAT)))
    await store.has_begun.wait()
    work = wrapper.aadd_documents(_named(a=DOG)) if second == "upsert" else wrapper.adelete(["a"])
    store.is_held = False  # the first only
    end = _last_of(store, "a")
    other = asyncio.create_task(work)
    await asyncio.to_thread(_wait_for_place, store, "a", end, other)
    store.may_go_on.set()
    await asyncio.gather(first, other)
    held = [document.page_content for document in documents.get(["a"])]
    assert held == ([DOG] if second == "upsert" else [])
    assert counted.chunks_in(f"{CAT} {DOG}") == held


@pytest.mark.parametrize("second", ["upsert", "delete"])
def test_corpus_and_store_agree_when_threads_work_on_one_id(counted, second):
    """As with coroutines: whoever comes second has the last word in both."""
    store = ThreadStore()
    documents = _index(counted, store)
    store.is_held = True
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(documents.upsert, _named(a=CAT))
        assert store.has_begun.wait(TIMEOUT)
        store.is_held = False  # the first only
        end = _last_of(store, "a")
        work = (documents.upsert, _named(a=DOG)) if second == "upsert" else (documents.delete, "a")
        other = pool.submit(*work)
        _wait_for_place(store, "a", end, other)
        store.may_go_on.set()
        first.result(TIMEOUT)
        other.result(TIMEOUT)
    held = [document.page_content for document in documents.get(["a"])]
    assert held == ([DOG] if second == "upsert" else [])
    assert counted.chunks_in(f"{CAT} {DOG}") == held


async def test_other_ids_do_not_wait_when_one_is_being_added(counted):
    """A slow addition holds up its own ids only."""
    store = HeldStore()
    documents = _index(counted, store)
    first = asyncio.create_task(documents.aupsert(_named(a=CAT)))
    await store.has_begun.wait()
    store.is_held = False
    await documents.aupsert(_named(b=DOG))
    assert counted.chunks_in(DOG) == [DOG]
    store.may_go_on.set()
    await first


@pytest.mark.parametrize("is_async", [False, True])
async def test_nobody_waits_for_himself_when_wrappers_are_nested(counted, is_async):
    """An index around the wrapper of a store takes its turn once on each."""
    wrapper = PromptCacheVectorStore(ThreadStore(), counted.corpus)
    documents = _index(counted, wrapper)
    if is_async:
        await documents.aupsert(_named(a=CAT))
    else:  # in a thread, where turns are waited for
        await asyncio.to_thread(documents.upsert, _named(a=CAT))
    assert counted.chunks_in(CAT) == [CAT]
    assert (await documents.adelete(["a"]))["num_deleted"] == 1
