"""Attention over stored KV that is read where it lies.

A full softmax over many pieces of KV equals the softmax over each piece, merged by the pieces'
log-sum-exp. So every segment is attended on its own, in place, and no mask is ever built: fresh
tokens are sorted by position ID, hence the ones that see a segment are a trailing slice of them,
and among themselves they are causal.

            segment 0   segment 1   tail
    q0 (sep)    x                    x
    q1 (rep)    x          x         x x         x = attended
    q2 (ask)    x          x         x x x

The query heads that share a KV head are stacked along the query axis, so keys and values are never
repeated.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.kv_view import KVView, Segment
    from pc_rag.model.positions import Rope

_FALLBACK_QUERY_ROWS = 512
"""Queries per block where scores are materialised, so that memory stays bounded."""

_ROTATED_ROWS = 1 << 14
"""Query rows that are rotated for all segments at once; more are rotated segment by segment."""

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - the public function drops the log-sum-exp


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """How the fresh tokens of a pass look at one segment.

    Attributes:
        segment: The segment.
        first_query: The first fresh token that stands behind it.
        rotation: Index of the rotation its queries need; ``None`` where it was not moved.
    """

    segment: Segment
    first_query: int
    rotation: int | None


class AttentionPass:
    """One forward pass of fresh tokens over a view; shared by its layers.

    Args:
        view: What is attended. Each layer writes its fresh keys and values into ``view.tail``.
        rope: The model's rotation.
        position_ids: Of the fresh tokens, rising.
    """

    def __init__(self, view: KVView, rope: Rope, position_ids: Sequence[int]) -> None:
        self._tail = view.tail
        self._rope = rope
        shifts = sorted({segment.shift for segment in view.segments} - {0})
        turns = rope.rotation([-shift for shift in shifts]) if shifts else None
        self._turns = turns and tuple(turn[:, None, None, None] for turn in turns)
        rotations = {shift: index for index, shift in enumerate(shifts)}
        looks = [
            _Look(
                segment,
                bisect_left(position_ids, segment.span.start),
                rotations.get(segment.shift),
            )
            for segment in view.segments
            if len(segment.span)  # the kernel divides by the number of keys
        ]
        self._looks = [look for look in looks if look.first_query < len(position_ids)]
        self._merger: _Merger | None = None

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
    ) -> torch.Tensor:
        """Store the layer's fresh KV and attend everything the fresh tokens may see.

        Args:
            layer: Index of the layer.
            queries: ``[batch_size, num_heads, num_tokens, head_dim]``, position-encoded.
            keys: ``[batch_size, num_kv_heads, num_tokens, head_dim]``, position-encoded.
            values: As ``keys``.
            scaling: Factor on the scores.

        Returns:
            ``[batch_size, num_heads, num_tokens, value_dim]`` in the dtype of ``queries``.
        """
        num_heads, num_tokens = queries.shape[1], queries.shape[2]
        start = self._tail.num_rows
        fresh_rows = slice(start, start + num_tokens)
        self._tail.keys[layer, :, :, fresh_rows] = keys
        self._tail.values[layer, :, :, fresh_rows] = values
        if not self._looks and not start:
            return functional.scaled_dot_product_attention(
                queries,
                _repeat_heads(keys, num_heads),
                _repeat_heads(values, num_heads),
                is_causal=num_tokens > 1,
                scale=scaling,
            )
        merger = self._merger_for(queries, values)
        grouped = merger.stack(queries)
        self._attend_segments(layer, grouped, merger, scaling)
        piece = len(self._looks)
        if num_tokens == 1:
            merger.put(
                piece, *attend_piece(grouped, *self._rows(layer, start + 1), scaling=scaling)
            )
            return merger.merged(queries.dtype)
        if start:
            merger.put(piece, *attend_piece(grouped, *self._rows(layer, start), scaling=scaling))
        out, lse = attend_piece(
            queries,
            _repeat_heads(keys, num_heads),
            _repeat_heads(values, num_heads),
            scaling=scaling,
            is_causal=True,
        )
        merger.put(merger.num_pieces - 1, merger.stack(out), merger.stack(lse[..., None])[..., 0])
        return merger.merged(queries.dtype)

    def _merger_for(self, queries: torch.Tensor, values: torch.Tensor) -> _Merger:
        """The pass's buffers for partial results; every layer fills the same places."""
        num_tokens = queries.shape[2]
        if self._merger is None:
            has_tail_piece = num_tokens == 1 or self._tail.num_rows > 0
            firsts = [look.first_query for look in self._looks] + [0] * has_tail_piece
            if num_tokens > 1:
                firsts.append(0)
            self._merger = _Merger(queries, values, firsts)
        return self._merger

    def _attend_segments(
        self, layer: int, grouped: torch.Tensor, merger: _Merger, scaling: float
    ) -> None:
        turns = self._turns
        rotated: tuple[torch.Tensor, ...] = ()
        if turns is not None and len(turns[0]) * grouped.shape[2] <= _ROTATED_ROWS:
            rotated = self._rope.rotate(grouped[None], *turns).unbind(0)
        for piece, look in enumerate(self._looks):
            rotation, cut = look.rotation, look.first_query * merger.group_size
            if rotation is None or turns is None:
                seeing = grouped[:, :, cut:]
            elif rotated:
                seeing = rotated[rotation][:, :, cut:]
            else:
                cos, sin = turns
                seeing = self._rope.rotate(grouped[:, :, cut:], cos[rotation], sin[rotation])
            out, lse = attend_piece(
                seeing,
                look.segment.layer_keys[layer],
                look.segment.layer_values[layer],
                scaling=scaling,
            )
            merger.put(piece, out, lse)

    def _rows(self, layer: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tail.keys[layer, :, :, :num_rows], self._tail.values[layer, :, :, :num_rows]


class _Merger:
    """Buffers for the attention over each piece, and their exact merge.

    Query heads that share a KV head are stacked token by token, so that the queries from some token
    on are one slice::

        row      0       1       2       3       4       5
        query  t0 h0   t0 h1   t0 h2   t1 h0   t1 h1   t1 h2

    A query that does not see a piece keeps the log-sum-exp of nothing there, which is minus
    infinity, for as long as the buffers live.

    Args:
        queries: Of any layer, ``[batch_size, num_heads, num_tokens, head_dim]``.
        values: Of any layer, ``[batch_size, num_kv_heads, num_tokens, value_dim]``.
        first_queries: For each piece, the first query that sees it.

    Attributes:
        group_size: Query heads of one KV head.
        num_pieces: Pieces to merge.
    """

    def __init__(
        self, queries: torch.Tensor, values: torch.Tensor, first_queries: Sequence[int]
    ) -> None:
        batch_size, num_heads, num_tokens, _ = queries.shape
        num_kv_heads = values.shape[1]
        self.group_size = num_heads // num_kv_heads
        self.num_pieces = len(first_queries)
        self._heads = (batch_size, num_kv_heads, self.group_size)
        rows = num_tokens * self.group_size
        shape = (self.num_pieces, batch_size, num_kv_heads, rows)
        self._out = queries.new_zeros((*shape, values.shape[-1]), dtype=torch.float32)
        self._lse = queries.new_full(shape, float("-inf"), dtype=torch.float32)
        cuts = [first * self.group_size for first in first_queries]
        self._out_places = [self._out[n, :, :, cut:] for n, cut in enumerate(cuts)]
        self._lse_places = [self._lse[n, :, :, cut:] for n, cut in enumerate(cuts)]

    def stack(self, states: torch.Tensor) -> torch.Tensor:
        """``[batch, num_heads, num_tokens, dim]`` as ``[batch, num_kv_heads, rows, dim]``."""
        split = states.reshape(*self._heads, *states.shape[2:])
        return split.transpose(2, 3).reshape(*self._heads[:2], -1, states.shape[-1])

    def put(self, piece: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take the attention over one piece by the queries that see it."""
        self._out_places[piece].copy_(out)
        self._lse_places[piece].copy_(lse)

    def merged(self, dtype: torch.dtype) -> torch.Tensor:
        """The attention over all pieces, ``[batch_size, num_heads, num_tokens, value_dim]``."""
        weights = self._lse.softmax(dim=0)
        total = self._out[0] * weights[0, ..., None]
        for piece in range(1, self.num_pieces):
            total.addcmul_(self._out[piece], weights[piece, ..., None])
        batch_size, num_kv_heads, group_size = self._heads
        split = total.view(batch_size, num_kv_heads, -1, group_size, total.shape[-1])
        return split.transpose(2, 3).flatten(1, 2).to(dtype)


def attend_piece(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one piece of KV, with the log-sum-exp that merging needs.

    Args:
        queries: ``[batch_size, num_heads, num_queries, head_dim]``.
        keys: ``[batch_size or 1, num_heads, num_keys, head_dim]``; any strides.
        values: ``[batch_size or 1, num_heads, num_keys, value_dim]``.
        scaling: Factor on the scores.
        is_causal: Whether query ``i`` sees keys up to ``i`` only.

    Returns:
        Output ``[batch_size, num_heads, num_queries, value_dim]`` and log-sum-exp
        ``[batch_size, num_heads, num_queries]`` in float32.
    """
    if keys.shape[0] != queries.shape[0]:
        keys = keys.expand(queries.shape[0], -1, -1, -1)
        values = values.expand(queries.shape[0], -1, -1, -1)
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        out, lse = _flash_on_cpu(queries, keys, values, 0.0, is_causal, scale=scaling)
        return out, lse
    return _attend_piece_by_blocks(queries, keys, values, scaling=scaling, is_causal=is_causal)


def _attend_piece_by_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend_piece`` for every device: scores are materialised, a block of queries at a time."""
    outs, lses = [], []
    for start in range(0, queries.shape[2], _FALLBACK_QUERY_ROWS):
        block = queries[:, :, start : start + _FALLBACK_QUERY_ROWS]
        scores = (block @ keys.transpose(-1, -2)).to(torch.float32) * scaling
        if is_causal:
            row = torch.arange(start, start + block.shape[2], device=queries.device)
            column = torch.arange(keys.shape[2], device=queries.device)
            scores = scores.masked_fill(column > row[:, None], float("-inf"))
        lse = scores.logsumexp(dim=-1)
        outs.append((scores - lse[..., None]).exp().to(values.dtype) @ values)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _repeat_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[batch, num_kv_heads, ...]`` repeated to ``num_heads`` heads."""
    group_size = num_heads // states.shape[1]
    return states if group_size == 1 else states.repeat_interleave(group_size, dim=1)
