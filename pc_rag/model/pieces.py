"""Attention over pieces of KV, one by one, and their exact merge by log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.positions import PositionEncoding

_FALLBACK_QUERY_ROWS = 512
"""Queries per block where scores are materialised, so that memory stays bounded."""

_LARGEST_ROTATION = 1 << 25
"""Most numbers of queries that are rotated for all pieces at once."""

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - the public function drops the log-sum-exp


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
        first_queries: For each piece, the first query that sees it; 0 for the last.

    Attributes:
        num_pieces: Pieces to merge.
    """

    def __init__(
        self, queries: torch.Tensor, values: torch.Tensor, first_queries: Sequence[int]
    ) -> None:
        batch_size, num_heads, num_tokens, head_dim = queries.shape
        num_kv_heads = values.shape[1]
        group_size = num_heads // num_kv_heads
        rows = num_tokens * group_size
        self.num_pieces = len(first_queries)
        self._dtype = queries.dtype
        self._split = (batch_size, num_kv_heads, group_size, num_tokens)
        self._cuts = [first * group_size for first in first_queries]
        lead = (batch_size, num_kv_heads, rows)
        self._queries = queries.new_empty((*lead, head_dim))
        self._seeing = [self._queries[:, :, cut:] for cut in self._cuts]
        self._rotations: torch.Tensor | None = None
        self._rotated = torch.empty(0)
        self._matrices: dict[int, torch.Tensor] = {}
        self._lse = queries.new_full((self.num_pieces, *lead), float("-inf"), dtype=torch.float32)
        self._lse_places = [self._lse[n, :, :, cut:] for n, cut in enumerate(self._cuts)]
        self._weights = torch.empty_like(self._lse)
        self._weight_places = [
            self._weights[n, :, :, cut:, None] for n, cut in enumerate(self._cuts)
        ]
        self._total = self._weights.new_empty((*lead, values.shape[-1]))
        self._total_places = [self._total[:, :, cut:] for cut in self._cuts]
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
                self._seeing[number] = place[:, :, self._cuts[number] :]

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

    def attend(self, number: int, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> None:
        """Attend one piece, of which every query that sees it sees everything.

        Args:
            number: Of the piece.
            keys: ``[1 or batch_size, num_kv_heads, num_keys, head_dim]``.
            values: As ``keys``.
            scaling: Factor on the scores.
        """
        seeing = self._seeing[number]
        if number in self._matrices:
            turned = torch.matmul(seeing.to(torch.float32), self._matrices[number])
            seeing = turned.to(self._dtype)
        out, lse = attend_piece(seeing, keys, values, scaling=scaling)
        self._outs[number] = out
        self._lse_places[number].copy_(lse)

    def attend_causal(
        self,
        number: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> None:
        """Attend the fresh tokens themselves: each sees those before it, and itself."""
        num_heads = queries.shape[1]
        out, lse = attend_piece(
            queries,
            repeat_heads(keys, num_heads),
            repeat_heads(values, num_heads),
            scaling=scaling,
            is_causal=True,
        )
        stacked = out.reshape(*self._split, -1).transpose(2, 3)
        self._outs[number] = stacked.reshape(*self._lse.shape[1:], -1)
        self._lse_places[number].copy_(
            lse.reshape(self._split).transpose(2, 3).reshape(self._lse.shape[1:])
        )

    def merged(self) -> torch.Tensor:
        """The attention over all pieces, ``[batch_size, num_heads, num_tokens, value_dim]``."""
        torch.softmax(self._lse, 0, out=self._weights)
        torch.mul(self._outs[-1], self._weight_places[-1], out=self._total)
        for number in range(self.num_pieces - 1):
            self._total_places[number].addcmul_(self._outs[number], self._weight_places[number])
        batch_size, num_kv_heads, group_size, num_tokens = self._split
        split = self._total.view(batch_size, num_kv_heads, num_tokens, group_size, -1)
        return split.transpose(2, 3).flatten(1, 2).to(self._dtype, copy=True)


def attend_piece(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one piece of KV, with the log-sum-exp that merging needs.

    Args:
        queries: ``[batch_size, num_heads, num_queries, head_dim]``.
        keys: ``[batch_size or 1, num_heads, num_keys, head_dim]``; any strides.
        values: ``[batch_size or 1, num_heads, num_keys, value_dim]``.
        scaling: Factor on the scores.
        is_causal: Whether query ``i`` sees keys up to ``i`` only.
        mask: Added to the scores, ``[batch_size, 1, 1, num_keys]`` in the dtype of ``queries``:
            minus infinity where a sequence does not see a key. Keys and values must be finite
            there, too. Not with ``is_causal``.

    Returns:
        Output ``[batch_size, num_heads, num_queries, value_dim]`` and log-sum-exp
        ``[batch_size, num_heads, num_queries]`` in float32: 0 and minus infinity for a sequence
        that sees no key at all.
    """
    if keys.shape[0] != queries.shape[0]:
        keys = keys.expand(queries.shape[0], -1, -1, -1)
        values = values.expand(queries.shape[0], -1, -1, -1)
    if queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        out, lse = _flash_on_cpu(
            queries, keys, values, 0.0, is_causal, attn_mask=mask, scale=scaling
        )
    else:
        out, lse = _attend_piece_by_blocks(
            queries, keys, values, scaling=scaling, is_causal=is_causal, mask=mask
        )
    if mask is None:
        return out, lse
    sees_nothing = (mask == float("-inf")).all(-1)  # where kernels disagree, or give NaN
    return out.masked_fill(sees_nothing[..., None], 0), lse.masked_fill(sees_nothing, float("-inf"))


def _attend_piece_by_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
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
        if mask is not None:
            scores = scores + mask
        lse = scores.logsumexp(dim=-1)
        outs.append((scores - lse[..., None]).exp().to(values.dtype) @ values)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def repeat_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[batch, num_kv_heads, ...]`` repeated to ``num_heads`` heads."""
    group_size = num_heads // states.shape[1]
    return states if group_size == 1 else states.repeat_interleave(group_size, dim=1)
