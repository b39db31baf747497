"""``pc-rag check``: read every entry back. No model is loaded."""

from __future__ import annotations

import typer

from pc_rag.cli import options
from pc_rag.cli.edge import ExitCode
from pc_rag.cli.output import err, out, print_json


def check(store: options.Store, as_json: options.AsJson = False) -> None:
    """Read every entry and verify its bytes; damaged ones are set aside and encoded anew when used.

    Exits with 3 where something was damaged. Loads no model.
    """
    from pc_rag.cli.store_folder import StoreFolder

    folder = StoreFolder(store)
    folder.require()
    tier = folder.open_disk_tier()
    try:
        with err.status("reading every entry"):
            report = tier.check_integrity()
    finally:
        tier.close()
    if as_json:
        print_json({"num_checked": report.num_checked, "damaged": list(report.damaged)})
    else:
        for key in report.damaged:
            out.print(f"damaged {key}: set aside in quarantine", soft_wrap=True)
        out.print(f"{report.num_checked:,} entries read, {len(report.damaged):,} damaged")
    if report.damaged:
        raise typer.Exit(ExitCode.FAILED)
