"""Documents on their way into a corpus: prepared, in windows, counted, published."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import DocumentChange
from pc_rag.corpus.reports import IngestProgress, IngestReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pc_rag.corpus.catalog.records import ChunkId, NewChunk
    from pc_rag.corpus.documents import Document
    from pc_rag.engine.entry_source import Encoded

_WINDOW_TOKENS = 16_384
"""Documents are published once about this many tokens of them are encoded."""


@dataclass(frozen=True, slots=True)
class PreparedDocument:
    """A document with its chunks.

    Attributes:
        document: The document.
        change: What adding it changes.
        chunks: Its chunks with their tokens.
        based_on: See ``Catalog.add_document``.
    """

    document: Document
    change: DocumentChange
    chunks: tuple[NewChunk, ...]
    based_on: float | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What has just become visible.

    Attributes:
        chunks: Ids and texts of the chunks of new and changed documents.
        follows: Generation of the catalog to which just these chunks were added; ``None`` where
            something else changed too: chunks went, or another thread or process published.
        generation: Generation of the catalog with them.
    """

    chunks: tuple[tuple[ChunkId, str], ...]
    follows: int | None
    generation: int


@dataclass(slots=True)
class Tally:
    """Counts what an ingest does. Not for use by several threads at once.

    ``num_evicted_before`` is what the store had evicted when it began.
    """

    num_evicted_before: int = 0
    started: float = field(default_factory=time.monotonic)
    changes: dict[DocumentChange, int] = field(
        default_factory=lambda: dict.fromkeys(DocumentChange, 0)
    )
    num_encoded: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_dropped: int = 0

    def count(self, encoded: Encoded) -> None:
        """Take in one entry that was made."""
        self.num_encoded += 1
        self.num_tokens += encoded.num_tokens
        self.num_bytes += encoded.num_bytes
        self.num_dropped += encoded.refusal is not None

    def report(self, *, num_evictions: int) -> IngestReport:
        """What the ingest did; ``num_evictions`` is what the store has evicted by now."""
        return IngestReport(
            num_added=self.changes[DocumentChange.ADDED],
            num_updated=self.changes[DocumentChange.UPDATED],
            num_metadata_only=self.changes[DocumentChange.METADATA],
            num_unchanged=self.changes[DocumentChange.UNCHANGED],
            num_encoded=self.num_encoded,
            num_encoded_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            num_dropped=self.num_dropped,
            num_evicted=num_evictions - self.num_evicted_before,
            seconds=self.progress.seconds,
        )

    @property
    def progress(self) -> IngestProgress:
        """How far the ingest is."""
        return IngestProgress(
            num_chunks=self.num_encoded,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            seconds=time.monotonic() - self.started,
        )


def windows(prepared: Iterable[PreparedDocument]) -> Iterator[list[PreparedDocument]]:
    """Documents in groups; those before one that fails are given before the failure is."""
    window: list[PreparedDocument] = []
    num_tokens = 0
    try:
        for document in prepared:
            window.append(document)
            num_tokens += sum(len(chunk.token_ids) for chunk in document.chunks)
            if num_tokens >= _WINDOW_TOKENS:
                yield window
                window, num_tokens = [], 0
    except Exception:
        if window:
            yield window
        raise
    if window:
        yield window
