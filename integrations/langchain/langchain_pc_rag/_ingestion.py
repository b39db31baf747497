"""Documents into a vector store and a corpus at once; what the index and the store share."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from langchain_core.runnables import run_in_executor
from langchain_core.vectorstores import VectorStore

from pc_rag.corpus import Document as CorpusDocument
from pc_rag.errors import IngestError
from pc_rag.serving.finishing import ended, tidied
from pc_rag.serving.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from langchain_core.documents import Document

    from pc_rag.corpus import Corpus

_T = TypeVar("_T")


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
    Where either step fails or is interrupted, the corpus goes back to what the store holds, as far
    as the store can tell by ``get_by_ids``.

    Attributes:
        vectorstore: Holds the documents.
        corpus: Holds the keys and values of their texts, each text one chunk.
        namespace: Put before ids in the corpus.
    """

    vectorstore: VectorStore
    corpus: Corpus
    namespace: str = ""

    def add(
        self,
        documents: Sequence[Document],
        ids: Sequence[str | None],
        options: Mapping[str, Any],
    ) -> list[str]:
        """Encode documents, then add them to the store.

        Those who add, replace or delete documents of the same ids take turns.

        Args:
            documents: What is added.
            ids: The id of each, ``None`` where the store is to give one.
            options: What else the store is told.

        Returns:
            Their ids, as the store says.
        """
        provisional = _provisional(documents, ids)
        with _turns.take(self._keys(provisional)):
            return self._add(documents, ids, provisional, options)

    async def aadd(
        self,
        documents: Sequence[Document],
        ids: Sequence[str | None],
        options: Mapping[str, Any],
    ) -> list[str]:
        """As ``add``; the corpus works off the event loop, and a cancellation undoes too.

        What the store does in a thread cannot be undone halfway: it is completed.
        """
        provisional = _provisional(documents, ids)

        async def work() -> list[str]:
            async with _turns.atake(self._keys(provisional)):
                return await self._aadd(documents, ids, provisional, options)

        return await tidied(work())

    def delete(self, ids: Sequence[str], **options: Any) -> Deletion:
        """Delete the documents that the store has of these ids; others are no failure."""
        with _turns.take(self._keys(ids)):
            return self._delete(ids, options)

    async def adelete(self, ids: Sequence[str], **options: Any) -> Deletion:
        """As ``delete``; off the event loop, and cancelled like ``aadd``."""

        async def work() -> Deletion:
            async with _turns.atake(self._keys(ids)):
                return await self._adelete(ids, options)

        return await tidied(work())

    def _add(
        self,
        documents: Sequence[Document],
        ids: Sequence[str | None],
        provisional: list[str],
        options: Mapping[str, Any],
    ) -> list[str]:
        try:
            self._encode(documents, provisional)
            given = list(self.vectorstore.add_documents(list(documents), **options) or ())
            return self._settled(documents, ids, provisional, given)
        except BaseException as error:
            with _noting(error):
                self.forget(_made_up(ids, provisional))
                self._return_to(provisional, self._stored(provisional))
            raise

    async def _aadd(
        self,
        documents: Sequence[Document],
        ids: Sequence[str | None],
        provisional: list[str],
        options: Mapping[str, Any],
    ) -> list[str]:
        if not self._has_own("aadd_documents", "aadd_texts"):
            return await _in_thread(self._add, documents, ids, provisional, options)
        try:
            await _in_thread(self._encode, documents, provisional)
            given = list(await self.vectorstore.aadd_documents(list(documents), **options) or ())
            return await _in_thread(self._settled, documents, ids, provisional, given)
        except BaseException as error:
            with _noting(error):
                await _in_thread(self.forget, _made_up(ids, provisional))
                stored = await self._astored(provisional)
                await _in_thread(self._return_to, provisional, stored)
            raise

    def _delete(self, ids: Sequence[str], options: Mapping[str, Any]) -> Deletion:
        stored = self._stored(ids)
        present = _present(ids, stored)
        try:
            is_refused = bool(present) and self.vectorstore.delete(present, **options) is False
        except BaseException as error:
            with _noting(error):
                self._return_to(present, self._stored(present))
            raise
        if is_refused:
            return self._refused(present, self._stored(present))
        return self._deleted(ids, present, is_certain=stored is not None)

    async def _adelete(self, ids: Sequence[str], options: Mapping[str, Any]) -> Deletion:
        if not self._has_own("adelete"):
            return await _in_thread(self._delete, ids, options)
        stored = await self._astored(ids)
        present = _present(ids, stored)
        try:
            is_refused = bool(present) and (
                await self.vectorstore.adelete(present, **options) is False
            )
        except BaseException as error:
            with _noting(error):
                await _in_thread(self._return_to, present, await self._astored(present))
            raise
        if is_refused:
            return await _in_thread(self._refused, present, await self._astored(present))
        return await _in_thread(self._deleted, ids, present, is_certain=stored is not None)

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

    def _refused(self, ids: list[str], stored: Sequence[Document] | None) -> Deletion:
        """What a store did that says it did not delete: it may have deleted some."""
        self._return_to(ids, stored)
        kept = _present(ids, stored)
        return Deletion([each for each in ids if each not in kept], kept)

    def _deleted(self, ids: Sequence[str], present: list[str], *, is_certain: bool) -> Deletion:
        known = self.forget(ids)
        return Deletion(present if is_certain else known, [])

    def _has_own(self, *methods: str) -> bool:
        """Whether the store has one of these methods, not only LangChain's, which use a thread."""
        kind = type(self.vectorstore)
        return any(getattr(kind, each) is not getattr(VectorStore, each) for each in methods)

    def _keys(self, ids: Sequence[str]) -> list[tuple[int, str]]:
        """What is worked on: documents of a store, whoever wraps it."""
        return [(id(self.vectorstore), each) for each in ids]


_turns = Turns()
"""Of all stores in the process, since several indexes may wrap one; holds nothing but queues."""


async def _in_thread(call: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Call off the event loop; returns, or is cancelled, when the call is over."""
    return await ended(run_in_executor(None, call, *args, **options))


@contextmanager
def _noting(error: BaseException) -> Iterator[None]:
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


def _made_up(ids: Sequence[str | None], provisional: Sequence[str]) -> list[str]:
    """The random ids, of which the store was told nothing."""
    return [ours for given, ours in zip(ids, provisional, strict=True) if not given]


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
