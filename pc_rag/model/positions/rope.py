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
from typing import TYPE_CHECKING

import torch

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
        style: Which channels form a pair. Channels from ``rotary_dim`` on are not rotated.
    """

    inv_freq: torch.Tensor
    style: RopeStyle = RopeStyle.HALVES

    @property
    def rotary_dim(self) -> int:
        """Leading channels of a head that are rotated."""
        return 2 * self.inv_freq.shape[0]

    def rotation(self, shifts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines that move by the given numbers of position IDs.

        Angles are formed in float64: a float32 angle of some thousand radians would already be
        wrong in its fourth decimal.

        Args:
            shifts: Signed position IDs to move by, one per rotation.

        Returns:
            ``cos`` and ``sin``, each ``[num_shifts, rotary_dim / 2]``, float32, on the device of
            ``inv_freq``.
        """
        moved_by = torch.tensor(shifts, dtype=torch.float64, device=self.inv_freq.device)
        angles = moved_by[:, None] * self.inv_freq.to(torch.float64)
        return angles.cos().to(torch.float32), angles.sin().to(torch.float32)

    def rotate(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys; computed in float32, returned in their own dtype.

        Args:
            states: ``[..., head_dim]``. Not modified.
            cos: Broadcastable to ``[..., rotary_dim / 2]``.
            sin: As ``cos``.
        """
        rotary = states[..., : self.rotary_dim].to(torch.float32)
        is_halves = self.style is RopeStyle.HALVES
        first, second = (
            rotary.chunk(2, dim=-1) if is_halves else (rotary[..., 0::2], rotary[..., 1::2])
        )
        turned_first = (first * cos).addcmul_(second, sin, value=-1)
        turned_second = (second * cos).addcmul_(first, sin)
        if is_halves:
            turned = torch.cat((turned_first, turned_second), dim=-1).to(states.dtype)
        else:
            turned = torch.stack((turned_first, turned_second), dim=-1).flatten(-2).to(states.dtype)
        if states.shape[-1] == self.rotary_dim:
            return turned
        rest = states[..., self.rotary_dim :]
        return torch.cat((turned, rest.expand(*turned.shape[:-1], -1)), dim=-1)

    def place(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """Keys as they would be had they been encoded ``shift`` position IDs later.

        Args:
            keys: ``[..., num_tokens, head_dim]``. Not modified.
            shift: Signed position IDs.
        """
        if not shift:
            return keys
        cos, sin = self.rotation([shift])
        return self.rotate(keys, cos, sin)
