"""``pc-rag gc``: reclaim what no document owns, and what expired. No model is loaded."""

from __future__ import annotations

from dataclasses import asdict

from pc_rag.cli import options
from pc_rag.cli.output import bytes_text, err, key_value_table, out, print_json


def gc(store: options.Store, as_json: options.AsJson = False) -> None:
    """Delete unowned chunks, their entries, and kept entries that expired. Loads no model."""
    from pc_rag.cli.store_folder import StoreFolder
    from pc_rag.corpus.garbage import collect_garbage

    folder = StoreFolder(store)
    folder.require()
    with folder.open_catalog() as catalog, err.status("collecting"):
        tier = folder.open_disk_tier()
        try:
            report = collect_garbage(catalog, tier)
        finally:
            tier.close()
    if as_json:
        print_json(asdict(report))
        return
    reclaimed = f"{report.num_entries:,} ({bytes_text(report.num_bytes)})"
    rows = [
        ("tombstones", f"{report.num_documents:,}"),
        ("chunks", f"{report.num_chunks:,}"),
        ("entries", reclaimed),
    ]
    out.print(key_value_table(rows, title="reclaimed"))
