"""Reclaiming what no document needs any more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pc_rag.corpus.kept import collect_expired
from pc_rag.corpus.reports import GcReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.catalog.records import ChunkId
    from pc_rag.kv.base import KVStore
    from pc_rag.types import ModuleKey


def collect_garbage(
    catalog: Catalog,
    store: KVStore,
    *,
    entries_of: Callable[[ChunkId], Mapping[ModuleKey, int]] | None = None,
    clock: Callable[[], float] = time.time,
) -> GcReport:
    """Delete the chunks that no document owns, their entries, and kept ones whose time is over.

    A scaffold goes with the first of its chunks.

    Entries go before the catalog forgets them: after a crash in between the next call goes on.

    Args:
        catalog: Knows what is owned.
        store: Holds the entries.
        entries_of: Every entry a chunk may have, with its bytes of keys and values; by default
            those that the catalog noted, which needs no model.
        clock: Seconds of the wall clock: tells which kept entries (``CachePoint``) are expired.
    """
    if entries_of is None:

        def entries_of(chunk_id: ChunkId) -> Mapping[ModuleKey, int]:
            return {each.key: each.num_bytes for each in catalog.entries.of_chunk(chunk_id)}

    unowned = catalog.unowned()
    removed = {**collect_expired(catalog, store, clock=clock), **_collect_scaffolds(catalog, store)}
    num_entries, num_bytes = len(removed), sum(removed.values())
    for chunk_id in unowned.chunk_ids:
        for key, entry_bytes in entries_of(chunk_id).items():
            if store.remove(key):
                num_entries += 1
                num_bytes += entry_bytes
    num_chunks = catalog.purge(unowned)
    return GcReport(
        num_documents=len(unowned.document_ids),
        num_chunks=num_chunks,
        num_entries=num_entries,
        num_bytes=num_bytes,
    )


def _collect_scaffolds(catalog: Catalog, store: KVStore) -> dict[ModuleKey, int]:
    """Remove the scaffolds that lost a chunk; their entries that left the store, with bytes."""
    dead = catalog.scaffolds.dead()
    removed = {
        key: num_bytes
        for scaffold in dead
        for key, num_bytes in catalog.scaffolds.entries_of(scaffold.id).items()
        if store.remove(key)
    }
    catalog.scaffolds.remove(scaffold.id for scaffold in dead)
    return removed
