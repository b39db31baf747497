"""What a corpus tells about its work: plain values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pc_rag.corpus.catalog.records import CatalogStats
    from pc_rag.engine import Completion, CompletionStream
    from pc_rag.kv.base import StoreStats


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestEstimate:
    """What adding documents will need, counted before anything is encoded.

    Attributes:
        num_documents: Documents given.
        num_unchanged: Those that are in the corpus already, just as they are.
        num_chunks: Chunks to encode.
        num_tokens: Tokens to encode: of each chunk behind every prefix, and of the prefixes.
        num_bytes: Bytes of their keys and values.
    """

    num_documents: int
    num_unchanged: int
    num_chunks: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestProgress:
    """How far an ingest is.

    Attributes:
        num_chunks: Entries of chunks encoded so far, one behind each prefix.
        num_tokens: Tokens encoded so far.
        num_bytes: Bytes of their keys and values.
        seconds: Since the ingest began.
    """

    num_chunks: int
    num_tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        num_added: New documents.
        num_updated: Documents whose text changed.
        num_metadata_only: Documents of which only source or metadata changed.
        num_unchanged: Documents that were there already.
        num_encoded: Entries of chunks encoded, one behind each prefix.
        num_encoded_tokens: Their tokens.
        num_bytes: Bytes of their keys and values.
        num_dropped: Of those, how many the store had no room for; they are encoded when asked for.
        num_evicted: Entries that the store dropped meanwhile to make room, of this ingest or older
            ones; they are encoded when asked for.
        seconds: Time it took.
    """

    num_added: int = 0
    num_updated: int = 0
    num_metadata_only: int = 0
    num_unchanged: int = 0
    num_encoded: int = 0
    num_encoded_tokens: int = 0
    num_bytes: int = 0
    num_dropped: int = 0
    num_evicted: int = 0
    seconds: float = 0.0

    def __add__(self, other: IngestReport) -> IngestReport:
        """Of two ingests, one after the other."""
        sums = {
            each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)
        }
        return IngestReport(**sums)

    @property
    def num_documents(self) -> int:
        """Documents given."""
        return self.num_added + self.num_updated + self.num_metadata_only + self.num_unchanged

    @property
    def tokens_per_second(self) -> float:
        """Tokens encoded per second of the whole ingest."""
        return self.num_encoded_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a garbage collection reclaimed.

    Attributes:
        num_documents: Tombstones removed.
        num_chunks: Chunks removed.
        num_entries: Entries removed from the store, among them those of scaffolds that lost a
            chunk, and kept ones (``CachePoint``) that expired.
        num_bytes: Bytes of their keys and values.
    """

    num_documents: int
    num_chunks: int
    num_entries: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldReport:
    """A scaffold of a corpus, and what it costs.

    Attributes:
        chunk_ids: Its chunks in order.
        num_tokens: Tokens of its entry: those of the chunks, and of the separators between them.
        num_bytes: Bytes of the entry's keys and values, behind every prefix.
        num_prefixes: Prefixes that it is encoded behind; 1 under visibility ``module``, where all
            of them have one entry.
        num_encoded: Entries encoded by this call; 0 where all were stored.
    """

    chunk_ids: tuple[str, ...]
    num_tokens: int
    num_bytes: int
    num_prefixes: int
    num_encoded: int

    @property
    def num_entries(self) -> int:
        """Entries of its chunks and its own: behind each prefix 1 + m for m chunks."""
        return self.num_prefixes * (1 + len(self.chunk_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusStats:
    """What a corpus holds.

    Attributes:
        catalog: Documents, chunks, tokens.
        store: Tiers of the store, nearest first.
        bytes_per_token: Bytes of one token's KV in theory: 2 · layers · kv_heads · head_dim ·
            bytes of the storage dtype.
        num_prefixes: Prefixes that chunks are encoded behind.
    """

    catalog: CatalogStats
    store: tuple[StoreStats, ...]
    bytes_per_token: int
    num_prefixes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievedChunk:
    """A chunk that a search found.

    Attributes:
        id: The chunk.
        text: Its text.
        score: Cosine similarity to the question.
        sources: Where its documents come from.
        metadata: Of the first of its documents.
    """

    id: str
    text: str
    score: float
    sources: tuple[str, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    Attributes:
        completion: The text and what it cost.
        chunks: What was retrieved, as it stands in the prompt: best first, but the chunks of a
            scaffold together.
    """

    completion: Completion
    chunks: tuple[RetrievedChunk, ...]

    @property
    def text(self) -> str:
        """The answer."""
        return self.completion.text


@dataclass(frozen=True, slots=True)
class AnswerStream:
    """An answer as it is generated; iterate over it for text, ``close`` it to stop.

    Attributes:
        stream: The text.
        chunks: As of ``Answer``.
    """

    stream: CompletionStream
    chunks: tuple[RetrievedChunk, ...]

    def __iter__(self) -> Iterator[str]:
        return self.stream

    def close(self) -> None:
        """Stop; see ``CompletionStream.close``."""
        self.stream.close()

    @property
    def completion(self) -> Completion:
        """The answer, once the stream has ended or was closed; see ``CompletionStream``."""
        return self.stream.completion
