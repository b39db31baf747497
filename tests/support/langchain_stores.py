"""Vector stores, embeddings and corpora for the tests of the LangChain adapter."""

from __future__ import annotations

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from tests.support.corpora import TEXTS, embed_words
from tests.support.counted_corpora import CountedCorpus, counted_corpus, warmings

__all__ = [
    "CountedCorpus",
    "WordEmbeddings",
    "counted_corpus",
    "texts_as_documents",
    "warmings",
    "word_store",
]


class WordEmbeddings(Embeddings):
    """Bags of words: texts that share words are near each other."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return embed_words(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return embed_words([text])[0].tolist()


def word_store() -> InMemoryVectorStore:
    """An empty vector store over words."""
    return InMemoryVectorStore(WordEmbeddings())


def texts_as_documents(*texts: str, **metadata: object) -> list[Document]:
    """LangChain documents without ids; the texts of ``TEXTS`` by default."""
    return [Document(page_content=text, metadata=dict(metadata)) for text in texts or TEXTS]
