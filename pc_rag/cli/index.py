"""``pc-rag index``: documents into a store."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pc_rag.cli import options
from pc_rag.cli.output import bytes_text, key_value_table, out, print_json, say, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.cli.ingesting import Ingested
    from pc_rag.cli.store_folder import Manifest, StoreFolder
    from pc_rag.corpus import Document, SkippedFile


def index(
    *,
    store: options.Store,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Files, folders, or globs (two stars for any depth)."),
    ] = None,
    model: options.Model = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option("--chunk-tokens", metavar="N", min=1, help="Most tokens of a chunk."),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    config: options.ConfigFile = None,
    embedder: options.Embedder = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Never evict the chunks that this run encodes.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Remove documents of the given folders whose files are gone."),
    ] = False,
    python_reference: Annotated[
        bool,
        typer.Option(
            "--python-reference", help="Index the Python language reference of this interpreter."
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Encode documents once, so that questions about them need not.

    Reads text, Markdown, reStructuredText, code, HTML and PDF. Unchanged documents cost nothing
    when they are indexed again; a changed one replaces its old version. Says what the store will
    need before it starts, and refuses where the disk has no room.
    """
    if not paths and not python_reference:
        raise typer.BadParameter("give at least one PATH, or --python-reference")
    # torch and transformers load here, so that --help and usage errors do not wait for them.
    from pc_rag.cli.ingesting import ingest
    from pc_rag.cli.opening import Choice, open_corpus
    from pc_rag.cli.pruning import prune as prune_documents
    from pc_rag.cli.store_folder import StoreFolder
    from pc_rag.corpus import document_id, read_paths
    from pc_rag.corpus import python_reference as reference_documents

    reader = read_paths(paths or [], exclude=[store])
    reference = reference_documents() if python_reference else iter(())
    sources_by_id: dict[str, str] = {}

    def documents() -> Iterator[Document]:
        for document in chain(reader, reference):
            sources_by_id[document_id(document)] = document.source
            yield document

    folder = StoreFolder(store)
    choice = Choice(
        model=model,
        dtype=dtype,
        device=device,
        embedder=embedder,
        config_file=config,
        settings={} if chunk_tokens is None else {"chunk_tokens": chunk_tokens},
    )
    with open_corpus(folder, choice) as opened:
        try:
            ingested = ingest(opened, folder, documents(), pinned=pinned)
        finally:
            _say_skipped(reader.skipped)
    removed: list[str] = []
    if prune:
        with folder.open_catalog() as catalog:
            removed = prune_documents(
                catalog,
                paths or [],
                seen_sources=set(sources_by_id.values()),
                seen_ids=sources_by_id.keys(),
            )
    _show(ingested, opened.manifest, reader.skipped, removed, folder=folder, as_json=as_json)


def _say_skipped(skipped: list[SkippedFile]) -> None:
    for file in skipped:
        reason = file.reason.removeprefix(f"{file.path}: ")  # some name the file themselves
        say(f"skipped {file.path}: {reason}", style="yellow")


def _show(
    ingested: Ingested,
    manifest: Manifest,
    skipped: list[SkippedFile],
    removed: list[str],
    *,
    folder: StoreFolder,
    as_json: bool,
) -> None:
    report = ingested.report
    if as_json:
        print_json(
            {
                "store": str(folder.root),
                "model": manifest.model,
                "dtype": manifest.dtype,
                "estimate": asdict(ingested.estimate),
                "report": asdict(report) | {"tokens_per_second": report.tokens_per_second},
                "skipped": [asdict(file) for file in skipped],
                "removed": removed,
            }
        )
        return
    changes = (
        f"{report.num_added:,} added, {report.num_updated:,} updated, {report.num_metadata_only:,} "
        f"with new metadata, {report.num_unchanged:,} unchanged, {len(removed):,} removed, "
        f"{len(skipped):,} skipped"
    )
    encoded = (
        f"{report.num_encoded:,} chunks, {report.num_encoded_tokens:,} tokens, "
        f"{bytes_text(report.num_bytes)}"
    )
    rows = [
        ("documents", changes),
        ("encoded", encoded),
        ("time", f"{seconds_text(report.seconds)} ({report.tokens_per_second:,.0f} tokens/s)"),
        ("model", f"{manifest.model} ({manifest.dtype})"),
        ("store", str(folder.root)),
    ]
    if report.num_dropped:
        rows.append(("no room for", f"{report.num_dropped:,} chunks: encoded when asked for"))
    out.print(key_value_table(rows))
