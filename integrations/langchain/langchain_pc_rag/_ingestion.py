"""Documents into a vector store and a corpus at once; what the index and the store share."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.runnables import run_in_executor

from pc_rag.corpus import Document as CorpusDocument
from pc_rag.errors import IngestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from langchain_core.documents import Document
    from langchain_core.vectorstores import VectorStore

    from pc_rag.corpus import Corpus

Add: TypeAlias = "Callable[[], list[str]]"
"""Adds documents to the vector store; returns the ids that it gave them."""

AsyncAdd: TypeAlias = "Callable[[], Awaitable[list[str]]]"
"""The same, asynchronously."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """What became of ids that were to be deleted.

    Attributes:
        deleted: Ids that had a document and have none any more, in the order asked for.
        failed: Ids whose document the vector store did not delete.
    """

    deleted: list[str]
    failed: list[str]


@dataclass(frozen=True, slots=True)
class Ingestion:
    """Keeps a corpus in step with a vector store.

    A document is encoded before the store gets it, so whatever can be retrieved has its entry.
    Where either step fails, the corpus goes back to what the store holds.

    Attributes:
        vectorstore: Holds the documents.
        corpus: Holds the keys and values of their texts, each text one chunk.
        namespace: Put before ids in the corpus.
    """

    vectorstore: VectorStore
    corpus: Corpus
    namespace: str = ""

    def add(self, documents: Sequence[Document], ids: Sequence[str | None], add: Add) -> list[str]:
        """Encode documents, then add them to the store.

        Args:
            documents: What is added.
            ids: The id of each, ``None`` where the store is to give one.
            add: Adds them.

        Returns:
            Their ids, as the store says.
        """
        provisional = _provisional(documents, ids)
        try:
            self._encode(documents, provisional)
            given = list(add() or ())
        except Exception as error:
            with _noting(error):
                self._return_to(provisional, self._stored(provisional))
            raise
        return self._settled(documents, ids, provisional, given)

    async def aadd(
        self, documents: Sequence[Document], ids: Sequence[str | None], add: AsyncAdd
    ) -> list[str]:
        """As ``add``; the corpus works off the event loop."""
        provisional = _provisional(documents, ids)
        try:
            await run_in_executor(None, self._encode, documents, provisional)
            given = list(await add() or ())
        except Exception as error:
            with _noting(error):
                stored = await self._astored(provisional)
                await run_in_executor(None, self._return_to, provisional, stored)
            raise
        return await run_in_executor(None, self._settled, documents, ids, provisional, given)

    def delete(self, ids: Sequence[str], **options: Any) -> Deletion:
        """Delete the documents that the store has of these ids; others are no failure."""
        stored = self._stored(ids)
        present = _present(ids, stored)
        is_refused = bool(present) and self.vectorstore.delete(present, **options) is False
        return self._deleted(ids, present, is_refused=is_refused, is_certain=stored is not None)

    async def adelete(self, ids: Sequence[str], **options: Any) -> Deletion:
        """As ``delete``; the corpus works off the event loop."""
        stored = await self._astored(ids)
        present = _present(ids, stored)
        is_refused = bool(present) and await self.vectorstore.adelete(present, **options) is False
        is_certain = stored is not None
        return await run_in_executor(
            None, self._deleted, ids, present, is_refused=is_refused, is_certain=is_certain
        )

    def forget(self, ids: Sequence[str]) -> list[str]:
        """Drop documents from the corpus; the ids of those that were there."""
        return [each for each in dict.fromkeys(ids) if self.corpus.remove(self.namespace + each)]

    def _encode(self, documents: Sequence[Document], ids: Sequence[str]) -> None:
        # All are read before the first is encoded: one that is refused leaves nothing half done.
        self.corpus.add(self.corpus.prepare(map(self._whole, documents, ids)))

    def _whole(self, document: Document, document_id: str) -> CorpusDocument:
        source = document.metadata.get("source", "")
        return CorpusDocument(
            document.page_content,
            id=self.namespace + document_id,
            source=source if isinstance(source, str) else "",
            is_whole=True,
        )

    def _settled(
        self,
        documents: Sequence[Document],
        ids: Sequence[str | None],
        provisional: list[str],
        given: list[str],
    ) -> list[str]:
        """Let the corpus call documents what the store calls them; nothing is encoded for it."""
        if given == provisional:
            return given
        if len(given) != len(documents):
            if all(ids):  # a store may say each id once, or nothing: it was told them
                return provisional
            raise IngestError(
                f"{type(self.vectorstore).__name__} returned {len(given)} ids for "
                f"{len(documents)} documents; their entries cannot be told apart. Give every "
                f"document an id, or use a store that returns the ids of all"
            )
        self._encode(documents, given)
        self.forget([each for each in provisional if each not in set(given)])
        return given

    def _return_to(self, ids: Sequence[str], stored: Sequence[Document] | None) -> None:
        """Let the corpus hold of these ids what the store holds; their entries are there still."""
        if stored is None:
            return
        self._encode(stored, [document.id or "" for document in stored])
        held = {document.id for document in stored}
        self.forget([each for each in ids if each not in held])

    def _stored(self, ids: Sequence[str]) -> list[Document] | None:
        """What the store has of these ids; ``None`` where it cannot tell."""
        try:
            return self.vectorstore.get_by_ids(list(dict.fromkeys(ids)))
        except NotImplementedError:
            return None

    async def _astored(self, ids: Sequence[str]) -> list[Document] | None:
        try:
            return await self.vectorstore.aget_by_ids(list(dict.fromkeys(ids)))
        except NotImplementedError:
            return None

    def _deleted(
        self, ids: Sequence[str], present: list[str], *, is_refused: bool, is_certain: bool
    ) -> Deletion:
        if is_refused:
            return Deletion([], present)
        known = self.forget(ids)
        return Deletion(present if is_certain else known, [])


@contextmanager
def _noting(error: Exception) -> Iterator[None]:
    """Let an error stay the one that is raised, whatever goes wrong while undoing."""
    try:
        yield
    except Exception as second:  # noqa: BLE001 - a vector store may raise anything; it is told
        error.add_note(f"and the corpus could not be brought back to the vector store: {second!r}")


def _provisional(documents: Sequence[Document], ids: Sequence[str | None]) -> list[str]:
    """An id for every document, a random one where it has none."""
    if len(ids) != len(documents):
        raise IngestError(
            f"{len(ids)} ids for {len(documents)} documents; give one for each, or none at all"
        )
    return [document_id or str(uuid.uuid4()) for document_id in ids]


def _present(ids: Sequence[str], stored: Sequence[Document] | None) -> list[str]:
    """The ids that have a document, each once; all of them where the store cannot tell."""
    held = set(ids) if stored is None else {document.id for document in stored}
    return [each for each in dict.fromkeys(ids) if each in held]


def required_ids(ids: Sequence[str] | None) -> Sequence[str]:
    """The ids of a deletion.

    Raises:
        ValueError: There are none: the contract of LangChain asks for this type.
    """
    if ids is None:
        raise ValueError(
            "delete needs ids: what goes by any other criterion could not leave the corpus too; "
            "look up the ids first"
        )
    return ids
