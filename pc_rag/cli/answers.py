"""Answers as commands show them: what a request cost, and two arms side by side."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pc_rag.cli.output import ratio_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pc_rag.corpus import Answer, RetrievedChunk
    from pc_rag.metrics import RequestMetrics


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question asked twice: the same prompt from stored KV, and computed in full.

    Attributes:
        question: The question.
        cached: The answer from stored KV.
        uncached: The answer of the uncached arm.
    """

    question: str
    cached: Answer
    uncached: Answer

    @property
    def ttft_ratio(self) -> float | None:
        """How many times longer the uncached arm takes to its first token."""
        cached = self.cached.completion.metrics.ttft_seconds
        uncached = self.uncached.completion.metrics.ttft_seconds
        return uncached / cached if cached and uncached else None


def describe_hits(metrics: RequestMetrics) -> str:
    """Hit kinds and how often: ``1 exact, 3 composed``."""
    return _counted(module.hit_kind for module in metrics.modules)


def describe_usage(metrics: RequestMetrics) -> str:
    """One line: tokens by where they came from, hits, tiers, miss reasons, TTFT, time saved."""
    tokens = f"{metrics.prompt_tokens:,} tokens: {metrics.num_cached_tokens:,} cached"
    if metrics.num_reused_tokens:
        tokens += f" ({metrics.num_reused_tokens:,} by the prefix cache)"
    if metrics.num_repaired_tokens:
        tokens += f", {metrics.num_repaired_tokens:,} repaired"
    saved = metrics.saved_seconds
    saving = "" if saved is None else f"; saved about {seconds_text(saved)}"
    return (
        f"{tokens}, {metrics.num_fresh_tokens:,} fresh; hits: {describe_hits(metrics)}; "
        f"tiers: {_counted(module.tier for module in metrics.modules)}; "
        f"misses: {_counted(module.miss_reason for module in metrics.modules)}; "
        f"TTFT {seconds_text(metrics.ttft_seconds)}{saving}"
    )


def _counted(kinds: Iterable[object]) -> str:
    counts = Counter(str(kind) for kind in kinds if kind is not None)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def ttft_table(comparison: Comparison) -> Table:
    """Both arms' TTFT and their ratio."""
    table = Table(box=None, pad_edge=False)
    for column in ("TTFT cached", "TTFT uncached", "ratio"):
        table.add_column(column, justify="right")
    table.add_row(
        seconds_text(comparison.cached.completion.metrics.ttft_seconds),
        seconds_text(comparison.uncached.completion.metrics.ttft_seconds),
        ratio_text(comparison.ttft_ratio),
    )
    return table


def answer_dict(answer: Answer) -> dict[str, Any]:
    """An answer as JSON can say it."""
    return {
        "answer": answer.text,
        "finish_reason": answer.completion.finish_reason.value,
        "metrics": answer.completion.metrics.to_dict(),
    }


def chunk_dicts(chunks: Iterable[RetrievedChunk]) -> list[dict[str, Any]]:
    """Retrieved chunks as JSON can say them."""
    return [{**asdict(chunk), "metadata": dict(chunk.metadata)} for chunk in chunks]


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """Both arms as JSON can say them."""
    return {
        "question": comparison.question,
        "chunks": chunk_dicts(comparison.cached.chunks),
        "cached": answer_dict(comparison.cached),
        "uncached": answer_dict(comparison.uncached),
        "ttft_ratio": comparison.ttft_ratio,
    }
