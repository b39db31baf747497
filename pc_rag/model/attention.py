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
from typing import TYPE_CHECKING

from torch.nn import functional

from pc_rag.model.pieces import Pieces, attend_piece, repeat_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pc_rag.model.kv_view import KVView
    from pc_rag.model.positions import ModelPositions


class AttentionPass:
    """One forward pass of fresh tokens over a view; shared by its layers.

    Args:
        view: What is attended. Each layer writes its fresh keys and values into ``view.tail``.
        positions: Of the model.
        position_ids: Of the fresh tokens, rising.

    Attributes:
        num_layers_served: Layers that attended through this pass so far.
    """

    def __init__(
        self, view: KVView, positions: ModelPositions, position_ids: Sequence[int]
    ) -> None:
        self._tail = view.tail
        self._positions = positions
        first_seeing = (
            (segment, bisect_left(position_ids, segment.span.start)) for segment in view.segments
        )
        self._seen = [
            (segment, first)
            for segment, first in first_seeing
            # The kernel divides by the number of keys.
            if first < len(position_ids) and len(segment.span)
        ]
        self._pieces: Pieces | None = None
        self.num_layers_served = 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,  # noqa: ARG002
        sinks: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Store the layer's fresh KV and attend everything the fresh tokens may see.

        Args:
            layer: Index of the layer.
            queries: ``[batch_size, num_heads, num_tokens, head_dim]``, position-encoded.
            keys: ``[batch_size, num_kv_heads, num_tokens, head_dim]``, position-encoded.
            values: As ``keys``.
            scaling: Factor on the scores.
            softcap: Not applied yet.
            sinks: Alike.

        Returns:
            ``[batch_size, num_heads, num_tokens, value_dim]`` in the dtype of ``queries``.
        """
        self.num_layers_served += 1
        num_heads, num_tokens = queries.shape[1], queries.shape[2]
        start = self._tail.num_rows
        fresh_rows = slice(start, start + num_tokens)
        self._tail.keys[layer, :, :, fresh_rows] = keys
        self._tail.values[layer, :, :, fresh_rows] = values
        is_causal = num_tokens > 1
        if not self._seen and not is_causal:
            return self._attend_rows(layer, queries, start + 1, scaling)
        if not self._seen and not start:
            return functional.scaled_dot_product_attention(
                queries,
                repeat_heads(keys, num_heads),
                repeat_heads(values, num_heads),
                is_causal=True,
                scale=scaling,
            )
        if self._pieces is None:  # every layer has the same shapes, so all share the buffers
            firsts = [first for _, first in self._seen] + [0] * is_causal
            has_rows = bool(start) or not is_causal
            self._pieces = Pieces(queries, values, [*firsts, *([0] * has_rows)])
            encoding = self._positions.layers[layer].encoding
            self._pieces.prepare_rotations(encoding, [segment.shift for segment, _ in self._seen])
        pieces = self._pieces
        pieces.take_queries(queries)
        for number, (segment, _) in enumerate(self._seen):
            pieces.attend(number, segment.layer_keys[layer], segment.layer_values[layer], scaling)
        if is_causal:
            pieces.attend_causal(len(self._seen), queries, keys, values, scaling)
        num_rows = start if is_causal else start + 1
        if num_rows:
            tail_keys = self._tail.keys[layer, :, :, :num_rows]
            tail_values = self._tail.values[layer, :, :, :num_rows]
            pieces.attend(pieces.num_pieces - 1, tail_keys, tail_values, scaling)
        return pieces.merged()

    def _attend_rows(
        self, layer: int, queries: torch.Tensor, num_rows: int, scaling: float
    ) -> torch.Tensor:
        """Attend the buffer alone by one token per sequence; what decode does once settled."""
        batch_size, num_heads, _, head_dim = queries.shape
        keys = self._tail.keys[layer, :, :, :num_rows]
        values = self._tail.values[layer, :, :, :num_rows]
        grouped = queries.reshape(batch_size, keys.shape[1], -1, head_dim)
        out, _ = attend_piece(grouped, keys, values, scaling=scaling)
        return out.reshape(batch_size, num_heads, 1, -1)
