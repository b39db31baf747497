"""What the layers of one kind attend in a forward pass, decided once for all of them.

A window leaves out the segments that no fresh token sees any more. One that it cuts is attended
twice: whole, by the tokens that see all of it, and under a band by those that see its end::

    window 5       segment at 0..3      segment at 4..7
    q at 8             -                  band (4, of 4..8)     - = skipped
    q at 9             -                  band (5..9)
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pc_rag.model.attention.layer_sights import LayerSights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pc_rag.model.attention.kv_view import KVView, Segment
    from pc_rag.model.attention.pieces import Pieces
    from pc_rag.model.attention.sights import Sight
    from pc_rag.model.positions import LayerAttention


@dataclass(frozen=True, slots=True, eq=False)
class SegmentUse:
    """A segment and some fresh tokens that see it.

    Attributes:
        segment: What is seen.
        tokens: The fresh tokens.
        sight: What they see of it; ``None`` where all see everything.
    """

    segment: Segment
    tokens: slice
    sight: Sight | None = None


@dataclass(slots=True, eq=False)
class KindPass:
    """What the layers of one kind attend.

    Attributes:
        uses: Stored KV.
        num_rows: Rows of the tail that are read, the fresh token's included where it is alone; 0
            where none is seen.
        rows_sight: What is seen of them; ``None`` where it is everything.
        own_sight: What the fresh tokens see of themselves; ``None`` for plain causal order.
        pieces: Buffers of these layers, once one was attended.
    """

    uses: tuple[SegmentUse, ...]
    num_rows: int
    rows_sight: Sight | None
    own_sight: Sight | None
    pieces: Pieces | None = None


def look(
    kind: LayerAttention, view: KVView, position_ids: Sequence[int], group_size: int
) -> KindPass:
    """What fresh tokens see in the layers of a kind.

    Args:
        kind: Of the layers.
        view: What there is. The tail has the position IDs of the fresh tokens behind its rows.
        position_ids: Of the fresh tokens, rising.
        group_size: Query heads of a KV head.
    """
    tail, is_alone = view.tail, len(position_ids) == 1
    num_rows = tail.num_rows + is_alone
    reach = 1 if kind.window is None else _reach(view, position_ids, kind.window)
    sights = LayerSights.of(kind, reach=reach, group_size=group_size, device=tail.keys.device)
    seen = _behind(view, position_ids)
    if sights.are_plain:
        return KindPass(tuple(SegmentUse(*each) for each in seen), num_rows, None, None)
    uses = tuple(use for each in seen for use in _uses(*each, position_ids, sights))
    rows_sight = sights.band(torch.tensor(position_ids), tail.position_ids[:num_rows])
    return KindPass(
        uses,
        0 if rows_sight.is_blind else num_rows,
        rows_sight,
        None if is_alone else sights.own(position_ids),
    )


def _behind(view: KVView, position_ids: Sequence[int]) -> Iterator[tuple[Segment, slice]]:
    """The segments, and the fresh tokens that stand behind each."""
    num_tokens = len(position_ids)
    for segment in view.segments:
        first = bisect_left(position_ids, segment.span.start)
        if first < num_tokens and len(segment.span):  # the kernel divides by the number of keys
            yield segment, slice(first, num_tokens)


def _uses(
    segment: Segment, tokens: slice, position_ids: Sequence[int], sights: LayerSights
) -> Iterator[SegmentUse]:
    """A segment as the tokens behind it see it."""
    span, window = segment.span, sights.window
    key_at = torch.arange(span.start, span.end)
    whole = tokens
    if window is not None:
        first, cut = (
            bisect_left(position_ids, start + window, tokens.start)
            for start in (span.start, span.end - 1)
        )
        # Under linear biases all are masked alike.
        whole = slice(tokens.start, first if sights.slopes is None else tokens.start)
        partly = slice(whole.stop, cut)
        if partly.start < partly.stop:
            at = torch.tensor(position_ids[partly])
            yield SegmentUse(segment, partly, sights.band(at, key_at))
    if whole.start < whole.stop:
        at = torch.tensor(position_ids[whole])
        sight = None if window is not None else sights.behind(at, key_at)
        yield SegmentUse(segment, whole, sight)


def _reach(view: KVView, position_ids: Sequence[int], window: int) -> int:
    """Position IDs from the lowest of all to the last, both included, where ``window`` asks."""
    last = position_ids[-1]
    if last < window:  # position IDs are not negative
        return last + 1
    lowest = min([position_ids[0], *(segment.span.start for segment in view.segments)])
    if view.tail.num_rows:
        lowest = min(lowest, int(view.tail.position_ids[: view.tail.num_rows].min()))
    return last - lowest + 1
