"""ALiBi: attention with linear biases. Keys carry no position, so an entry stands anywhere.

The score of a query at position ID ``p`` and a key at ``s`` is lowered by ``slope * (p - s)``, with
one slope per query head. For all keys of a piece that moves by ``d`` the bias changes by the same
``-slope * d``, which leaves the piece's own softmax alone and only shifts its log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """The biases of one model.

    Attributes:
        slopes: ``[num_heads]``, float32, positive: what a score loses per position ID of distance,
            behind the scaling of scores.
    """

    placement: ClassVar[Placement] = Placement.FREE

    slopes: torch.Tensor

    def place(self, keys: torch.Tensor, shift: int) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """See ``PositionEncoding``: keys carry no position."""
        return keys

    def matrices(self, shifts: Sequence[int], head_dim: int) -> None:  # noqa: ARG002 - alike
        """See ``PositionEncoding``: no query is rotated."""
        return
