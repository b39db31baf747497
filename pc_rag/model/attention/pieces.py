"""Attention over pieces of KV, one by one, and their exact merge by log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pc_rag.model.attention.kernels import attend_piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.attention.sights import Sight
    from pc_rag.model.positions import PositionEncoding

_LARGEST_ROTATION = 1 << 25
"""Most numbers of queries that are rotated for all pieces at once."""


class Pieces:
    """Attends pieces of KV one by one and merges the results exactly.

    Query heads that share a KV head are stacked token by token, so that the queries from some token
    on are one slice::

        row      0       1       2       3       4       5
        query  t0 h0   t0 h1   t0 h2   t1 h0   t1 h1   t1 h2

    Buffers, and the views into them that every layer needs, are made once. A query that does not
    see a piece keeps the log-sum-exp of nothing there, which is minus infinity.

    Args:
        queries: Of any layer, ``[batch_size, num_heads, num_tokens, head_dim]``.
        values: Of any layer, ``[batch_size, num_kv_heads, num_tokens, value_dim]``.
        seeing: For each piece, the tokens that may see it; all of them for the last.
        has_sinks: Whether every query also weighs a logit that no value belongs to.

    Attributes:
        num_pieces: Pieces to merge.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        values: torch.Tensor,
        seeing: Sequence[slice],
        *,
        has_sinks: bool = False,
    ) -> None:
        batch_size, num_heads, num_tokens, head_dim = queries.shape
        num_kv_heads = values.shape[1]
        group_size = num_heads // num_kv_heads
        self.num_pieces = len(seeing)
        self._dtype = queries.dtype
        self._split = (batch_size, num_kv_heads, group_size, num_tokens)
        self._rows = [slice(s.start * group_size, s.stop * group_size) for s in seeing]
        lead = (batch_size, num_kv_heads, num_tokens * group_size)
        self._queries = queries.new_empty((*lead, head_dim))
        self._seeing = [self._queries[:, :, rows] for rows in self._rows]
        self._rotations: torch.Tensor | None = None
        self._rotated = torch.empty(0)
        self._matrices: dict[int, torch.Tensor] = {}
        self._lse = queries.new_full(
            (self.num_pieces + has_sinks, *lead), float("-inf"), dtype=torch.float32
        )
        self._lse_places = [self._lse[n, :, :, rows] for n, rows in enumerate(self._rows)]
        self._weights = torch.empty_like(self._lse)
        self._weight_places = [
            self._weights[n, :, :, rows, None] for n, rows in enumerate(self._rows)
        ]
        self._total = self._weights.new_empty((*lead, values.shape[-1]))
        self._total_places = [self._total[:, :, rows] for rows in self._rows]
        self._outs: list[torch.Tensor] = [self._total] * self.num_pieces

    def prepare_rotations(self, encoding: PositionEncoding, shifts: Sequence[int]) -> None:
        """Let the queries of the first pieces be rotated to where those were encoded.

        All rotations are one matrix product, whose result holds them side by side; where that would
        be too large, each piece has its own.

        Args:
            encoding: Of the layers.
            shifts: For each of the first pieces, the position IDs that its keys moved by.
        """
        moved = sorted(set(shifts) - {0})
        if not moved:
            return
        *rows, head_dim = self._queries.shape
        matrices = encoding.matrices([-shift for shift in moved], head_dim)
        if matrices is None:
            return
        if len(moved) * self._queries.numel() > _LARGEST_ROTATION:
            by_shift = dict(zip(moved, matrices, strict=True))
            self._matrices = {n: by_shift[shift] for n, shift in enumerate(shifts) if shift}
            return
        self._rotations = matrices.transpose(0, 1).reshape(head_dim, -1)
        self._rotated = self._queries.new_empty((*rows, self._rotations.shape[-1]))
        for number, shift in enumerate(shifts):
            if shift:
                start = moved.index(shift) * head_dim
                place = self._rotated[..., start : start + head_dim]
                self._seeing[number] = place[:, :, self._rows[number]]

    def take_queries(self, queries: torch.Tensor) -> None:
        """Stack a layer's queries, and rotate them."""
        batch_size, num_kv_heads, group_size, num_tokens = self._split
        split = queries.reshape(*self._split, -1)
        self._queries.view(batch_size, num_kv_heads, num_tokens, group_size, -1).copy_(
            split.transpose(2, 3)
        )
        if self._rotations is None:
            return
        if self._dtype == torch.float32:
            torch.matmul(self._queries, self._rotations, out=self._rotated)
        else:
            self._rotated.copy_(self._queries.to(torch.float32) @ self._rotations)

    def attend(
        self,
        number: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        sight: Sight | None = None,
        softcap: float | None = None,
    ) -> None:
        """Attend one piece.

        Args:
            number: Of the piece.
            keys: ``[1 or batch_size, num_kv_heads, num_keys, head_dim]``.
            values: As ``keys``.
            scaling: Factor on the scores.
            sight: What its queries see of it; ``None`` where each sees everything.
            softcap: On the scores.
        """
        seeing = self._seeing[number]
        if number in self._matrices:
            turned = torch.matmul(seeing.to(torch.float32), self._matrices[number])
            seeing = turned.to(self._dtype)
        attend = attend_piece if sight is None else sight.attend
        out, lse = attend(seeing, keys, values, scaling=scaling, softcap=softcap)
        self._outs[number] = out
        self._lse_places[number].copy_(lse)

    def put(self, number: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take what all queries found in a piece that was attended apart.

        Args:
            number: Of the piece.
            out: ``[batch_size, num_heads, num_tokens, value_dim]``.
            lse: ``[batch_size, num_heads, num_tokens]``.
        """
        stacked = out.reshape(*self._split, -1).transpose(2, 3)
        self._outs[number] = stacked.reshape(*self._lse.shape[1:], -1)
        self._lse_places[number].copy_(
            lse.reshape(self._split).transpose(2, 3).reshape(self._lse.shape[1:])
        )

    def put_sinks(self, sinks: torch.Tensor) -> None:
        """Take a layer's logits that no value belongs to, ``[num_heads]``."""
        _, num_kv_heads, group_size, num_tokens = self._split
        self._lse[-1] = sinks.reshape(num_kv_heads, group_size).repeat(1, num_tokens)

    def merged(self) -> torch.Tensor:
        """The attention over all pieces, ``[batch_size, num_heads, num_tokens, value_dim]``."""
        torch.softmax(self._lse, 0, out=self._weights)
        last = self.num_pieces - 1
        torch.mul(self._outs[last], self._weight_places[last], out=self._total)
        for number in range(last):
            self._total_places[number].addcmul_(self._outs[number], self._weight_places[number])
        self._outs = [self._total] * self.num_pieces  # the layer's outputs are not held any longer
        batch_size, num_kv_heads, group_size, num_tokens = self._split
        split = self._total.view(batch_size, num_kv_heads, num_tokens, group_size, -1)
        return split.transpose(2, 3).flatten(1, 2).to(self._dtype, copy=True)
