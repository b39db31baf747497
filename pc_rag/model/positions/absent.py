"""Layers that encode no positions (NoPE): an entry stands anywhere as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True)
class Absent:
    """No position encoding; only the causal order tells tokens apart."""

    placement: ClassVar[Placement] = Placement.FREE

    def place(self, keys: torch.Tensor, shift: int) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """See ``PositionEncoding``: keys carry no position."""
        return keys

    def matrices(self, shifts: Sequence[int], head_dim: int) -> None:  # noqa: ARG002 - alike
        """See ``PositionEncoding``: no query is rotated."""
        return
