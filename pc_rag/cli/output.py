"""What commands write: results to stdout, everything else to stderr, and how numbers read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

# Texts of documents and paths must show as they are, so neither console reads markup.
out = Console(markup=False, emoji=False, highlight=False)
"""Results."""

err = Console(stderr=True, markup=False, emoji=False, highlight=False)
"""Progress, notes and errors."""

_KILO = 1000
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MILLI = 1e-3


def say(text: str, *, style: str | None = None) -> None:
    """A note or an error, on stderr, in lines as they are."""
    err.print(text, style=style, soft_wrap=True)


def write(text: str) -> None:
    """Part of a result that comes in pieces, on stdout, shown at once."""
    typer.echo(text, nl=False)


def print_json(value: object) -> None:
    """A result for programs: one JSON document on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def bytes_text(num_bytes: float) -> str:
    """Bytes in decimal units: ``1.1 GB``."""
    size, unit = float(num_bytes), 0
    while size >= _KILO and unit < len(_UNITS) - 1:
        size, unit = size / _KILO, unit + 1
    return f"{size:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def seconds_text(seconds: float | None) -> str:
    """A duration: ``85 ms``, ``1.42 s``, ``3 min 20 s``; a dash for none."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds / _MILLI:,.0f} ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:,.0f} min {rest:.0f} s" if minutes else f"{seconds:.2f} s"


def ratio_text(ratio: float | None) -> str:
    """How many times: ``12.3x``; a dash for none."""
    return "-" if ratio is None else f"{ratio:,.1f}x"


def key_value_table(rows: Sequence[tuple[str, str]], *, title: str | None = None) -> Table:
    """Names and their values, one a line."""
    table = Table(title=title, show_header=False, box=None, title_justify="left", pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table
