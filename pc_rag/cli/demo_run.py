"""What the demo does; what it prints stands in ``demo_report``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.cli.answers import Comparison
from pc_rag.cli.demo_script import CHUNKS_A_QUESTION, QUESTIONS, TOPICS
from pc_rag.cli.ingesting import ingest
from pc_rag.cli.opening import open_corpus, warm_up
from pc_rag.cli.survey import survey
from pc_rag.corpus import python_reference
from pc_rag.corpus.readers import python_reference_topics
from pc_rag.model.sampling import GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pc_rag.cli.opening import Choice, OpenedCorpus
    from pc_rag.cli.store_folder import Manifest, StoreFolder
    from pc_rag.cli.survey import ModelEntries
    from pc_rag.corpus import Corpus, IngestReport

_GENERATION = GenerationConfig(max_new_tokens=60, repetition_penalty=1.1)
"""Greedy; the penalty keeps a model of 135 million parameters from going in circles."""


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
    on_answered: Callable[[Comparison], None] | None = None,
    topics: Sequence[str] = TOPICS,
    questions: Sequence[str] = QUESTIONS,
) -> DemoResult:
    """Index the Python reference and ask every question by both arms, cached first.

    Args:
        folder: The store.
        choice: Model and embedder.
        all_topics: Index every topic instead of ``topics``.
        compares: Let the uncached arm finish its answers.
        on_ingested: Called when the documents are in the store.
        on_answered: Called after each question.
        topics: Topics to index; those that this Python lacks are left out.
        questions: What to ask.
    """
    known = set(python_reference_topics())
    selection = None if all_topics else [topic for topic in topics if topic in known]
    max_uncached_tokens = _GENERATION.max_new_tokens if compares else 1
    comparisons = []
    with open_corpus(folder, choice) as opened:
        report = ingest(opened, folder, python_reference(selection)).report
        start = _start(opened, report)
        if on_ingested is not None:
            on_ingested(start)
        warm_up(opened.corpus, generates=True)
        for question in questions:
            comparison = _ask(opened.corpus, question, max_uncached_tokens)
            comparisons.append(comparison)
            if on_answered is not None:
                on_answered(comparison)
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
    uncached_config = GenerationConfig(
        max_new_tokens=max_uncached_tokens, repetition_penalty=_GENERATION.repetition_penalty
    )
    return Comparison(
        question,
        corpus.answer(question, CHUNKS_A_QUESTION, config=_GENERATION, reuse=True),
        corpus.answer(question, CHUNKS_A_QUESTION, config=uncached_config, reuse=False),
    )
