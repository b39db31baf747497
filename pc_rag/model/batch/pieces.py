"""Stored KV that tokens of a batch's pass see, whichever sequences they belong to."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from pc_rag.model.attention.kernels import attend_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pc_rag.model.attention.kernels import Scoring
    from pc_rag.model.attention.layer_sights import LayerSights
    from pc_rag.model.positions import ModelPositions, PositionEncoding


class Rotations:
    """Rotation matrices by encoding and shift, each made once for a batch.

    Args:
        positions: Of the model.

    Attributes:
        positions: Alike.
    """

    def __init__(self, positions: ModelPositions) -> None:
        self.positions = positions
        self._matrices: dict[tuple[PositionEncoding, int], torch.Tensor | None] = {}

    def matrix(self, encoding: PositionEncoding, shift: int, head_dim: int) -> torch.Tensor | None:
        """What queries are multiplied with from the right, to see keys that moved by ``shift``.

        Returns:
            ``[head_dim, head_dim]``, float32; ``None`` where queries stay as they are.
        """
        if (encoding, shift) not in self._matrices:
            matrices = encoding.matrices([-shift], head_dim) if shift else None
            self._matrices[encoding, shift] = None if matrices is None else matrices[0]
        return self._matrices[encoding, shift]


@dataclass(frozen=True, slots=True)
class Seeing:
    """Tokens of one sequence that stand behind a piece.

    Attributes:
        tokens: Of the pass.
        shift: Position IDs that the piece's keys moved by, for them.
        start: Position ID of the piece's first key, for them.
    """

    tokens: slice
    shift: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SeenPiece:
    """One piece of stored KV, and the tokens of a pass that stand behind it.

    Attributes:
        layer_keys: One ``[1, num_kv_heads, num_keys, head_dim]`` per layer.
        layer_values: Alike.
        key_at: ``[num_keys]``, rising: position IDs of the keys, less the ``start`` that they have
            for each sequence. On the CPU.
        seeing: Disjoint.
    """

    layer_keys: Sequence[torch.Tensor]
    layer_values: Sequence[torch.Tensor]
    key_at: torch.Tensor
    seeing: Sequence[Seeing]

    def within(self, window: int | None, position_ids: Sequence[int]) -> list[Seeing]:
        """Those whose tokens see some of it.

        Args:
            window: Of the layers.
            position_ids: Of all tokens of the pass.
        """
        if window is None:
            return list(self.seeing)
        last = int(self.key_at[-1])
        found = []
        for each in self.seeing:
            first, stop = each.tokens.start, each.tokens.stop
            stop = bisect_left(position_ids, each.start + last + window, first, stop)
            if first < stop:
                found.append(Seeing(slice(first, stop), each.shift, each.start))
        return found


class PieceUse:
    """A piece as the tokens of a pass see it in the layers of one kind.

    Args:
        piece: What is seen.
        seeing: Who sees it.
        position_ids: Of all tokens of the pass.
        encoding: Of the layers.
        rotations: Of the batch.
        sights: Of the layers.

    Attributes:
        tokens: All that see it: a slice where they are neighbours, their indices otherwise.
    """

    def __init__(
        self,
        piece: SeenPiece,
        seeing: Sequence[Seeing],
        position_ids: Sequence[int],
        *,
        encoding: PositionEncoding,
        rotations: Rotations,
        sights: LayerSights,
    ) -> None:
        self._keys, self._values = piece.layer_keys, piece.layer_values
        by_shift = sorted(seeing, key=attrgetter("shift"))  # one product turns all of a shift
        head_dim = self._keys[0].shape[-1]
        self._turned: list[tuple[slice, torch.Tensor]] = []
        count = 0
        for shift, uses in groupby(by_shift, key=attrgetter("shift")):
            end = count + sum(use.tokens.stop - use.tokens.start for use in uses)
            matrix = rotations.matrix(encoding, shift, head_dim)
            if matrix is not None:
                self._turned.append((slice(count, end), matrix))
            count = end
        slices = [use.tokens for use in by_shift]
        self.tokens: slice | torch.Tensor
        if all(before.stop == after.start for before, after in pairwise(slices)):
            self.tokens = slice(slices[0].start, slices[-1].stop)
        else:
            indices = [i for tokens in slices for i in range(tokens.start, tokens.stop)]
            self.tokens = torch.tensor(indices, device=self._keys[0].device)
        self._attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = attend_piece
        if not sights.are_plain:
            at = [p - use.start for use in by_shift for p in position_ids[use.tokens]]
            sight = sights.behind(torch.tensor(at), piece.key_at)
            self._attend = attend_piece if sight is None else sight.attend

    def attend(
        self, layer: int, stacked: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the piece.

        Args:
            layer: Index of the layer.
            stacked: All queries of the pass, ``[num_tokens, num_kv_heads, group_size, head_dim]``.
            scoring: Of the layer.

        Returns:
            Output and log-sum-exp of ``tokens``, shaped as ``stacked`` is, but for ``head_dim``.
        """
        seeing = stacked[self.tokens]
        num_seeing, num_kv_heads, group_size, head_dim = seeing.shape
        rows = seeing.new_empty((num_kv_heads, num_seeing, group_size, head_dim))
        rows.copy_(seeing.transpose(0, 1))
        for place, matrix in self._turned:
            rows[:, place] = (rows[:, place].to(torch.float32) @ matrix).to(rows.dtype)
        out, lse = self._attend(
            rows.flatten(1, 2)[None],
            self._keys[layer],
            self._values[layer],
            scaling=scoring.scaling,
            softcap=scoring.softcap,
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
