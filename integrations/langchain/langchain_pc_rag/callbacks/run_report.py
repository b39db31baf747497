"""What one run of a chain found in the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping  # noqa: TC003 - `get_type_hints` resolves the fields
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pc_rag.corpus.prefix_table import MIN_CHARS
from pc_rag.metrics import ModuleUse, Plain, to_plain
from pc_rag.metrics.text import (
    NOTHING_TO_HIT,
    misses_text,
    rate_text,
    savings_text,
    seconds_text,
)
from pc_rag.types import MissReason

if TYPE_CHECKING:
    from pc_rag.metrics import RequestMetrics


class CallOutcome(StrEnum):
    """What a call of a language model told us; every call has exactly one."""

    REPORTED = "reported"
    """Its metrics were read."""
    REPLAYED = "replayed"
    """LangChain's response cache gave the answer: no model ran, so there was nothing to hit."""
    UNREPORTED = "unreported"
    """It brought no metrics of ours: another model."""
    UNREADABLE = "unreadable"
    """It brought metrics that are malformed."""
    CANCELLED = "cancelled"
    """Its consumer left before the metrics came."""
    FAILED = "failed"
    """It raised an error."""


class DocumentOutcome(StrEnum):
    """What became of a retrieved document."""

    HIT = "hit"
    """A prompt of the run read its stored KV."""
    MISS = "miss"
    """A prompt of the run held it, and it was not served; see its ``miss_reason``."""
    NOT_IN_PROMPT = "not in the prompt"
    """No prompt of the run holds its text: it was left out, or rewritten on the way."""
    TOO_SHORT = "too short to be recognised"
    """A prompt holds its text, which is only recognised where content blocks name it."""
    NOT_INDEXED = "not indexed"
    """A prompt holds its text, and the corpus does not know it as a chunk."""


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """A document that was retrieved.

    Attributes:
        text: Its text, stripped as a chunk's is.
        source: Its id or its metadata's source, for people; empty where it has none.
    """

    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentUse:
    """What became of one retrieved document.

    Attributes:
        chunk_id: Id of the chunk that its text is.
        source: Its id or its metadata's source, for people; empty where it has none.
        outcome: Hit, miss, or not there.
        miss_reason: Why it was missed; ``None`` where it was not, or not there.
    """

    chunk_id: str
    source: str
    outcome: DocumentOutcome
    miss_reason: MissReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one outermost run, a chain with all its model calls, found in the cache.

    Attributes:
        run_id: LangChain's id of the run.
        calls: Model calls by what they told.
        documents: The documents that were retrieved, each text once.
        modules: Every module of the run's prompts once, a hit before a miss.
        num_module_hits: Uses of modules that were hits, over all calls.
        module_misses: Uses that were misses, by reason.
        num_prompt_tokens: Prompt tokens of the calls that reported.
        num_cache_read_tokens: Those of them that were read and not computed: tokens saved.
        saved_seconds: Estimated time saved by the calls that know it.
        num_known_savings: Those calls.
        num_unknown_savings: Calls that reported, but do not know their saving.
        ttft_seconds: The model's own time to the first token, of the first call that had one.
    """

    run_id: str
    calls: Mapping[CallOutcome, int] = field(default_factory=dict, hash=False)
    documents: tuple[DocumentUse, ...] = ()
    modules: tuple[ModuleUse, ...] = ()
    num_module_hits: int = 0
    module_misses: Mapping[MissReason, int] = field(default_factory=dict, hash=False)
    num_prompt_tokens: int = 0
    num_cache_read_tokens: int = 0
    saved_seconds: float = 0.0
    num_known_savings: int = 0
    num_unknown_savings: int = 0
    ttft_seconds: float | None = None

    @property
    def num_documents(self) -> int:
        """Documents retrieved, each text once."""
        return len(self.documents)

    @property
    def num_documents_hit(self) -> int:
        """Those whose stored KV a prompt read."""
        return sum(each.outcome is DocumentOutcome.HIT for each in self.documents)

    @property
    def module_hit_rate(self) -> float | None:
        """Share of module uses that were hits; ``None`` when there was nothing to hit."""
        uses = self.num_module_hits + sum(self.module_misses.values())
        return self.num_module_hits / uses if uses else None

    @property
    def token_hit_rate(self) -> float | None:
        """Share of prompt tokens that were read and not computed; ``None`` of no tokens."""
        if not self.num_prompt_tokens:
            return None
        return self.num_cache_read_tokens / self.num_prompt_tokens

    def to_dict(self) -> dict[str, Plain]:
        """Every field and every derived number, as JSON can say them."""
        plain = to_plain(self)
        derived = ("num_documents", "num_documents_hit", "module_hit_rate", "token_hit_rate")
        fields = plain if isinstance(plain, dict) else {}
        return fields | {name: to_plain(getattr(self, name)) for name in derived}

    def describe(self) -> str:
        """The report as text for people; every miss with its reason."""
        calls = ", ".join(f"{count} {outcome}" for outcome, count in self.calls.items() if count)
        saving = savings_text(
            self.saved_seconds,
            num_unknown=self.num_unknown_savings,
            num_known=self.num_known_savings,
        )
        lines = [
            f"run {self.run_id}: {calls or 'no model was called'}",
            f"documents: {self.num_documents} retrieved, {self.num_documents_hit} hit",
        ]
        lines += [f"  {_describe(each)}" for each in self.documents if _is_explained(each)]
        if self.module_hit_rate is None:
            lines.append(f"modules: {self._why_nothing()}")
        else:
            lines.append(
                f"modules: {self.num_module_hits} hit, {sum(self.module_misses.values())} missed "
                f"({rate_text(self.module_hit_rate)} hit)"
            )
            lines += misses_text(self.module_misses, title="misses")
        lines.append(
            f"tokens read: {self.num_cache_read_tokens:,} of {self.num_prompt_tokens:,}; "
            f"saved: {saving}; TTFT: {seconds_text(self.ttft_seconds)}"
        )
        return "\n".join(lines)

    def _why_nothing(self) -> str:
        """Why there was nothing to hit."""
        if self.calls.get(CallOutcome.REPORTED):
            return NOTHING_TO_HIT
        if self.calls.get(CallOutcome.REPLAYED):
            return "the response cache answered, so no model ran"
        if self.calls.get(CallOutcome.UNREADABLE):
            return "the model's metrics could not be read; see the handler's report"
        if self.calls.get(CallOutcome.UNREPORTED):
            return "the model brought no metrics of pc-rag: it is another model"
        return "no model call came to its end"


def _is_explained(document: DocumentUse) -> bool:
    return document.outcome is not DocumentOutcome.HIT


def _describe(document: DocumentUse) -> str:
    reason = f" ({document.miss_reason})" if document.miss_reason else ""
    return f"{document.source or document.chunk_id[:12]}: {document.outcome}{reason}"


class RunRecord:
    """The running numbers of one run. Not thread-safe: its handler locks."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.calls: Counter[CallOutcome] = Counter()
        self.retrieved: dict[str, FoundDocument] = {}
        self.returned: dict[str, FoundDocument] = {}
        self.shown: set[str] = set()
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
        if metrics is None:
            return
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

    def _add_module(self, use: ModuleUse) -> None:
        """Count a use; of a module used by several calls the best use is kept."""
        known = self.modules.get(use.label)
        if known is None or use.is_hit or not known.is_hit:
            self.modules[use.label] = use
        if use.is_hit:
            self.num_module_hits += 1
        elif use.miss_reason is not None:
            self.module_misses[use.miss_reason] += 1

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
            if document.text and document.text in prompt:
                self.shown.add(chunk_id)

    def _document(self, chunk_id: str, document: FoundDocument) -> DocumentUse:
        use = self.modules.get(chunk_id)
        if use is not None:
            outcome = DocumentOutcome.HIT if use.is_hit else DocumentOutcome.MISS
        elif chunk_id not in self.shown:
            outcome = DocumentOutcome.NOT_IN_PROMPT
        elif len(document.text) < MIN_CHARS:
            outcome = DocumentOutcome.TOO_SHORT
        else:
            outcome = DocumentOutcome.NOT_INDEXED
        return DocumentUse(
            chunk_id=chunk_id,
            source=document.source,
            outcome=outcome,
            miss_reason=None if use is None or use.is_hit else use.miss_reason,
        )
