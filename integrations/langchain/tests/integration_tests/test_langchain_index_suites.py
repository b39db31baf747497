"""LangChain's own suites of what an index, a retriever and a vector store promise."""

from __future__ import annotations

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_pc_rag import PromptCacheIndex, PromptCacheVectorStore
from langchain_tests.integration_tests import (
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.integration_tests.indexer import (
    AsyncDocumentIndexTestSuite,
    DocumentIndexerTestSuite,
)

from tests.support.corpora import TEXTS
from tests.support.langchain_stores import counted_corpus, texts_as_documents, word_store


@pytest.fixture
def corpus():
    with counted_corpus() as counted:
        yield counted.corpus


class TestPromptCacheIndex(DocumentIndexerTestSuite):
    @pytest.fixture
    def index(self, corpus):
        return PromptCacheIndex(vectorstore=word_store(), corpus=corpus)


class TestPromptCacheIndexAsync(AsyncDocumentIndexTestSuite):
    @pytest.fixture
    async def index(self, corpus):
        return PromptCacheIndex(vectorstore=word_store(), corpus=corpus)


class TestPromptCacheVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, corpus):
        return PromptCacheVectorStore(InMemoryVectorStore(self.get_embeddings()), corpus)


class TestPromptCacheIndexAsRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _filled(self, corpus):
        store = word_store()
        PromptCacheIndex(vectorstore=store, corpus=corpus).upsert(texts_as_documents())
        self._params = {"vectorstore": store, "corpus": corpus}

    @property
    def retriever_constructor(self):
        return PromptCacheIndex

    @property
    def retriever_constructor_params(self):
        return self._params

    @property
    def retriever_query_example(self):
        return TEXTS[0]
