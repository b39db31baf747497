"""How the exact prefix cache sees a plan: as symbols, one per token or per composed entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.layout.plan import Cached, Fresh, RequestPlan, Reused
from pc_rag.types import ModuleKey, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.layout.plan import Part


def plan_symbols(plan: RequestPlan) -> tuple[list[int | ModuleKey], list[int]]:
    """The plan as symbols with their position IDs.

    A token is its id. A cached part is the key of its entry with the rows read of it: what was
    computed behind it holds only behind the very same KV at the same place.

    Returns:
        Symbols, and the position ID of each; of a cached part, its first.
    """
    symbols: list[int | ModuleKey] = []
    positions: list[int] = []
    for part in plan.parts:
        if isinstance(part, Cached):
            symbols.append(ModuleKey(f"{part.key}[{part.rows.start}:{part.rows.end}]"))
            positions.append(part.span.start)
        else:
            symbols.extend(part.token_ids)
            positions.extend(range(part.span.start, part.span.end))
    return symbols, positions


def with_reused(plan: RequestPlan, num_symbols: int) -> RequestPlan:
    """The plan whose fresh tokens among the first ``num_symbols`` symbols are reused.

    Args:
        plan: A plan without reused parts.
        num_symbols: Leading symbols of ``plan_symbols(plan)`` whose KV is held.
    """

    def parts() -> Iterator[Part]:
        left = num_symbols
        for part in plan.parts:
            if isinstance(part, Cached):
                yield part
                left -= 1
            elif isinstance(part, Fresh) and left > 0:
                yield from _split(part, min(left, len(part.token_ids)))
                left -= len(part.token_ids)
            else:
                yield part

    return RequestPlan(tuple(parts()))


def _split(part: Fresh, num_reused: int) -> Iterator[Part]:
    cut = part.span.start + num_reused
    yield Reused(
        token_ids=part.token_ids[:num_reused],
        span=Span(part.span.start, cut),
        kind=part.kind,
        label=part.label,
        occurrence=part.occurrence,
    )
    if num_reused < len(part.token_ids):
        yield Fresh(
            token_ids=part.token_ids[num_reused:],
            span=Span(cut, part.span.end),
            kind=part.kind,
            label=part.label,
            occurrence=part.occurrence,
        )
