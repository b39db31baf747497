"""Rotary position encoding: moving an entry is a rotation by the difference of position IDs.

RoPE turns a query at position ``p`` and a key at position ``s`` by ``R(p)`` and ``R(s)``; their dot
product depends on ``p - s`` only. A key that was encoded at ``s`` and shall stand at ``s + d`` can
therefore be turned by ``R(d)``, or be left where it lies while the query is turned by ``R(-d)``:

    (R(p) q) . (R(s + d) k)  =  (R(p - d) q) . (R(s) k)

Requests use the second form, so stored keys are read in place, never copied. The first form makes
keys that physically lie elsewhere, for tests and for tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import torch

from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence


class RopeStyle(StrEnum):
    """Which channels form a rotated pair."""

    HALVES = "halves"
    """Channel ``i`` with channel ``i + rotary_dim / 2`` (Llama, Qwen, GPT-NeoX)."""
    INTERLEAVED = "interleaved"
    """Channel ``2 i`` with channel ``2 i + 1`` (GPT-J, Cohere)."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The rotation of one model.

    Attributes:
        inv_freq: ``[rotary_dim / 2]``, radians per position ID, as the model itself uses them;
            scaled variants (linear, llama3, YaRN) differ only here. A constant attention scaling
            factor is part of the stored keys already and does not change with position.
        style: Which channels form a pair.
        first_channel: The first channel of a head that is rotated, ``rotary_dim`` of them in all.
            The others are not: behind them with partial rotation, before them with multi-head
            latent attention.
    """

    placement: ClassVar[Placement] = Placement.ROTATE

    inv_freq: torch.Tensor
    style: RopeStyle = RopeStyle.HALVES
    first_channel: int = 0

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return 2 * self.inv_freq.shape[0]

    def matrices(self, shifts: Sequence[int], head_dim: int) -> torch.Tensor:
        """Rotations as matrices that states are multiplied with from the right.

        One matrix product moves states to many places at once, whichever channels form a pair.
        Angles are formed in float64: a float32 angle of some thousand radians would already be
        wrong in its fourth decimal.

        Args:
            shifts: Signed position IDs to move by, one per matrix.
            head_dim: Channels of a head.

        Returns:
            ``[num_shifts, head_dim, head_dim]``, float32, on the device of ``inv_freq``.
        """
        device = self.inv_freq.device
        moved_by = torch.tensor(shifts, dtype=torch.float64, device=device)
        angles = moved_by[:, None] * self.inv_freq.to(torch.float64)
        cos, sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
        half = self.inv_freq.shape[0]
        channel = torch.arange(half, device=device)
        if self.style is RopeStyle.HALVES:
            first, second = channel, channel + half
        else:
            first, second = 2 * channel, 2 * channel + 1
        first, second = first + self.first_channel, second + self.first_channel
        matrices = torch.eye(head_dim, device=device).repeat(len(shifts), 1, 1)
        matrices[:, first, first] = cos
        matrices[:, second, second] = cos
        matrices[:, first, second] = sin
        matrices[:, second, first] = -sin
        return matrices

    def place(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """Keys as they would be had they been encoded ``shift`` position IDs later.

        Args:
            keys: ``[..., num_tokens, head_dim]``. Not modified.
            shift: Signed position IDs.

        Returns:
            Keys in their own dtype, rotated in float32; ``keys`` itself where nothing moves.
        """
        if not shift:
            return keys
        matrix = self.matrices([shift], keys.shape[-1])[0]
        return torch.matmul(keys.to(torch.float32), matrix).to(keys.dtype)
