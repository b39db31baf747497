"""What a corpus holds and who owns it, in SQLite."""

from __future__ import annotations

from pc_rag.corpus.catalog.catalog import Catalog
from pc_rag.corpus.catalog.records import (
    CatalogStats,
    ChunkId,
    ChunkRecord,
    DocumentChange,
    DocumentRecord,
    EntryRecord,
    NewChunk,
    PrefixRecord,
    PrefixRole,
    ScaffoldEntry,
    ScaffoldRecord,
    StoredVectors,
    Unowned,
    chunk_id_of,
    prefix_id_of,
    scaffold_id_of,
)

__all__ = [
    "Catalog",
    "CatalogStats",
    "ChunkId",
    "ChunkRecord",
    "DocumentChange",
    "DocumentRecord",
    "EntryRecord",
    "NewChunk",
    "PrefixRecord",
    "PrefixRole",
    "ScaffoldEntry",
    "ScaffoldRecord",
    "StoredVectors",
    "Unowned",
    "chunk_id_of",
    "prefix_id_of",
    "scaffold_id_of",
]
