from __future__ import annotations

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_pc_rag import PromptCacheIndex, WarmingRetriever, warm_documents

from pc_rag.errors import StoreIOError
from tests.support.corpora import CAT, DOG
from tests.support.langchain_stores import (
    counted_corpus,
    texts_as_documents,
    warmings,
    word_store,
)

QUESTION = "Who sat on the mat?"


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


@pytest.fixture
def filled(counted):
    documents = PromptCacheIndex(vectorstore=word_store(), corpus=counted.corpus, k=2)
    documents.upsert(texts_as_documents())
    return documents


class Names(BaseCallbackHandler):
    """Notes which retrievers ran."""

    def __init__(self):
        self.names = []

    def on_retriever_start(self, *args, name, **kwargs):
        self.names.append(name)


@pytest.mark.parametrize("is_async", [False, True])
async def test_retrieved_chunks_are_warmed_when_retrieved(counted, filled, is_async):
    """The retriever's documents pass unchanged, and their entries are fetched meanwhile."""
    warming = WarmingRetriever(retriever=filled, corpus=counted.corpus)
    begun, num_leases = warmings(counted.corpus), counted.entries.calls["lease"]
    found = await warming.ainvoke(QUESTION) if is_async else warming.invoke(QUESTION)
    assert found == filled.invoke(QUESTION)
    [(texts, warmed)] = begun
    assert texts == [document.page_content for document in found]
    assert warmed.result(60) == 2
    assert counted.entries.calls["lease"] >= num_leases + 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_arguments_and_callbacks_reach_the_retriever_when_wrapped(counted, filled, is_async):
    """A call's ``k`` and its callbacks go on to the wrapped retriever."""
    warming = WarmingRetriever(retriever=filled, corpus=counted.corpus)
    names = Names()
    config = {"callbacks": [names]}
    if is_async:
        found = await warming.ainvoke(QUESTION, config, k=3)
    else:
        found = warming.invoke(QUESTION, config, k=3)
    assert len(found) == 3
    assert names.names == ["WarmingRetriever", "PromptCacheIndex"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_retrieval_goes_on_when_warming_fails(counted, filled, is_async):
    """A store that is down costs the warmth, not the documents."""
    warming = WarmingRetriever(retriever=filled, corpus=counted.corpus)
    begun = warmings(counted.corpus)
    counted.entries.broken.update({"lease", "lookup", "put"})
    found = await warming.ainvoke(QUESTION) if is_async else warming.invoke(QUESTION)
    assert found[0].page_content == CAT
    assert isinstance(begun[0][1].exception(60), StoreIOError)


async def test_documents_pass_when_a_chain_warms_them(counted, filled):
    """The step for chains warms what comes, and hands it on."""
    chain = filled | warm_documents(counted.corpus) | RunnableLambda(lambda found: found)
    begun = warmings(counted.corpus)
    expected = filled.invoke(QUESTION)
    assert chain.invoke(QUESTION) == expected
    assert await chain.ainvoke(QUESTION) == expected
    assert [warmed.result(60) for _, warmed in begun] == [2, 2]


def test_unknown_documents_pass_when_the_corpus_has_none_of_them(counted):
    """What the corpus does not hold is left alone."""

    class Fixed(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document(page_content=DOG)]

    begun = warmings(counted.corpus)
    warming = WarmingRetriever(retriever=Fixed(), corpus=counted.corpus)
    assert warming.invoke("dog") == [Document(page_content=DOG)]
    assert begun[0][1].result(60) == 0
    assert counted.num_encoded == 0
