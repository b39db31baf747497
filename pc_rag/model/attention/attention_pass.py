"""Attention over stored KV that is read where it lies.

A full softmax over many pieces of KV equals the softmax over each piece, merged by the pieces'
log-sum-exp. So every segment is attended on its own, in place, and without a mask: fresh tokens are
sorted by position ID, hence the ones that see a segment are a trailing slice of them, and among
themselves they are causal. Masks are built for the edge of a window only (see ``sights``).

            segment 0   segment 1   tail
    q0 (sep)    x                    x
    q1 (rep)    x          x         x x         x = attended
    q2 (ask)    x          x         x x x

The query heads that share a KV head are stacked along the query axis, so keys and values are never
repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pc_rag.model.attention.kernels import (
    Scoring,
    attend_piece,
    check_heads,
    repeat_heads,
    weigh_sinks,
)
from pc_rag.model.attention.kind_pass import look
from pc_rag.model.attention.pieces import Pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.attention.kind_pass import KindPass
    from pc_rag.model.attention.kv_view import KVView
    from pc_rag.model.positions import LayerAttention, ModelPositions


class AttentionPass:
    """One forward pass of fresh tokens over a view; shared by its layers.

    Args:
        view: What is attended. Each layer writes its fresh keys and values into ``view.tail``; the
            tail takes their position IDs at once, but counts no rows.
        positions: Of the model.
        position_ids: Of the fresh tokens, rising.

    Attributes:
        num_layers_served: Layers that attended through this pass so far.
    """

    def __init__(
        self, view: KVView, positions: ModelPositions, position_ids: Sequence[int]
    ) -> None:
        self._view, self._tail = view, view.tail
        self._layers = positions.layers
        self._position_ids = position_ids
        self._kinds: dict[LayerAttention, KindPass] = {}
        start = self._tail.num_rows
        self._tail.position_ids[start : start + len(position_ids)] = torch.tensor(position_ids)
        self.num_layers_served = 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the layer's fresh KV and attend everything the fresh tokens may see.

        Args:
            layer: Index of the layer.
            queries: ``[batch_size, num_heads, num_tokens, head_dim]``, position-encoded.
            keys: ``[batch_size, num_kv_heads, num_tokens, head_dim]``, position-encoded.
            values: ``[batch_size, num_kv_heads, num_tokens, value_dim]``.
            scaling: Factor on the scores.
            softcap: Where given, scores become ``softcap * tanh(score / softcap)``.
            sinks: ``[num_heads]``: logits that every query weighs against its scores, with no value
                behind them.

        Returns:
            ``[batch_size, num_heads, num_tokens, value_dim]`` in the dtype of ``queries``.

        Raises:
            ModelError: The layer has other KV heads than the tail.
        """
        check_heads(layer, queries, keys, self._tail.keys.shape[2])
        self.num_layers_served += 1
        num_tokens = queries.shape[2]
        start = self._tail.num_rows
        fresh_rows = slice(start, start + num_tokens)
        self._tail.keys[layer, :, :, fresh_rows] = keys
        self._tail.values[layer, :, :, fresh_rows] = values
        scoring = Scoring(scaling, softcap, sinks)
        kind = self._kind(layer, queries.shape[1] // keys.shape[1])
        if not kind.uses and num_tokens == 1:
            return self._attend_rows(kind, layer, queries, scoring)
        if not kind.uses and not kind.num_rows:
            return _attend_own(kind, queries, keys, values, scoring)
        return self._attend_pieces(kind, layer, queries, keys, values, scoring=scoring)

    def _attend_pieces(
        self,
        kind: KindPass,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend stored KV, the tail's rows and the fresh tokens one by one, and merge."""
        scaling, softcap, sinks = scoring.scaling, scoring.softcap, scoring.sinks
        pieces = self._pieces(kind, layer, queries, values, has_sinks=sinks is not None)
        pieces.take_queries(queries)
        if sinks is not None:
            pieces.put_sinks(sinks)
        for number, use in enumerate(kind.uses):
            segment = use.segment
            pieces.attend(
                number, segment.layer_keys[layer], segment.layer_values[layer],
                scaling=scaling, sight=use.sight, softcap=softcap,
            )  # fmt: skip
        if kind.num_rows:
            pieces.attend(
                len(kind.uses),
                self._tail.keys[layer, :, :, : kind.num_rows],
                self._tail.values[layer, :, :, : kind.num_rows],
                scaling=scaling, sight=kind.rows_sight, softcap=softcap,
            )  # fmt: skip
        if queries.shape[2] > 1:
            found = _look_at_own(kind, queries, keys, values, scoring)
            pieces.put(pieces.num_pieces - 1, *found)
        return pieces.merged()

    def _kind(self, layer: int, group_size: int) -> KindPass:
        """What the layer attends; like layers share it."""
        of_layer = self._layers[layer]
        kind = self._kinds.get(of_layer)
        if kind is None:
            kind = look(of_layer, self._view, self._position_ids, group_size)
            self._kinds[of_layer] = kind
        return kind

    def _pieces(
        self,
        kind: KindPass,
        layer: int,
        queries: torch.Tensor,
        values: torch.Tensor,
        *,
        has_sinks: bool,
    ) -> Pieces:
        """The pieces of a kind: segments, rows of the tail, the fresh tokens themselves."""
        if kind.pieces is None:  # like layers have the same shapes, so they share the buffers
            everyone = slice(0, queries.shape[2])
            num_own = (kind.num_rows > 0) + (queries.shape[2] > 1)
            seeing = [use.tokens for use in kind.uses] + [everyone] * num_own
            kind.pieces = Pieces(queries, values, seeing, has_sinks=has_sinks)
            shifts = [use.segment.shift for use in kind.uses]
            kind.pieces.prepare_rotations(self._layers[layer].encoding, shifts)
        return kind.pieces

    def _attend_rows(
        self,
        kind: KindPass,
        layer: int,
        queries: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend the buffer alone by one token per sequence; what decode does once settled."""
        batch_size, num_heads, _, head_dim = queries.shape
        keys = self._tail.keys[layer, :, :, : kind.num_rows]
        values = self._tail.values[layer, :, :, : kind.num_rows]
        grouped = queries.reshape(batch_size, keys.shape[1], -1, head_dim)
        attend = attend_piece if kind.rows_sight is None else kind.rows_sight.attend
        out, lse = attend(grouped, keys, values, scaling=scoring.scaling, softcap=scoring.softcap)
        if scoring.sinks is not None:
            out = weigh_sinks(out, lse, scoring.sinks.reshape(keys.shape[1], -1))
        return out.reshape(batch_size, num_heads, 1, -1)


def _attend_own(
    kind: KindPass,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend the fresh tokens alone."""
    is_plain = kind.own_sight is None and scoring.softcap is None and scoring.sinks is None
    if is_plain and keys.shape[-1] == values.shape[-1]:
        num_heads = queries.shape[1]
        return functional.scaled_dot_product_attention(
            queries,
            repeat_heads(keys, num_heads),
            repeat_heads(values, num_heads),
            is_causal=True,
            scale=scoring.scaling,
        )
    out, lse = _look_at_own(kind, queries, keys, values, scoring)
    return out if scoring.sinks is None else weigh_sinks(out, lse, scoring.sinks[:, None])


def _look_at_own(
    kind: KindPass,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the fresh tokens over themselves, heads apart."""
    num_heads = queries.shape[1]
    repeated = repeat_heads(keys, num_heads), repeat_heads(values, num_heads)
    if kind.own_sight is not None:
        return kind.own_sight.attend(
            queries, *repeated, scaling=scoring.scaling, softcap=scoring.softcap
        )
    return attend_piece(
        queries, *repeated, scaling=scoring.scaling, softcap=scoring.softcap, is_causal=True
    )
