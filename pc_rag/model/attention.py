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
        self._turns = rope.rotation([-shift for shift in shifts]) if shifts else None
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
            ``[batch_size, num_heads, num_tokens, head_dim]`` in the dtype of ``queries``.
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
        pieces = _Pieces(queries, keys.shape[1], scaling)
        self._attend_segments(layer, pieces)
        if num_tokens == 1:
            pieces.attend(*self._tail_rows(layer, start + 1))
        else:
            if start:
                pieces.attend(*self._tail_rows(layer, start))
            pieces.attend_causal(keys, values)
        return pieces.merged()

    def _attend_segments(self, layer: int, pieces: _Pieces) -> None:
        rotated: torch.Tensor | None = None
        if self._turns is not None:
            cos, sin = (turn[:, None, None, None, None] for turn in self._turns)
            rotated = self._rope.rotate(pieces.grouped[None], cos, sin)
        for look in self._looks:
            turned = None if rotated is None or look.rotation is None else rotated[look.rotation]
            pieces.attend(
                look.segment.layer_keys[layer],
                look.segment.layer_values[layer],
                first_query=look.first_query,
                turned=turned,
            )

    def _tail_rows(self, layer: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tail.keys[layer, :, :, :num_rows], self._tail.values[layer, :, :, :num_rows]


class _Pieces:
    """Attends KV piece by piece and merges the pieces exactly."""

    def __init__(self, queries: torch.Tensor, num_kv_heads: int, scaling: float) -> None:
        self._queries = queries
        self._scaling = scaling
        self.grouped = queries.view(queries.shape[0], num_kv_heads, -1, *queries.shape[2:])
        self._outs: list[tuple[int, torch.Tensor]] = []
        self._lses: list[torch.Tensor] = []

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        first_query: int = 0,
        turned: torch.Tensor | None = None,
    ) -> None:
        """Attend one piece, of which every query from ``first_query`` on sees everything.

        Args:
            keys: ``[1 or batch_size, num_kv_heads, num_keys, head_dim]``.
            values: As ``keys``.
            first_query: Queries before it do not see the piece.
            turned: The grouped queries, rotated to where the piece was encoded.
        """
        seeing = self.grouped if turned is None else turned
        if first_query:
            seeing = seeing[..., first_query:, :]
        batch_size, num_kv_heads, group_size, num_queries, head_dim = seeing.shape
        if keys.shape[0] != batch_size:
            keys = keys.expand(batch_size, -1, -1, -1)
            values = values.expand(batch_size, -1, -1, -1)
        out, lse = attend_piece(
            seeing.reshape(batch_size, num_kv_heads, group_size * num_queries, head_dim),
            keys,
            values,
            scaling=self._scaling,
        )
        shape = (batch_size, num_kv_heads, group_size, num_queries)
        out, lse = out.view(*shape, -1), lse.view(shape)
        if first_query:
            lse = functional.pad(lse, (first_query, 0), value=float("-inf"))
        self._outs.append((first_query, out))
        self._lses.append(lse)

    def attend_causal(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Attend the fresh tokens themselves: each sees those before it, and itself."""
        num_heads = self._queries.shape[1]
        out, lse = attend_piece(
            self._queries,
            _repeat_heads(keys, num_heads),
            _repeat_heads(values, num_heads),
            scaling=self._scaling,
            is_causal=True,
        )
        shape = self.grouped.shape[:-1]
        self._outs.append((0, out.reshape(*shape, -1)))
        self._lses.append(lse.reshape(shape))

    def merged(self) -> torch.Tensor:
        """The attention over all pieces, ``[batch_size, num_heads, num_tokens, value_dim]``."""
        weights = torch.stack(self._lses).softmax(dim=0).unsqueeze(-1)
        # The last piece is seen by every query, so it can start the sum.
        total = self._outs[-1][1] * weights[-1]
        for (first, out), weight in zip(self._outs[:-1], weights, strict=False):
            total[..., first:, :].addcmul_(out, weight[..., first:, :])
        return total.flatten(1, 2).to(self._queries.dtype)


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
        keys: ``[batch_size, num_heads, num_keys, head_dim]``; any strides.
        values: ``[batch_size, num_heads, num_keys, value_dim]``.
        scaling: Factor on the scores.
        is_causal: Whether query ``i`` sees keys up to ``i`` only.

    Returns:
        Output ``[batch_size, num_heads, num_queries, value_dim]`` and log-sum-exp
        ``[batch_size, num_heads, num_queries]`` in float32.
    """
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - the public function drops the log-sum-exp
            queries, keys, values, 0.0, is_causal, scale=scaling
        )
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
