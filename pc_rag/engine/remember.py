"""Handing what a request computed to the exact prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.kv.prefix_match import Run
from pc_rag.layout.plan import Cached, Fresh
from pc_rag.layout.reuse import plan_symbols
from pc_rag.types import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.kv.prefix_tree import PrefixTree
    from pc_rag.layout.plan import RequestPlan
    from pc_rag.model.attention.kv_view import KVView


def remember(
    tree: PrefixTree,
    plan: RequestPlan,
    view: KVView,
    generated: Sequence[int],
    *,
    namespace: str,
) -> None:
    """Keep the KV of everything a request computed, its answer included.

    Args:
        tree: The exact prefix cache; it copies what it keeps.
        plan: What was run.
        view: Its tail holds the computed rows: fresh tokens in order, then generated ones.
        generated: The generated tokens; the last of them may not have been computed.
        namespace: Where the engine's runs lie.
    """
    num_fresh = sum(len(part.token_ids) for part in plan.fresh)
    num_answered = view.num_computed - num_fresh
    if num_answered < 0:
        return  # cancelled before its prefill was done
    symbols, positions = plan_symbols(plan)
    runs: list[Run] = []
    symbol, row = 0, 0
    for part in plan.parts:
        num_symbols = 1 if isinstance(part, Cached) else len(part.token_ids)
        if isinstance(part, Fresh):
            runs.append(_run(view, row, Span(symbol, symbol + num_symbols), part.span.start))
            row += num_symbols
        symbol += num_symbols
    if num_answered:
        runs.append(_run(view, row, Span(symbol, symbol + num_answered), plan.end))
    tree.insert(
        [*symbols, *generated[:num_answered]],
        positions=[*positions, *range(plan.end, plan.end + num_answered)],
        runs=runs,
        namespace=namespace,
    )


def _run(view: KVView, computed_row: int, symbols: Span, start: int) -> Run:
    keys, values = view.computed_kv(computed_row, computed_row + len(symbols))
    return Run(keys=keys, values=values, start=start, symbols=symbols)
