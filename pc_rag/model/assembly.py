"""From a plan and the entries it names to the view that the model attends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.errors import EntryNotFound
from pc_rag.layout.plan import Cached, Fresh, Reused
from pc_rag.model.attention.kv_view import KVView, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from pc_rag.kv.entry import Entry
    from pc_rag.layout.plan import RequestPlan
    from pc_rag.model.runner import Runner
    from pc_rag.types import ModuleKey


def assemble(
    plan: RequestPlan,
    entries: Mapping[ModuleKey, Entry],
    runner: Runner,
    *,
    reused: Iterable[Segment] = (),
    num_new_tokens: int = 0,
) -> KVView:
    """The view of a plan: its stored KV in place, and a buffer for what it computes.

    Args:
        plan: The request.
        entries: Entry of every cached part, on the model's device. They must stay leased for as
            long as the view is used.
        runner: Whose pool gives the buffer; give it back with ``runner.pool.give_back(view.tail)``.
        reused: KV of the plan's reused parts, in order.
        num_new_tokens: Tokens that may be generated; the buffer has room for them.

    Raises:
        EntryNotFound: ``entries`` lacks a cached part.
    """
    segments: list[Segment] = list(reused)
    num_fresh = 0
    for part in plan.parts:
        match part:
            case Cached():
                segments.append(segment_of(part, entries, runner.dtype))
            case Fresh():
                num_fresh += len(part.token_ids)
            case Reused():
                pass
    tail = runner.pool.take(num_fresh + num_new_tokens)
    return KVView(tuple(segments), tail)


def segment_of(part: Cached, entries: Mapping[ModuleKey, Entry], dtype: torch.dtype) -> Segment:
    """The rows of an entry that a part reads.

    Args:
        part: What is read.
        entries: Entries by key, on the model's device.
        dtype: Compute dtype; rows of another one are converted.

    Raises:
        EntryNotFound: The part's entry is not among ``entries``.
    """
    entry = entries.get(part.key)
    if entry is None:
        raise EntryNotFound(
            f"{part.label!r}: the plan reads entry {part.key[:12]}, which was not leased"
        )
    rows = slice(part.rows.start, part.rows.end)
    return Segment(
        entry.keys[:, :, rows].to(dtype), entry.values[:, :, rows].to(dtype), part.span, part.shift
    )


def fresh_tokens(plan: RequestPlan) -> tuple[list[int], list[int]]:
    """Ids and position IDs of the plan's fresh tokens, by rising position ID."""
    token_ids: list[int] = []
    position_ids: list[int] = []
    for part in plan.fresh:
        token_ids.extend(part.token_ids)
        position_ids.extend(range(part.span.start, part.span.end))
    return token_ids, position_ids
