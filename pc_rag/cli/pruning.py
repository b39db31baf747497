"""Removing documents whose files are gone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pc_rag.corpus import Catalog


def prune(
    catalog: Catalog,
    folders: Iterable[Path],
    *,
    seen_sources: Collection[str],
    seen_ids: Collection[str],
) -> list[str]:
    """Remove documents of folders that the folders no longer hold.

    A document goes when its file is not there any more, or when its file was read and did not give
    it (a PDF that lost pages). A file that is there but could not be read keeps its documents.

    Args:
        catalog: Of the store.
        folders: Folders that were read.
        seen_sources: Sources of the documents that were read.
        seen_ids: Their ids.

    Returns:
        Ids of the removed documents, sorted.
    """
    roots = [folder.resolve() for folder in folders if folder.is_dir()]
    removed = []
    for record in catalog.documents():
        path = Path(record.source)
        if not path.is_absolute() or not any(path.is_relative_to(root) for root in roots):
            continue
        is_stale = record.source in seen_sources and record.id not in seen_ids
        if (is_stale or not path.exists()) and catalog.remove_document(record.id):
            removed.append(record.id)
    return sorted(removed)
