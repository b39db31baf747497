"""Reclaiming what no document needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.corpus.reports import GcReport

if TYPE_CHECKING:
    from pc_rag.corpus.catalog import Catalog
    from pc_rag.kv.base import KVStore


def collect_garbage(catalog: Catalog, store: KVStore) -> GcReport:
    """Delete the chunks that no document owns, and their entries; needs no model.

    Entries go before the catalog forgets them: after a crash in between the next call goes on.
    """
    unowned = catalog.unowned()
    for key in unowned.module_keys:
        store.remove(key)
    num_chunks = catalog.purge(unowned)
    return GcReport(
        num_documents=len(unowned.document_ids),
        num_chunks=num_chunks,
        num_entries=len(unowned.module_keys),
        num_bytes=unowned.num_bytes,
    )
