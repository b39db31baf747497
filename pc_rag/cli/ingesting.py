"""Taking documents in, with everything a person waits for said on stderr."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from pc_rag.cli.output import bytes_text, err, say
from pc_rag.errors import IngestError, StoreFull

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pc_rag.cli.opening import OpenedCorpus
    from pc_rag.cli.store_folder import StoreFolder
    from pc_rag.corpus import Document, IngestEstimate, IngestReport
    from pc_rag.corpus.ingest import OnProgress
    from pc_rag.corpus.publishing import PreparedDocument
    from pc_rag.corpus.reports import IngestProgress

_FILE_OVERHEAD_BYTES = 8192
"""What an entry's file takes beyond its keys and values: header, token ids, the last block."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What taking documents in did.

    Attributes:
        estimate: What was said before it began.
        report: What came of it.
    """

    estimate: IngestEstimate
    report: IngestReport


def ingest(
    opened: OpenedCorpus,
    folder: StoreFolder,
    documents: Iterable[Document],
    *,
    pinned: bool = False,
) -> Ingested:
    """Prepare documents, say what they need, and encode what the store lacks.

    The store remembers model and settings before the first chunk is encoded, so that it can be
    asked after an interruption too.

    Raises:
        IngestError: There is no document.
        StoreFull: The file system has no room for the entries; nothing was encoded.
    """
    corpus = opened.corpus
    prepared = _prepare(opened, documents)
    if not prepared:
        raise IngestError("no document to index: every file was skipped, or the folders are empty")
    estimate = corpus.estimate(prepared)
    free_bytes = folder.free_bytes()
    _say_estimate(estimate, free_bytes)
    _check_room(estimate, free_bytes, folder)
    _say_if_capacity_is_short(opened, estimate)
    folder.remember(opened.manifest)
    with _encoding_progress(estimate) as on_progress:
        report = corpus.add(prepared, on_progress=on_progress, pinned=pinned)
    return Ingested(estimate, report)


def _prepare(opened: OpenedCorpus, documents: Iterable[Document]) -> list[PreparedDocument]:
    with err.status("reading") as status:

        def counted() -> Iterator[Document]:
            for number, document in enumerate(documents, start=1):
                status.update(f"reading: {number:,} documents")
                yield document

        return opened.corpus.prepare(counted())


def _say_estimate(estimate: IngestEstimate, free_bytes: int) -> None:
    unchanged = f", {estimate.num_unchanged:,} of them unchanged" if estimate.num_unchanged else ""
    say(
        f"{estimate.num_documents:,} documents{unchanged}; to encode: {estimate.num_chunks:,} "
        f"chunks, {estimate.num_tokens:,} tokens, {bytes_text(estimate.num_bytes)} in the store "
        f"({bytes_text(free_bytes)} free)"
    )


def _check_room(estimate: IngestEstimate, free_bytes: int, folder: StoreFolder) -> None:
    needed = estimate.num_bytes + estimate.num_chunks * _FILE_OVERHEAD_BYTES
    if estimate.num_chunks and needed > free_bytes:
        raise StoreFull(
            f"{folder.root}: the entries need {bytes_text(needed)} and the file system has "
            f"{bytes_text(free_bytes)} free; nothing was encoded. Free some room, choose another "
            f"--store, or index fewer documents"
        )


def _say_if_capacity_is_short(opened: OpenedCorpus, estimate: IngestEstimate) -> None:
    capacity = opened.corpus.engine.config.disk_bytes
    if capacity is not None and estimate.num_bytes > capacity:
        say(
            f"note: disk_bytes is {bytes_text(capacity)}; the least recently used entries will "
            f"make room for others, and are encoded again when they are asked for",
            style="yellow",
        )


@contextmanager
def _encoding_progress(estimate: IngestEstimate) -> Iterator[OnProgress | None]:
    """A bar over tokens on stderr; gives the callback that moves it, or ``None`` for no work."""
    if not estimate.num_tokens:
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("encoding", total=estimate.num_tokens, rate="")

        def on_progress(done: IngestProgress) -> None:
            rate = done.num_tokens / done.seconds if done.seconds else 0.0
            is_last = done.num_tokens >= estimate.num_tokens
            progress.update(
                task,
                completed=done.num_tokens,
                rate=f"{rate:,.0f} tokens/s",
                description="embedding" if is_last else "encoding",
            )

        yield on_progress
