"""``pc-rag stats``: what a store holds. No model is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from pc_rag.cli import options
from pc_rag.cli.output import bytes_text, err, key_value_table, out, print_json

if TYPE_CHECKING:
    from pc_rag.cli.store_folder import Manifest
    from pc_rag.cli.survey import ModelEntries, Survey
    from pc_rag.corpus.catalog.records import CatalogStats
    from pc_rag.kv import StoreStats

_FINGERPRINT_DIGITS = 12


def stats(store: options.Store, as_json: options.AsJson = False) -> None:
    """Show documents, chunks, tokens and bytes of a store; bytes per token against theory.

    Theory is 2 · layers · kv_heads · head_dim · bytes of the dtype. A text has one entry for each
    start it was asked for at where a model's positions are learned, and one behind each prefix.
    Loads no model.
    """
    from pc_rag.cli.store_folder import StoreFolder
    from pc_rag.cli.survey import survey

    folder = StoreFolder(store)
    folder.require()
    manifest = folder.manifest()
    with folder.open_catalog() as catalog:
        held = catalog.stats()
    with err.status("reading the entries' headers"):
        measured = survey(folder.kv)
    tier = folder.open_disk_tier()
    tiers = tier.stats()
    tier.close()
    if as_json:
        print_json(
            {
                "store": str(folder.root),
                "model": manifest.model if manifest else None,
                "dtype": manifest.dtype if manifest else None,
                "settings": dict(manifest.settings) if manifest else {},
                "catalog": asdict(held),
                "tiers": [asdict(each) for each in tiers],
                "entries": [each.to_dict() for each in measured.models],
                "num_unreadable": measured.num_unreadable,
            }
        )
        return
    out.print(key_value_table(_rows(str(folder.root), manifest, held, tiers, measured)))
    if measured.models:
        out.print()
        out.print(_entries_table(measured, manifest))


def _rows(
    place: str,
    manifest: Manifest | None,
    held: CatalogStats,
    tiers: tuple[StoreStats, ...],
    measured: Survey,
) -> list[tuple[str, str]]:
    rows = [
        ("store", place),
        ("model", f"{manifest.model} ({manifest.dtype})" if manifest else "not remembered"),
        ("documents", f"{held.num_documents:,}"),
        ("chunks", f"{held.num_chunks:,} ({held.num_tokens:,} tokens)"),
        ("scaffolds", f"{held.num_scaffolds:,}"),
        (
            "to reclaim by gc",
            f"{held.num_tombstones:,} tombstones, {held.num_unowned_chunks:,} chunks",
        ),
    ]
    rows += [
        (
            f"tier {tier.tier}",
            f"{tier.num_entries:,} entries, {bytes_text(tier.resident_bytes)}",
        )
        for tier in tiers
    ]
    rows += [("starts of texts", _starts_text(each)) for each in measured.models]
    if measured.num_unreadable:
        rows.append(("damaged", f"{measured.num_unreadable:,} files: run pc-rag check"))
    return rows


def _starts_text(entries: ModelEntries) -> str:
    return (
        f"{entries.num_texts:,} texts in {entries.num_entries:,} entries, at most "
        f"{entries.most_starts:,} starts of one, {entries.mean_starts:.1f} on average"
    )


def _entries_table(measured: Survey, manifest: Manifest | None) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    table.add_column("dtype")
    for column in ("entries", "tokens", "bytes", "bytes/token", "theory", "over"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in measured.models:
        is_known = manifest is not None and manifest.fingerprint == each.fingerprint
        known = Path(manifest.model).name if manifest and is_known else ""
        table.add_row(
            known or each.fingerprint[:_FINGERPRINT_DIGITS],
            each.dtype,
            f"{each.num_entries:,}",
            f"{each.num_tokens:,}",
            bytes_text(each.file_bytes),
            f"{each.bytes_per_token:,.1f}",
            f"{each.theory_bytes_per_token:,}",
            f"{each.overhead:.2%}",
        )
    return table
