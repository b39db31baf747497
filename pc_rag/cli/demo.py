"""``pc-rag demo``: the main job on real text, with a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pc_rag.cli import options
from pc_rag.cli.output import print_json, say


def demo(
    *,
    all_topics: Annotated[
        bool,
        typer.Option(
            "--all", help="Index the whole reference: five times the text, time and room."
        ),
    ] = False,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="DIR", help="Folder of the store. [default: in the user's cache]"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="As for index. [default: smollm2, which needs no network]",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Let the uncached arm finish its answers and print both."),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the store first, so that all is encoded again.")
    ] = False,
    embedder: options.Embedder = None,
    as_json: options.AsJson = False,
) -> None:
    """Index the Python language reference and ask it five questions, cached and uncached.

    The first run encodes a selection of about 20,000 tokens; later runs start from the store. Every
    question is answered from four retrieved chunks whose KV is read, and its time to the first
    token is compared with that of the same prompt computed in full.
    """
    from pc_rag.cli import demo_report
    from pc_rag.cli.demo_run import run_demo
    from pc_rag.cli.opening import Choice
    from pc_rag.cli.store_folder import StoreFolder
    from pc_rag.model.builtin import DEFAULT_MODEL
    from pc_rag.model.cache_folder import cache_folder

    folder = StoreFolder(store or cache_folder() / "demo")
    if fresh:
        folder.delete()
    say(f"store: {folder.root}", style="dim")
    choice = Choice(model=model or DEFAULT_MODEL, dtype="auto", embedder=embedder)
    result = run_demo(
        folder,
        choice,
        all_topics=all_topics,
        compares=compare,
        on_ingested=None if as_json else demo_report.show_start,
        on_answered=None if as_json else demo_report.show_answer,
    )
    if as_json:
        print_json(demo_report.demo_dict(result))
    else:
        demo_report.show_end(result)
