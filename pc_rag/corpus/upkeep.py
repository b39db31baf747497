"""Keeping a corpus in step with whoever owns its documents: a framework's stores and caches."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import TYPE_CHECKING, Protocol

from pc_rag.corpus.documents import Document, content_digest, document_id
from pc_rag.corpus.prefixes import chunk_recipe
from pc_rag.corpus.reports import IngestReport
from pc_rag.errors import IngestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.catalog.records import DocumentRecord
    from pc_rag.corpus.ingest import Ingest, OnProgress
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.corpus.publishing import PreparedDocument
    from pc_rag.corpus.scaffolds import Scaffolds
    from pc_rag.engine import PromptCache

    class Add(Protocol):
        """``Corpus.add``."""

        def __call__(
            self,
            documents: Iterable[Document | PreparedDocument],
            *,
            on_progress: OnProgress | None = None,
        ) -> IngestReport:
            """See there."""


_RESTORED = "restored:"
"""Begins the names of settings: which storage all entries of some documents were last in."""

_ANY_TOKENS = (0,)
_NUM_TRIES = 8
"""A document that others change this often meanwhile is a fault of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileReport:
    """What bringing a corpus in step did.

    Attributes:
        removed: Ids of documents that nobody owns any more; ``Corpus.gc`` reclaims their bytes.
        num_kept: Documents that are in the corpus now and stay.
        missing: Ids of documents that should be there, are not, and of which no text is at hand.
        ingest: What was encoded and changed for those that stay.
    """

    removed: tuple[str, ...] = ()
    num_kept: int = 0
    missing: tuple[str, ...] = ()
    ingest: IngestReport = field(default_factory=IngestReport)


@dataclass(frozen=True, slots=True)
class _Merged:
    """A document to be written, and the version it was made from; see ``Catalog.add_document``."""

    document: Document
    based_on: float


class Upkeep:
    """Keeps a corpus in step with the owner of its documents. Thread-safe.

    Args:
        engine: Whose store and model.
        catalog: Knows documents and chunks.
        ingest: Prepares documents, and encodes what is missing of known ones.
        scaffolds: Encodes what is missing of scaffolds.
        prefixes: Says what chunks are encoded behind.
        add: ``Corpus.add``.
    """

    def __init__(
        self,
        engine: PromptCache,
        catalog: Catalog,
        ingest: Ingest,
        *,
        scaffolds: Scaffolds,
        prefixes: Callable[[], Sequence[CorpusPrefix]],
        add: Add,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._prefixes = prefixes
        self._add = add
        self._ingest = ingest
        self._scaffolds = scaffolds
        self._lock = RLock()  # a callback of progress may ensure others

    @property
    def revision(self) -> str:
        """Names what the corpus holds now; equal while nothing of it changed.

        Another one once a document came, changed or went, the catalog or the store was deleted and
        made anew, or model, dtype, tenant or prefixes are others. Evictions do not change it.

        Raises:
            StoreIOError: A medium failed.
        """
        return _digest(self._catalog.id(), str(self._catalog.generation()), self._storage())

    def documents(self, where: Mapping[str, str] | None = None) -> tuple[DocumentRecord, ...]:
        """The documents that have all of this metadata, by id."""
        wanted = (where or {}).items()
        return tuple(
            record for record in self._catalog.documents() if wanted <= record.metadata.items()
        )

    def chunk_texts(self, document_id: str) -> tuple[str, ...]:
        """The texts of a document's chunks, in its order; none where there is no such document."""
        return tuple(chunk.text for chunk in self._catalog.chunks_of(document_id))

    def ensure(
        self, documents: Iterable[Document], *, on_progress: OnProgress | None = None
    ) -> IngestReport:
        """Make sure that chunks are there with their entries, now, and drop nothing.

        Encodes what was deleted or evicted, and takes parts of documents: chunks that a known
        document lacks come behind those it has; its source and metadata stay. One that lacks none
        stays as it is, however it was split; but where all of it is given, in the order given.
        Calls take turns, and one that is changed or removed meanwhile is looked at again.

        Args:
            documents: Made with ``Document.of_chunks``, each id once.
            on_progress: Called after every encoded chunk.

        Raises:
            IngestError: A document has no chunks of its own, or is changed by others over and over;
                and all that ``Corpus.add`` raises.
        """
        with self._lock:
            left = {document_id(each): each for each in documents}
            report = IngestReport()
            for _ in range(_NUM_TRIES):
                merged = {id_: self._beside_known(each) for id_, each in left.items()}
                known = [id_ for id_, each in merged.items() if each is None]
                changed = [each for each in merged.values() if each is not None]
                report += self._add(self._prepared(changed), on_progress=on_progress)
                report += self._encoded(known, on_progress=on_progress)
                left = {
                    id_: left[id_] for id_, each in merged.items() if self._lacks(left[id_], each)
                }
                if not left:
                    return report
        raise IngestError(
            f"documents {sorted(left)[:4]}: others replaced or removed them {_NUM_TRIES} times "
            "while they were encoded; find out who adds them besides, and try again"
        )

    def restore(self, where: Mapping[str, str] | None = None) -> IngestReport:
        """Encode what went with the store: every missing entry of the documents, and of scaffolds.

        Looks only when the store was deleted or is another, or the model is, since the last call
        for the same documents: it costs next to nothing otherwise, and what a full store evicts is
        not encoded over and over.

        Args:
            where: Metadata of the documents; all of them by default.

        Returns:
            What was encoded; the documents, of which none changed, are not counted, nor are
            entries of scaffolds.

        Raises:
            StoreIOError: A medium failed.
        """
        name = _RESTORED + _digest(
            *(part for pair in sorted((where or {}).items()) for part in pair)
        )
        with self._lock:
            storage = self._storage()
            if self._catalog.setting(name) == storage:
                return IngestReport()
            report = self._ingest.encode_known(record.id for record in self.documents(where))
            self._scaffolds.encode_known()
            self._catalog.put_setting(name, storage)
        return report

    def reconcile(
        self,
        wanted: Mapping[str, Document | None],
        *,
        where: Mapping[str, str] | None = None,
        drops_all: bool = False,
    ) -> ReconcileReport:
        """Let the corpus hold the documents that their owner has, and no others.

        What is encoded comes first: where that fails, nothing was removed.

        Args:
            wanted: What the owner has, by id: documents that are added where they are new or
                differ, and ``None`` where the owner knows a document but not its chunks; those that
                the corpus has of it stay, and missing entries of them are encoded.
            where: Metadata of the owner's documents; others are left alone.
            drops_all: Whether an owner who has nothing is believed.

        Raises:
            IngestError: Nothing is wanted and the corpus has documents, which would all go; and all
                that ``Corpus.add`` raises.
        """
        held = {record.id: record for record in self.documents(where)}
        if held and not wanted and not drops_all:
            raise IngestError(
                f"reconcile: the owner has no document and the corpus has {len(held)}, which would "
                "all be removed; look whether it is the right one, or pass drops_all=True"
            )
        given = [document for document in wanted.values() if document is not None]
        known = [id_ for id_, each in wanted.items() if each is None and id_ in held]
        report = self._add(given) + self._encoded(known)
        removed = [id_ for id_ in held if id_ not in wanted and self._catalog.remove_document(id_)]
        return ReconcileReport(
            removed=tuple(removed),
            num_kept=len(given) + len(known),
            missing=tuple(id_ for id_, each in wanted.items() if each is None and id_ not in held),
            ingest=report,
        )

    def _storage(self) -> str:
        """Names where entries lie and what decides their keys: model, dtype, tenant, prefixes."""
        recipes = (chunk_recipe(self._engine, _ANY_TOKENS, each) for each in self._prefixes())
        keys = sorted(recipe.address.key for recipe in recipes)
        return _digest(self._engine.store.generation, *keys)

    def _encoded(
        self, document_ids: Sequence[str], *, on_progress: OnProgress | None = None
    ) -> IngestReport:
        """Encode what is missing of documents that do not change."""
        report = self._ingest.encode_known(document_ids, on_progress=on_progress)
        return replace(report, num_unchanged=len(document_ids))

    def _prepared(self, changed: Iterable[_Merged]) -> Iterator[PreparedDocument]:
        for each in changed:
            for prepared in self._ingest.prepare([each.document]):
                yield replace(prepared, based_on=each.based_on)

    def _lacks(self, given: Document, merged: _Merged | None) -> bool:
        """Whether others changed or removed a document since it was merged with what is known."""
        if merged is None:
            return self._beside_known(given) is not None
        record = self._catalog.document(document_id(given))
        return record is None or record.content_digest != content_digest(merged.document)

    def _beside_known(self, document: Document) -> _Merged | None:
        """A document with the chunks that the corpus has of it, in its own order if it has all.

        ``None`` where that is what the corpus has: it may have been split here, and stays so.
        """
        id_ = document_id(document)
        if document.chunks is None:
            raise IngestError(
                f"document {id_!r} has no chunks of its own; make it with Document.of_chunks, or "
                "add it"
            )
        record = self._catalog.document(id_)
        if record is None:
            return _Merged(document, 0.0)
        known = self.chunk_texts(id_)
        num_known = Counter(known)
        lacking = [text for text in dict.fromkeys(document.chunks) if text not in num_known]
        has_all = num_known <= Counter(document.chunks)
        chunks = document.chunks if has_all else (*known, *lacking)
        if chunks == known:
            return None
        whole = Document.of_chunks(chunks, id=id_, source=record.source, metadata=record.metadata)
        return _Merged(whole, record.added_at)


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
