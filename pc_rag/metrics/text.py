"""Statistics as text for people: sums, a row for each template, every miss with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pc_rag.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pc_rag.metrics.stats import GroupStats, Outcome, StatsSnapshot

REASONS: Final[Mapping[MissReason, str]] = {
    MissReason.NOT_STORED: "no entry was stored; it is encoded on the first miss, or by ingestion",
    MissReason.FINGERPRINT: "stored for another model, tokenizer, dtype or tenant",
    MissReason.OTHER_PREFIX: "stored behind another prefix",
    MissReason.CORRUPT: "the stored file was damaged and is quarantined",
    MissReason.IO: "the store's medium failed or timed out",
    MissReason.REPAIRED: "the repair policy recomputed every token of it",
    MissReason.REUSE_OFF: "the request asked for the uncached arm",
    MissReason.SPLIT: "the prompt holds only a part of it, as when a caller splits chunks",
    MissReason.UNPLACED: "positions are learned, and the prefix that it is encoded behind does not "
    "end before it here (adopt the prompt's own), or it does not end within them",
}
"""What each reason means; a reason that is not here speaks for itself."""

NOTHING_TO_HIT: Final = (
    "no module stood in any prompt: nothing of it was encoded at ingestion, or its texts were "
    "changed before they came into the prompt"
)
"""Said instead of a hit rate where there was nothing to hit."""

_MILLISECONDS_BELOW: Final = 1.0


def seconds_text(seconds: float | None) -> str:
    """A duration with its unit: ``12.3 ms``, ``1.23 s``, or ``-`` where there is none."""
    if seconds is None:
        return "-"
    if abs(seconds) < _MILLISECONDS_BELOW:
        return f"{seconds * 1000:,.1f} ms"
    return f"{seconds:,.2f} s"


def rate_text(rate: float | None) -> str:
    """A share as a percentage, or ``-`` where there is none."""
    return "-" if rate is None else f"{rate:.1%}"


def savings_text(saved_seconds: float, *, num_unknown: int, num_known: int) -> str:
    """Estimated seconds saved, and of how many requests that is not known."""
    if not num_known:
        return "unknown: no plain prefill was timed yet" if num_unknown else "-"
    unknown = f" (unknown for {num_unknown} more requests)" if num_unknown else ""
    return f"about {seconds_text(saved_seconds)}{unknown}"


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text: the first flush left, the others flush right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def misses_text(counts: Mapping[MissReason, int], *, title: str) -> list[str]:
    """A line for every reason that occurred, with what it means; ``none`` where none did."""
    found = [(reason, count) for reason, count in counts.items() if count]
    if not found:
        return [f"{title}: none"]
    lines = [
        f"  {count:>5}  {reason}" + (f": {REASONS[reason]}" if reason in REASONS else "")
        for reason, count in found
    ]
    return [f"{title}:", *lines]


def stats_text(snapshot: StatsSnapshot) -> str:
    """A snapshot as a readable table that never shows a bare zero for a hit rate."""
    total = snapshot.total
    lines = [_counted(total.requests)]
    if snapshot.groups:
        rows = [_row(each, _label(each)) for each in snapshot.groups]
        lines += ["", table_text(_HEADER, [*rows, _row(total, "all")])]
    lines.append("")
    if not total.num_requests:
        lines.append("modules: no request was counted")
    elif total.module_hit_rate is None:
        lines.append(f"modules: {NOTHING_TO_HIT}")
    else:
        lines += misses_text(total.module_misses, title="misses")
        if any(total.qualified_hits.values()):
            lines += misses_text(total.qualified_hits, title="hits that could have been better")
    return "\n".join(lines)


_HEADER = ("template", "requests", "modules hit", "tokens read", "of tokens", "saved", "TTFT p50")


def _label(group: GroupStats) -> str:
    label = group.template or "(no template)"
    return f"{label} ({group.tenant})" if group.tenant else label


def _row(group: GroupStats, label: str) -> tuple[str, ...]:
    hits = sum(group.module_hits.values())
    uses = hits + sum(group.module_misses.values())
    return (
        label,
        f"{group.num_requests:,}",
        f"{hits:,} of {uses:,} ({rate_text(group.module_hit_rate)})" if uses else "nothing to hit",
        f"{group.num_cache_read_tokens:,}",
        f"{group.num_prompt_tokens:,} ({rate_text(group.token_hit_rate)})",
        savings_text(
            group.saved_seconds,
            num_unknown=group.num_unknown_savings,
            num_known=group.num_known_savings,
        ),
        seconds_text(group.ttft.p50_seconds),
    )


def _counted(requests: Mapping[Outcome, int]) -> str:
    parts = [f"{count:,} {outcome}" for outcome, count in requests.items()]
    return "requests: " + (", ".join(parts) or "none")
