"""What the demo does; what it prints stands in ``demo_report``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.cli.answers import Comparison
from pc_rag.cli.demo_script import CHUNKS_A_QUESTION, MAX_NEW_TOKENS, QUESTIONS, STOP, TOPICS
from pc_rag.cli.ingesting import ingest
from pc_rag.cli.opening import open_corpus, warm_up
from pc_rag.cli.survey import survey
from pc_rag.corpus import python_reference
from pc_rag.corpus.readers import python_reference_topics
from pc_rag.model.sampling import GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from pc_rag.cli.opening import Choice, OpenedCorpus
    from pc_rag.cli.store_folder import Manifest, StoreFolder
    from pc_rag.cli.survey import ModelEntries
    from pc_rag.corpus import Corpus, IngestReport


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStart:
    """The demo once its documents are in the store.

    Attributes:
        manifest: The model.
        report: What this run's ingest did.
        num_documents: Documents in the store.
        num_chunks: Chunks in the store.
        num_tokens: Their tokens.
    """

    manifest: Manifest
    report: IngestReport
    num_documents: int
    num_chunks: int
    num_tokens: int

    @property
    def num_earlier_chunks(self) -> int:
        """Chunks that an earlier run encoded."""
        return max(self.num_chunks - self.report.num_encoded, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All that the demo found.

    Attributes:
        start: The store.
        comparisons: One a question.
        max_uncached_tokens: Length limit of the uncached arm's answers; 1 where only its time to
            the first token was wanted.
        entries: What the model's entries take on disk; ``None`` where there are none.
    """

    start: DemoStart
    comparisons: tuple[Comparison, ...]
    max_uncached_tokens: int
    entries: ModelEntries | None


def run_demo(
    folder: StoreFolder,
    choice: Choice,
    *,
    all_topics: bool = False,
    compares: bool = False,
    on_ingested: Callable[[DemoStart], None] | None = None,
    on_answered: Callable[[int, Comparison], None] | None = None,
) -> DemoResult:
    """Index the Python reference and ask every question by both arms, cached first.

    Args:
        folder: The store.
        choice: Model and embedder.
        all_topics: Index every topic of the reference, not the selection.
        compares: Let the uncached arm finish its answers.
        on_ingested: Called when the documents are in the store.
        on_answered: Called after each question with its number, from 1.
    """
    known = set(python_reference_topics())  # they differ a little between versions of Python
    selection = None if all_topics else [topic for topic in TOPICS if topic in known]
    max_uncached_tokens = MAX_NEW_TOKENS if compares else 1
    comparisons = []
    with open_corpus(folder, choice) as opened:
        report = ingest(opened, folder, python_reference(selection)).report
        start = _start(opened, report)
        if on_ingested is not None:
            on_ingested(start)
        warm_up(opened.corpus, generates=True)
        for number, question in enumerate(QUESTIONS, start=1):
            comparison = _ask(opened.corpus, question, max_uncached_tokens)
            comparisons.append(comparison)
            if on_answered is not None:
                on_answered(number, comparison)
    fitting = (
        entries
        for entries in survey(folder.kv).models
        if entries.fingerprint == start.manifest.fingerprint
    )
    return DemoResult(
        start=start,
        comparisons=tuple(comparisons),
        max_uncached_tokens=max_uncached_tokens,
        entries=next(fitting, None),
    )


def _start(opened: OpenedCorpus, report: IngestReport) -> DemoStart:
    held = opened.corpus.stats().catalog
    return DemoStart(
        manifest=opened.manifest,
        report=report,
        num_documents=held.num_documents,
        num_chunks=held.num_chunks,
        num_tokens=held.num_tokens,
    )


def _ask(corpus: Corpus, question: str, max_uncached_tokens: int) -> Comparison:
    config = GenerationConfig(max_new_tokens=MAX_NEW_TOKENS, stop=STOP)
    uncached_config = GenerationConfig(max_new_tokens=max_uncached_tokens, stop=STOP)
    return Comparison(
        question,
        corpus.answer(question, CHUNKS_A_QUESTION, config=config, reuse=True),
        corpus.answer(question, CHUNKS_A_QUESTION, config=uncached_config, reuse=False),
    )
