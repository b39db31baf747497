"""The values that go into the catalog and come out of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    import numpy.typing as npt

    from pc_rag.types import Fingerprint, ModuleKey, TokenIds

ChunkId = NewType("ChunkId", str)
"""Hex SHA-256 of a chunk's text: the same text is the same chunk, in whatever document."""


def chunk_id_of(text: str) -> ChunkId:
    """The id of a chunk with this text."""
    return ChunkId(hashlib.sha256(text.encode()).hexdigest())


def prefix_id_of(token_ids: TokenIds, tokenizer_id: str) -> str:
    """The id of a prefix with these tokens under this tokenizer.

    Not of its text: a template's control tokens and a user's plain text may read alike.
    """
    ids = " ".join(map(str, token_ids))
    return hashlib.sha256(f"{tokenizer_id}\0{ids}".encode()).hexdigest()


def scaffold_id_of(chunk_ids: Iterable[ChunkId], separator: str) -> str:
    """The id of the scaffold of these chunks in this order with this text between them."""
    return hashlib.sha256("\0".join((*chunk_ids, separator)).encode()).hexdigest()


class DocumentChange(StrEnum):
    """What adding a document changes."""

    ADDED = "added"
    """There was no document of this id, or it had been removed."""
    UPDATED = "updated"
    """Its text changed, or the way it is chunked."""
    METADATA = "metadata"
    """Only its source or metadata changed; its chunks stay as they are."""
    UNCHANGED = "unchanged"
    OUTDATED = "outdated"
    """Nothing: the version that it was made from has been replaced or removed meanwhile."""


class PrefixRole(StrEnum):
    """What a prefix is to the corpus."""

    DEFAULT = "default"
    """The corpus's own; there is at most one."""
    ADOPTED = "adopted"
    """Learned from a caller's prompts, or a former default."""


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk to add.

    Attributes:
        text: Its text, stripped and not empty.
        token_ids: Its tokens under the catalog's tokenizer.
    """

    text: str
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """A stored chunk.

    Attributes:
        id: SHA-256 of its text.
        text: Its text.
        token_ids: Its tokens under the catalog's tokenizer; ``None`` where it has only been
            tokenised for another one, see ``Catalog.record_tokens``.
    """

    id: ChunkId
    text: str
    token_ids: TokenIds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRecord:
    """A live document, without its text.

    Attributes:
        id: Its name.
        source: Where its text comes from.
        metadata: Facts to filter by.
        content_digest: Hex SHA-256 of its text, or of its chunks where it was split elsewhere.
        added_at: Unix time of its last change, seconds.
    """

    id: str
    source: str
    metadata: Mapping[str, str]
    content_digest: str
    added_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord:
    """Says that the KV store was given an entry of a chunk.

    Attributes:
        key: The entry.
        chunk_id: The chunk it was encoded from.
        prefix_id: The prefix it was encoded behind; ``None`` under visibility ``module``.
        fingerprint: The model that encoded it.
        num_bytes: Bytes of its keys and values.
    """

    key: ModuleKey
    chunk_id: ChunkId
    prefix_id: str | None
    fingerprint: Fingerprint
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldRecord:
    """Chunks that belong together.

    Attributes:
        id: See ``scaffold_id_of``.
        chunk_ids: The chunks in order, at least two, each once.
        separator: The text between them.
    """

    id: str
    chunk_ids: tuple[ChunkId, ...]
    separator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldEntry:
    """Says that the KV store was given an entry of a scaffold.

    Attributes:
        key: The entry.
        scaffold_id: The scaffold.
        prefix_id: The prefix it was encoded behind; ``None`` under visibility ``module``.
        fingerprint: The model that encoded it.
        num_bytes: Bytes of its keys and values.
    """

    key: ModuleKey
    scaffold_id: str
    prefix_id: str | None
    fingerprint: Fingerprint
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRecord:
    """Text that stands before the chunks.

    Attributes:
        id: See ``prefix_id_of``.
        text: Its text.
        token_ids: Its tokens under the catalog's tokenizer.
        role: What it is to the corpus.
    """

    id: str
    text: str
    token_ids: TokenIds
    role: PrefixRole


@dataclass(frozen=True, slots=True, eq=False)
class StoredVectors:
    """Vectors of live chunks under one embedder.

    Attributes:
        chunk_ids: The chunks, sorted.
        vectors: ``[num_chunks, dim]`` float32; ``[0, 0]`` where there are none.
    """

    chunk_ids: tuple[ChunkId, ...]
    vectors: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unowned:
    """What no live document needs; see ``Catalog.unowned``.

    Attributes:
        chunk_ids: Chunks without a live owner.
        module_keys: Their entries, to be removed from the KV store before ``Catalog.purge``.
        document_ids: Removed documents, whose tombstones go too.
        num_bytes: Bytes of keys and values in those entries.
    """

    chunk_ids: tuple[ChunkId, ...]
    module_keys: tuple[ModuleKey, ...]
    document_ids: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogStats:
    """Numbers of a catalog.

    Attributes:
        num_documents: Live documents.
        num_tombstones: Removed documents that ``purge`` has not reclaimed.
        num_chunks: Chunks with a live owner.
        num_unowned_chunks: Chunks without one.
        num_tokens: Tokens of the chunks with a live owner, under the catalog's tokenizer.
        num_scaffolds: Scaffolds whose chunks all have a live owner.
        num_entries: Recorded entries, of every model and prefix, those of scaffolds among them.
        entry_bytes: Bytes of keys and values in them.
        num_prefixes: Prefixes under the catalog's tokenizer.
    """

    num_documents: int
    num_tombstones: int
    num_chunks: int
    num_unowned_chunks: int
    num_tokens: int
    num_scaffolds: int
    num_entries: int
    entry_bytes: int
    num_prefixes: int
