"""Stored KV that tokens of a batch's pass see, whichever sequences they belong to."""

from __future__ import annotations

from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from pc_rag.model.kernels import attend_piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.positions import ModelPositions


class Rotations:
    """Rotation matrices by shift, each made once for a batch.

    Args:
        positions: Of the model.
    """

    def __init__(self, positions: ModelPositions) -> None:
        self._positions = positions
        self._matrices: dict[int, torch.Tensor] = {}

    def matrix(self, shift: int, head_dim: int) -> torch.Tensor:
        """What queries are multiplied with from the right, to see keys that moved by ``shift``."""
        if shift not in self._matrices:
            encoding = self._positions.layers[0].encoding
            matrices = encoding.matrices([-shift], head_dim)
            self._matrices[shift] = torch.eye(head_dim) if matrices is None else matrices[0]
        return self._matrices[shift]


class PieceUse:
    """One piece of stored KV and the tokens of a pass that see all of it.

    Args:
        layer_keys: One ``[1, num_kv_heads, num_keys, head_dim]`` per layer.
        layer_values: Alike.
        seen: Tokens of the pass, disjoint, and how far the keys moved for them.
        rotations: Of the batch.
        device: Where the pass runs.

    Attributes:
        tokens: All that see it: a slice where they are neighbours, their indices otherwise.
    """

    def __init__(
        self,
        layer_keys: Sequence[torch.Tensor],
        layer_values: Sequence[torch.Tensor],
        seen: Sequence[tuple[slice, int]],
        rotations: Rotations,
        device: torch.device,
    ) -> None:
        self._keys, self._values = layer_keys, layer_values
        self._rotations = rotations
        by_shift = sorted(seen, key=itemgetter(1))  # so that one product turns all of a shift
        self._turned: list[tuple[slice, int]] = []
        count = 0
        for shift, uses in groupby(by_shift, key=itemgetter(1)):
            end = count + sum(tokens.stop - tokens.start for tokens, _ in uses)
            if shift:
                self._turned.append((slice(count, end), shift))
            count = end
        slices = [tokens for tokens, _ in by_shift]
        self.tokens: slice | torch.Tensor
        if all(before.stop == after.start for before, after in pairwise(slices)):
            self.tokens = slice(slices[0].start, slices[-1].stop)
        else:
            indices = [i for tokens in slices for i in range(tokens.start, tokens.stop)]
            self.tokens = torch.tensor(indices, device=device)

    def attend(
        self, layer: int, stacked: torch.Tensor, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the piece.

        Args:
            layer: Index of the layer.
            stacked: All queries of the pass, ``[num_tokens, num_kv_heads, group_size, head_dim]``.
            scaling: Factor on the scores.

        Returns:
            Output and log-sum-exp of ``tokens``, shaped as ``stacked`` is, but for ``head_dim``.
        """
        seeing = stacked[self.tokens]
        num_seeing, num_kv_heads, group_size, head_dim = seeing.shape
        rows = seeing.new_empty((num_kv_heads, num_seeing, group_size, head_dim))
        rows.copy_(seeing.transpose(0, 1))
        for place, shift in self._turned:
            matrix = self._rotations.matrix(shift, head_dim)
            rows[:, place] = (rows[:, place].to(torch.float32) @ matrix).to(rows.dtype)
        out, lse = attend_piece(
            rows.flatten(1, 2)[None], self._keys[layer], self._values[layer], scaling=scaling
        )
        split = (num_seeing, group_size)
        return (
            torch.unflatten(out[0], 1, split).transpose(0, 1),
            torch.unflatten(lse[0], 1, split).transpose(0, 1),
        )

    def add(self, total: torch.Tensor, out: torch.Tensor, weights: torch.Tensor) -> None:
        """Add the piece's weighted output to those of all tokens.

        Args:
            total: ``[num_tokens, num_kv_heads, group_size, value_dim]``, float32; written.
            out: What ``attend`` gave.
            weights: ``[num_tokens, num_kv_heads, group_size, 1]``.
        """
        if isinstance(self.tokens, slice):
            total[self.tokens].addcmul_(out, weights[self.tokens])
        else:
            total.index_add_(0, self.tokens, out * weights[self.tokens])
