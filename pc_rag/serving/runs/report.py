"""What one run, a chain or a query with all its model calls, found in the cache."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - `get_type_hints` resolves the fields
from dataclasses import dataclass, field

from pc_rag.metrics import ModuleUse, Plain, to_plain
from pc_rag.metrics.text import (
    NOTHING_TO_HIT,
    misses_text,
    rate_text,
    savings_text,
    seconds_text,
)
from pc_rag.serving.runs.outcomes import CallOutcome, DocumentOutcome, DocumentUse
from pc_rag.types import MissReason  # noqa: TC001 - `get_type_hints` resolves the fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one outermost run, a chain or a query with all its model calls, found in the cache.

    Attributes:
        run_id: The framework's id of the run.
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
    def num_documents_partial(self) -> int:
        """Those of which a prompt holds only a part."""
        return sum(each.outcome is DocumentOutcome.PARTIAL for each in self.documents)

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
        derived = (
            "num_documents",
            "num_documents_hit",
            "num_documents_partial",
            "module_hit_rate",
            "token_hit_rate",
        )
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
