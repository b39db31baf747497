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

from pc_rag.model.positions import Alibi
from pc_rag.model.sights import Band, Fading, FadingCausal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pc_rag.model.kv_view import KVView, Segment
    from pc_rag.model.pieces import Pieces
    from pc_rag.model.positions import LayerAttention
    from pc_rag.model.sights import Sight


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
    window = _binding(kind.window, view, position_ids)
    encoding = kind.encoding
    slopes = encoding.slopes.to(tail.keys.device) if isinstance(encoding, Alibi) else None
    if window is None and slopes is None:
        uses = tuple(SegmentUse(*seen) for seen in _behind(view, position_ids))
        return KindPass(uses, num_rows, None, None)
    sights = _Sights(position_ids, window, slopes, group_size, tail.keys.device)
    all_tokens = slice(0, len(position_ids))
    rows_sight = sights.band(all_tokens, tail.position_ids[:num_rows])
    return KindPass(
        tuple(use for seen in _behind(view, position_ids) for use in sights.uses(*seen)),
        0 if rows_sight.is_blind else num_rows,
        rows_sight,
        None if is_alone else sights.own(),
    )


def _behind(view: KVView, position_ids: Sequence[int]) -> Iterator[tuple[Segment, slice]]:
    """The segments, and the fresh tokens that stand behind each."""
    num_tokens = len(position_ids)
    for segment in view.segments:
        first = bisect_left(position_ids, segment.span.start)
        if first < num_tokens and len(segment.span):  # the kernel divides by the number of keys
            yield segment, slice(first, num_tokens)


def _binding(window: int | None, view: KVView, position_ids: Sequence[int]) -> int | None:
    """The window, if it hides anything from the last token."""
    last = position_ids[-1]
    if window is None or last < window:  # position IDs are not negative
        return None
    lowest = min([position_ids[0], *(segment.span.start for segment in view.segments)])
    if last - lowest < window and view.tail.num_rows:
        lowest = min(lowest, int(view.tail.position_ids[: view.tail.num_rows].min()))
    return None if last - lowest < window else window


@dataclass(frozen=True, slots=True, eq=False)
class _Sights:
    """Makes the sights of one kind of layers in one pass.

    Attributes:
        position_ids: Of the fresh tokens, rising.
        window: Of the layers.
        slopes: ``[num_heads]``, of the layers' linear biases.
        group_size: Query heads of a KV head; the queries that see stored KV are stacked by it.
        device: Of the model.
    """

    position_ids: Sequence[int]
    window: int | None
    slopes: torch.Tensor | None
    group_size: int
    device: torch.device

    def band(self, tokens: slice, key_at: torch.Tensor) -> Band:
        """Of some tokens, stacked, over keys wherever those stand."""
        at = torch.tensor(self.position_ids[tokens])
        slopes = self.slopes
        if slopes is not None:  # the heads of a group take turns from row to row
            slopes = slopes.reshape(-1, self.group_size).repeat(1, len(at))
        stacked = at.repeat_interleave(self.group_size)
        return Band(stacked, key_at, window=self.window, slopes=slopes, device=self.device)

    def uses(self, segment: Segment, tokens: slice) -> Iterator[SegmentUse]:
        """A segment as the tokens behind it see it."""
        key_at = torch.arange(segment.span.start, segment.span.end)
        first, stop = tokens.start, tokens.stop
        if self.window is None:
            if self.slopes is None:
                yield SegmentUse(segment, tokens)
            elif self.group_size > 1:
                yield SegmentUse(segment, tokens, self.band(tokens, key_at))
            else:
                at = torch.tensor(self.position_ids[tokens])
                yield SegmentUse(segment, tokens, Fading(at, key_at, self.slopes))
            return
        whole = bisect_left(self.position_ids, segment.span.start + self.window, first)
        stop = bisect_left(self.position_ids, segment.span.end - 1 + self.window, first)
        if self.slopes is not None:
            whole = first  # under a band they all are
        if first < whole:
            yield SegmentUse(segment, slice(first, whole))
        if whole < stop:
            tokens = slice(whole, stop)
            yield SegmentUse(segment, tokens, self.band(tokens, key_at))

    def own(self) -> Sight | None:
        """Of the fresh tokens among themselves, their heads apart."""
        if self.slopes is None and self.window is None:
            return None
        if self.slopes is not None and self.window is None:
            return FadingCausal(self.position_ids, self.slopes)
        at = torch.tensor(self.position_ids)
        slopes = None if self.slopes is None else self.slopes[:, None]
        return Band(at, at, window=self.window, slopes=slopes, device=self.device)
