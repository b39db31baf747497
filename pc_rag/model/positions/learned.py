"""Learned absolute positions: added to the tokens' embeddings, so they are part of every state.

Keys and values of a token at another position are other keys and values, and nothing leads from the
ones to the others. An entry is therefore encoded once for each start that it is asked for at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pc_rag.errors import LayoutError
from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True)
class Learned:
    """Positions of a table that was learned."""

    placement: ClassVar[Placement] = Placement.FIXED

    def place(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """See ``PositionEncoding``.

        Raises:
            LayoutError: They shall stand elsewhere.
        """
        _check_unmoved((shift,))
        return keys

    def matrices(self, shifts: Sequence[int], head_dim: int) -> None:  # noqa: ARG002 - the protocol's
        """See ``PositionEncoding``.

        Raises:
            LayoutError: Something moved.
        """
        _check_unmoved(shifts)


def _check_unmoved(shifts: Sequence[int]) -> None:
    moved = next(filter(None, shifts), 0)
    if moved:
        raise LayoutError(
            f"an entry stands {moved} position IDs from where it was encoded; learned positions "
            "cannot be moved. Encode it at that start: plan with the engine, which does"
        )
