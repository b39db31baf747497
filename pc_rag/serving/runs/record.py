"""The running numbers of one run, until they are frozen to a report."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pc_rag.corpus import chunk_id_of
from pc_rag.corpus.prefix_table import MIN_CHARS
from pc_rag.serving.runs.outcomes import (
    CallOutcome,
    DocumentOutcome,
    DocumentUse,
    FoundDocument,
    outcome_of,
)
from pc_rag.serving.runs.report import RunReport
from pc_rag.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pc_rag.metrics import ModuleUse, RequestMetrics

_WORST_FIRST: Final = (DocumentOutcome.MISS, DocumentOutcome.PARTIAL, DocumentOutcome.HIT)


class RunRecord:
    """The running numbers of one run. Not thread-safe: its handler locks."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.calls: Counter[CallOutcome] = Counter()
        self.retrieved: dict[str, FoundDocument] = {}
        self.returned: dict[str, FoundDocument] = {}
        self.shown: set[str] = set()
        self.told: set[str] = set()
        self.has_retriever = False
        self.modules: dict[str, ModuleUse] = {}
        self.num_module_hits = 0
        self.module_misses: Counter[MissReason] = Counter()
        self.num_prompt_tokens = 0
        self.num_cache_read_tokens = 0
        self.saved_seconds = 0.0
        self.num_known_savings = 0
        self.num_unknown_savings = 0
        self.ttft_seconds: float | None = None

    def add_call(self, outcome: CallOutcome, metrics: RequestMetrics | None) -> None:
        """Count a model call, and what it told."""
        self.calls[outcome] += 1
        if metrics is not None:
            self.add_metrics(metrics)

    def add_metrics(self, metrics: RequestMetrics) -> None:
        """Count what a request told, without a call of its own."""
        self.num_prompt_tokens += metrics.prompt_tokens
        self.num_cache_read_tokens += metrics.num_cache_read_tokens
        if metrics.saved_seconds is None:
            self.num_unknown_savings += 1
        else:
            self.num_known_savings += 1
            self.saved_seconds += metrics.saved_seconds
        if self.ttft_seconds is None:
            self.ttft_seconds = metrics.ttft_seconds
        for use in metrics.modules:
            self._add_module(use)
        self.told |= self.shown

    def _add_module(self, use: ModuleUse) -> None:
        """Count a use; of a module used by several calls the best use is kept."""
        known = self.modules.get(use.label)
        if known is None or _rank(use) >= _rank(known):
            self.modules[use.label] = use
        if use.is_hit:
            self.num_module_hits += 1
        elif use.miss_reason is not None:
            self.module_misses[use.miss_reason] += 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing was called and nothing retrieved."""
        return not (self.calls or self.has_retriever or self.returned)

    def freeze(self) -> RunReport:
        """The numbers now, as plain values that no later callback changes."""
        # Retrievers say what was retrieved; plain functions that return documents may stand in
        # for them, but also filter and rewrite what a retriever gave.
        documents = self.retrieved if self.has_retriever else self.returned
        return RunReport(
            run_id=self.run_id,
            calls={outcome: self.calls[outcome] for outcome in CallOutcome},
            documents=tuple(self._document(*each) for each in documents.items()),
            modules=tuple(self.modules.values()),
            num_module_hits=self.num_module_hits,
            module_misses={reason: self.module_misses[reason] for reason in MissReason},
            num_prompt_tokens=self.num_prompt_tokens,
            num_cache_read_tokens=self.num_cache_read_tokens,
            saved_seconds=self.saved_seconds,
            num_known_savings=self.num_known_savings,
            num_unknown_savings=self.num_unknown_savings,
            ttft_seconds=self.ttft_seconds,
        )

    def note_prompt(self, prompt: str) -> None:
        """Note which of the documents found so far stand in a prompt."""
        for chunk_id, document in (self.retrieved | self.returned).items():
            if any(text and text in prompt for text in document.texts):
                self.shown.add(chunk_id)

    def _document(self, chunk_id: str, document: FoundDocument) -> DocumentUse:
        use = self._use_of(chunk_id, document)
        if use is not None:
            outcome = outcome_of(use)
        elif chunk_id not in self.shown:
            outcome = DocumentOutcome.NOT_IN_PROMPT
        elif chunk_id not in self.told:
            outcome = DocumentOutcome.UNKNOWN
        elif len(document.text) < MIN_CHARS:
            outcome = DocumentOutcome.TOO_SHORT
        else:
            outcome = DocumentOutcome.NOT_INDEXED
        is_whole = use is None or outcome is DocumentOutcome.HIT
        return DocumentUse(
            chunk_id=chunk_id,
            source=document.source,
            outcome=outcome,
            miss_reason=None if use is None or is_whole else use.miss_reason,
        )

    def _use_of(self, chunk_id: str, document: FoundDocument) -> ModuleUse | None:
        """The best use of any form of a document."""
        ids = (chunk_id, *map(chunk_id_of, document.other_texts))
        uses = [self.modules[each] for each in ids if each in self.modules]
        return max(uses, key=_rank) if uses else None


def _rank(use: ModuleUse) -> int:
    """How much of a module was served: the larger the better."""
    return _WORST_FIRST.index(outcome_of(use))


def documents_by_id(documents: Iterable[FoundDocument]) -> dict[str, FoundDocument]:
    """Documents by the id of the chunk that their text is, each text once."""
    return {chunk_id_of(each.text): each for each in documents}
