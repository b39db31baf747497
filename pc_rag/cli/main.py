"""``pc-rag``: the commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

import pc_rag
from pc_rag.cli.ask import ask
from pc_rag.cli.check import check
from pc_rag.cli.demo import demo
from pc_rag.cli.edge import Edge
from pc_rag.cli.gc import gc
from pc_rag.cli.index import index
from pc_rag.cli.models import models
from pc_rag.cli.pml import pml
from pc_rag.cli.remove import remove
from pc_rag.cli.stats import stats

app = typer.Typer(
    name="pc-rag",
    cls=Edge,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
"""Run it by calling it; errors become messages and exit codes at its edge."""


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"pc-rag {pc_rag.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Prompt Cache for RAG: every corpus chunk is prefilled once, then reused by every question.

    Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 the input was refused,
    2 wrong usage or setting, 3 the store or the model failed, 130 interrupted.
    """


app.command()(index)
app.command()(ask)
app.command()(stats)
app.command()(gc)
app.command()(remove)
app.command()(check)
app.add_typer(pml, name="pml")
app.add_typer(models, name="models")
app.command()(demo)
