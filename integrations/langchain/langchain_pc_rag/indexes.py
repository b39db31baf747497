"""A document index whose documents are encoded when they are added."""

# ruff: noqa: ARG002 - LangChain passes more than is needed

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from langchain_core.indexing import DeleteResponse, UpsertResponse
from langchain_core.indexing.base import DocumentIndex
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict, Field

from langchain_pc_rag._ingestion import Ingestion, required_ids
from pc_rag.corpus import Corpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
    )
    from langchain_core.documents import Document
    from langchain_core.retrievers import LangSmithRetrieverParams

    from langchain_pc_rag._ingestion import Deletion


class PromptCacheIndex(DocumentIndex):
    """A document index, and a retriever, around any vector store and a corpus.

    Every document becomes one chunk of the corpus, encoded before the store gets it: whatever is
    retrieved has its keys and values ready. Retrieved documents are the stored ones, as they are.
    Works with ``langchain_core.indexing.index`` in every cleanup mode; text that the corpus knows
    is not encoded again, whether its metadata was edited or it was deleted and comes back.

    What is deleted is no longer recognised in prompts; ``corpus.gc()`` reclaims its bytes, when you
    call it.

    Where a call fails, is cancelled or interrupted, the corpus follows what the store then holds,
    if the store can look documents up by their ids. Calls for the same ids take turns in this
    process, but for synchronous ones on the thread of a running event loop, which cannot wait.

    Attributes:
        vectorstore: Holds and finds the documents. What is added to it directly is not encoded.
        corpus: Holds the keys and values of their texts.
        search_type: A search of the vector store: ``similarity``, ``mmr``,
            ``similarity_score_threshold``, or one of its own.
        search_kwargs: Arguments of that search, for example ``{"filter": ...}``.
        k: Most documents to return, where neither the call nor ``search_kwargs`` says.
        namespace: Put before ids in the corpus. Indexes that share a corpus need different ones
            where their ids may be alike; otherwise a document of one replaces the other's.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    vectorstore: VectorStore
    corpus: Corpus
    search_type: str = "similarity"
    search_kwargs: dict[str, Any] = Field(default_factory=dict)
    k: int = Field(default=4, ge=1)
    namespace: str = ""

    def upsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:
        """Encode documents, then add them, replacing those of the same id.

        Args:
            items: The documents; those without an id get a random one. Not modified.
            **kwargs: The vector store's own.

        Returns:
            All ids, as the store says; none fails, since what cannot be taken in raises.

        Raises:
            PromptCacheError: A document cannot be encoded; the store is as it was.
        """
        documents = _with_ids(items)
        ids = [document.id for document in documents]
        return _upserted(self._ingestion.add(documents, ids, kwargs))

    async def aupsert(self, items: Sequence[Document], /, **kwargs: Any) -> UpsertResponse:
        """As ``upsert``; encoding does not hold the event loop."""
        documents = _with_ids(items)
        ids = [document.id for document in documents]
        return _upserted(await self._ingestion.aadd(documents, ids, kwargs))

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> DeleteResponse:
        """Delete documents; ids without one are no failure.

        Args:
            ids: Which.
            **kwargs: The vector store's own.

        Returns:
            The ids that had a document and have none any more, and their number; and those that
            the store refused to delete.

        Raises:
            ValueError: There are no ids.
        """
        return _deleted(self._ingestion.delete(required_ids(ids), **kwargs))

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> DeleteResponse:
        """As ``delete``."""
        return _deleted(await self._ingestion.adelete(required_ids(ids), **kwargs))

    def get(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:
        """The documents of these ids, in the store's order; missing ones are left out.

        Args:
            ids: Which.
            **kwargs: The vector store's own.
        """
        return self.vectorstore.get_by_ids(ids, **kwargs)

    async def aget(self, ids: Sequence[str], /, **kwargs: Any) -> list[Document]:
        """As ``get``."""
        return await self.vectorstore.aget_by_ids(ids, **kwargs)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self.vectorstore.search(query, self.search_type, **self._search_kwargs(kwargs))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return await self.vectorstore.asearch(
            query, self.search_type, **self._search_kwargs(kwargs)
        )

    def _search_kwargs(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"k": self.k} | self.search_kwargs | call

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        params = super()._get_ls_params(**kwargs)
        params["ls_vector_store_provider"] = type(self.vectorstore).__name__
        if self.vectorstore.embeddings is not None:
            params["ls_embedding_provider"] = type(self.vectorstore.embeddings).__name__
        return params

    @property
    def _ingestion(self) -> Ingestion:
        return Ingestion(self.vectorstore, self.corpus, self.namespace)


def _with_ids(items: Sequence[Document]) -> list[Document]:
    return [
        item if item.id else item.model_copy(update={"id": str(uuid.uuid4())}) for item in items
    ]


def _upserted(ids: list[str]) -> UpsertResponse:
    return UpsertResponse(succeeded=ids, failed=[])


def _deleted(deletion: Deletion) -> DeleteResponse:
    return DeleteResponse(
        succeeded=deletion.deleted,
        num_deleted=len(deletion.deleted),
        failed=deletion.failed,
        num_failed=len(deletion.failed),
    )
