from __future__ import annotations

import copy

import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStoreRetriever
from langchain_pc_rag import PromptCacheVectorStore

from pc_rag.errors import ConfigError, IngestError, LayoutError
from tests.support.corpora import CAT, DOG, FISH, TEXTS, embed_words
from tests.support.langchain_stores import (
    WordEmbeddings,
    counted_corpus,
    texts_as_documents,
    word_store,
)


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


@pytest.fixture
def store(counted):
    return PromptCacheVectorStore(word_store(), counted.corpus)


class ScoringStore(InMemoryVectorStore):
    """A store with relevance scores, and a method that no other store has."""

    def _select_relevance_score_fn(self):
        return lambda score: min(1.0, max(0.0, score / 2))

    def compact(self):
        return "compacted"

    def __len__(self):
        return len(self.store)


class PickyStore(InMemoryVectorStore):
    """A store that makes retrievers of its own."""

    def as_retriever(self, **kwargs):
        return PickyRetriever(vectorstore=self, **kwargs)


class PickyRetriever(VectorStoreRetriever):
    allowed_search_types = ("similarity", "hybrid")


async def _added(store, how, *, is_async):
    """Three documents in a store, by one of its methods; their ids."""
    documents, texts = texts_as_documents(source="a.txt"), list(TEXTS)
    metadatas = [{"source": "a.txt"}] * 3
    calls = {
        "add_documents": (store.add_documents, store.aadd_documents, [documents]),
        "add_texts": (store.add_texts, store.aadd_texts, [iter(texts), metadatas]),
    }
    call, acall, arguments = calls[how]
    return await acall(*arguments) if is_async else call(*arguments)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("how", ["add_documents", "add_texts"])
async def test_texts_are_hits_when_added_by_any_method(counted, store, how, is_async):
    """What was added is in the store, with the store's ids, and encoded."""
    ids = await _added(store, how, is_async=is_async)
    assert [d.page_content for d in store.get_by_ids(ids)] == list(TEXTS)
    assert {d.metadata["source"] for d in await store.aget_by_ids(ids)} == {"a.txt"}
    assert counted.chunks_in(" ".join(TEXTS)) == list(TEXTS)
    assert counted.stats.num_documents == 3
    num_encoded = counted.num_encoded
    await _added(store, how, is_async=is_async)
    assert counted.num_encoded == num_encoded


@pytest.mark.parametrize("is_async", [False, True])
async def test_texts_are_no_hits_when_deleted_by_the_stores_ids(counted, store, is_async):
    """Ids that the store made are those of the corpus too."""
    ids = await _added(store, "add_documents", is_async=is_async)
    wanted = [ids[0], "missing"]
    assert (await store.adelete(wanted) if is_async else store.delete(wanted)) is True
    assert counted.chunks_in(" ".join(TEXTS)) == [DOG, FISH]
    assert store.get_by_ids(ids[:1]) == []
    assert counted.stats.num_tombstones >= 1


async def test_deletion_is_refused_when_there_are_no_ids(store):
    """Deleting by anything else than ids could not reach the corpus."""
    with pytest.raises(ValueError, match="needs ids"):
        store.delete()
    with pytest.raises(ValueError, match="needs ids"):
        await store.adelete(filter="x")


def test_ids_of_the_call_go_first_when_documents_have_others(counted, store):
    """The corpus calls documents what the store calls them; that of their own id stays."""
    store.add_documents([Document(page_content=DOG, id="own")])
    store.add_documents([Document(page_content=CAT, id="own")], ids=["given"])
    assert counted.chunks_in(f"{CAT} {DOG}") == [CAT, DOG]
    store.delete(["given"])
    assert counted.chunks_in(f"{CAT} {DOG}") == [DOG]


def test_only_some_ids_are_made_when_some_are_given(counted, store):
    """Documents with and without ids can be added together."""
    ids = store.add_documents([Document(page_content=CAT, id="1"), Document(page_content=DOG)])
    assert ids[0] == "1"
    assert ids[1]
    store.delete(ids)
    assert counted.stats.num_documents == 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_filled_store_is_made_when_built_from_texts(counted, is_async):
    """``from_texts`` and ``from_documents`` take the corpus, and the store if not in memory."""
    made = PromptCacheVectorStore
    options = {"corpus": counted.corpus, "namespace": "t/"}
    options["vectorstore"] = ScoringStore(WordEmbeddings())
    arguments = (list(TEXTS[:2]), WordEmbeddings(), [{"n": 1}, {"n": 2}])
    if is_async:
        store = await made.afrom_texts(*arguments, ids=["1", "2"], **options)
        other = await made.afrom_documents(
            texts_as_documents(FISH), WordEmbeddings(), corpus=counted.corpus
        )
    else:
        store = made.from_texts(*arguments, ids=["1", "2"], **options)
        other = made.from_documents(
            texts_as_documents(FISH), WordEmbeddings(), corpus=counted.corpus
        )
    assert store.vectorstore is options["vectorstore"]
    assert store.get_by_ids(["2"]) == [Document(page_content=DOG, metadata={"n": 2}, id="2")]
    assert [d.page_content for d in other.similarity_search("fish")] == [FISH]
    assert counted.chunks_in(" ".join(TEXTS)) == list(TEXTS)


def test_missing_corpus_is_named_when_built_from_texts():
    """A store cannot be made without a corpus."""
    with pytest.raises(ConfigError, match="corpus="):
        PromptCacheVectorStore.from_texts(["a"], WordEmbeddings())


@pytest.mark.parametrize(
    "options", [{"metadatas": [{}]}, {"ids": ["1"]}, {"ids": ["1", "2", "3", "4"]}]
)
async def test_numbers_are_told_when_they_differ(counted, store, options):
    """Texts with too few or too many metadatas or ids are refused, and nothing is added."""
    with pytest.raises(IngestError, match="for 3 texts"):
        store.add_texts(TEXTS, **options)
    with pytest.raises(IngestError, match="for 3 texts"):
        await store.aadd_texts(TEXTS, **options)
    with pytest.raises(IngestError, match="for 3 documents"):
        store.add_documents(texts_as_documents(), ids=["1"])
    assert counted.stats.num_documents == 0


def test_nothing_is_stored_when_a_document_is_longer_than_the_context(counted, store):
    """What cannot be encoded is an error with numbers, and the store has none of the batch."""
    with pytest.raises(LayoutError, match="tokens"):
        store.add_texts([CAT, "word " * 3000])
    assert store.vectorstore.store == {}
    assert counted.stats.num_documents == 0


async def test_searches_are_the_stores_own_when_called(counted):
    """Every search gives what the wrapped store gives, in both worlds."""
    inner = ScoringStore(WordEmbeddings())
    store = PromptCacheVectorStore(inner, counted.corpus)
    store.add_documents(texts_as_documents())
    vector = embed_words(["rain"])[0].tolist()
    calls = [
        ("similarity_search", "rain", {"k": 2}),
        ("similarity_search_with_score", "rain", {"k": 2}),
        ("similarity_search_with_relevance_scores", "rain", {"score_threshold": 0.01}),
        ("similarity_search_by_vector", vector, {"k": 1}),
        ("max_marginal_relevance_search", "rain", {"k": 2, "fetch_k": 3, "lambda_mult": 0.1}),
        ("max_marginal_relevance_search_by_vector", vector, {"k": 2, "fetch_k": 3}),
        ("search", "rain", {"search_type": "mmr", "k": 2}),
    ]
    for name, argument, options in calls:
        expected = getattr(inner, name)(argument, **options)
        assert expected, name
        assert getattr(store, name)(argument, **options) == expected, name
        if name == "max_marginal_relevance_search_by_vector":  # not written for the store in memory
            continue
        assert await getattr(store, f"a{name}")(argument, **options) == expected, name
    assert store._select_relevance_score_fn()(1.0) == 0.5
    assert store.embeddings is inner.embeddings


async def test_only_the_tenants_document_returns_when_filtered(counted, store):
    """Pitfall 37: the same text of two tenants is one entry; the filter is the store's."""
    num_before = counted.num_encoded
    store.add_documents(texts_as_documents(CAT, tenant="a") + texts_as_documents(CAT, tenant="b"))

    def is_a(document):
        return document.metadata["tenant"] == "a"

    for found in (
        store.similarity_search(CAT, filter=is_a),
        await store.asimilarity_search(CAT, filter=is_a),
        store.as_retriever(search_kwargs={"filter": is_a}).invoke(CAT),
        store.max_marginal_relevance_search(CAT, filter=is_a),
    ):
        assert [d.metadata["tenant"] for d in found] == ["a"]
    assert counted.num_encoded - num_before == 2  # the text, and the corpus's prefix


async def test_retriever_encodes_when_documents_are_added_through_it(counted, store):
    """The retriever of the wrapper goes through the wrapper."""
    retriever = store.as_retriever(search_kwargs={"k": 1})
    retriever.add_documents(texts_as_documents(CAT))
    assert counted.chunks_in(CAT) == [CAT]
    assert (
        retriever.invoke("cat") == await retriever.ainvoke("cat") == store.similarity_search("cat")
    )


def test_retriever_is_the_stores_when_it_makes_its_own(counted):
    """A store with searches of its own keeps them."""
    store = PromptCacheVectorStore(PickyStore(WordEmbeddings()), counted.corpus)
    assert store.as_retriever(search_type="hybrid").search_type == "hybrid"


def test_other_methods_are_the_stores_when_only_it_has_them(counted):
    """What a store can do besides is still there; what none has is an AttributeError."""
    store = PromptCacheVectorStore(ScoringStore(WordEmbeddings()), counted.corpus)
    assert store.compact() == "compacted"
    with pytest.raises(AttributeError, match="no_such_method"):
        _ = store.no_such_method
    with pytest.raises(AttributeError, match="_private"):
        _ = store._private
    assert copy.copy(store).vectorstore is store.vectorstore


@pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full", None])
def test_only_new_text_is_encoded_when_indexed(counted, store, cleanup):
    """Pitfall 39: ``index()`` takes the wrapper for any store; known text costs nothing."""
    records = InMemoryRecordManager("tests")
    records.create_schema()
    options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
    index(texts_as_documents(source="a"), records, store, **options)
    num_encoded = counted.num_encoded
    same = index(texts_as_documents(source="a"), records, store, **options)
    assert same["num_skipped"] == 3
    assert counted.num_encoded == num_encoded
    result = index(texts_as_documents(CAT, DOG, "New.", source="a"), records, store, **options)
    assert result["num_deleted"] == (cleanup is not None)
    assert counted.num_encoded - num_encoded == 1
    expected = list(TEXTS) if cleanup is None else [CAT, DOG]
    assert counted.chunks_in(" ".join(TEXTS)) == expected
