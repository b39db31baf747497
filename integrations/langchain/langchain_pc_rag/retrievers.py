"""Retrievers that have the chunks' keys and values loaded while the prompt is being built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from pydantic import ConfigDict

from langchain_pc_rag._checks import check_corpus
from pc_rag.corpus import Corpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
    )


class WarmingRetriever(BaseRetriever):
    """Any retriever; what it found is brought near the model in the background.

    Documents pass unchanged, and the chain does not wait. What the corpus does not know is left
    alone.

    Attributes:
        retriever: Finds the documents; arguments of a call are passed on to it.
        corpus: Holds the keys and values of their texts.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    retriever: Runnable[str, list[Document]]
    corpus: Corpus

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        config = RunnableConfig(callbacks=run_manager.get_child())
        return _warmed(self.corpus, self.retriever.invoke(query, config, **kwargs))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        config = RunnableConfig(callbacks=run_manager.get_child())
        return _warmed(self.corpus, await self.retriever.ainvoke(query, config, **kwargs))


def warm_documents(corpus: Corpus) -> Runnable[list[Document], list[Document]]:
    """A step for chains behind a retriever, which warms like ``WarmingRetriever``.

    ``retriever | warm_documents(corpus) | ...``

    Args:
        corpus: Holds the keys and values of the documents' texts.

    Raises:
        ConfigError: No corpus.
    """
    check_corpus("warm_documents", corpus)

    def warm(documents: list[Document]) -> list[Document]:
        return _warmed(corpus, documents)

    async def awarm(documents: list[Document]) -> list[Document]:
        return _warmed(corpus, documents)  # returns at once: no thread is worth it

    return RunnableLambda(warm, awarm, name="warm_documents")


def _warmed(corpus: Corpus, documents: list[Document]) -> list[Document]:
    warm_chunks(corpus, documents)
    return documents


def warm_chunks(corpus: Corpus, documents: Sequence[Document]) -> None:
    """Start to bring the chunks of documents near the model; a hint, which nobody waits for."""
    corpus.warm([document.page_content for document in documents])
