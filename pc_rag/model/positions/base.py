"""What every position encoding can do, and how a model's layers use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence


class PositionEncoding(Protocol):
    """How the keys and scores of a layer depend on position IDs."""

    @property
    def placement(self) -> Placement:
        """Where an entry can stand."""

    def place(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """Keys as they would be had they been encoded ``shift`` position IDs later.

        Args:
            keys: ``[..., num_tokens, head_dim]``. Not modified.
            shift: Signed position IDs.

        Returns:
            Keys in their own dtype; ``keys`` itself where nothing changes.

        Raises:
            LayoutError: The encoding's keys cannot stand elsewhere.
        """

    def matrices(self, shifts: Sequence[int], head_dim: int) -> torch.Tensor | None:
        """What states are multiplied with from the right to move by ``shifts``.

        Args:
            shifts: Signed position IDs to move by, one per matrix.
            head_dim: Channels of a head.

        Returns:
            ``[num_shifts, head_dim, head_dim]``, float32; ``None`` where states stay as they are.

        Raises:
            LayoutError: The encoding's states cannot move.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """How the tokens of one layer see each other. Layers that are alike share one of these.

    Attributes:
        encoding: How positions enter.
        window: A query at position ID ``p`` sees keys from ``p - window + 1`` to ``p``; ``None``
            where it sees all before it.
    """

    encoding: PositionEncoding
    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelPositions:
    """The attention of all layers of a model.

    Attributes:
        layers: One for each layer; like layers share one object.
    """

    layers: tuple[LayerAttention, ...]

    @property
    def kinds(self) -> tuple[LayerAttention, ...]:
        """The layers that differ, in the order of their first use."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def placement(self) -> Placement:
        """Where an entry can stand: what the least free layer allows."""
        found = {layer.encoding.placement for layer in self.layers}
        order = (Placement.FIXED, Placement.ROTATE, Placement.FREE)
        return next(placement for placement in order if placement in found)

    def place(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """Keys of all layers as they would be had they been encoded ``shift`` position IDs later.

        Args:
            keys: ``[num_layers, ..., num_tokens, head_dim]``. Not modified.
            shift: Signed position IDs.

        Returns:
            Keys in their own dtype, rotated in float32; ``keys`` itself where nothing changes.

        Raises:
            LayoutError: A layer's keys cannot stand elsewhere.
        """
        if not shift:
            return keys
        by_encoding: dict[PositionEncoding, list[int]] = {}
        for number, layer in enumerate(self.layers):
            by_encoding.setdefault(layer.encoding, []).append(number)
        if len(by_encoding) == 1:
            return self.layers[0].encoding.place(keys, shift)
        placed = torch.empty_like(keys)
        for encoding, numbers in by_encoding.items():
            placed[numbers] = encoding.place(keys[numbers], shift)
        return placed


def uniform(encoding: PositionEncoding, num_layers: int) -> ModelPositions:
    """The positions of a model whose layers all see everything before them, alike."""
    return ModelPositions((LayerAttention(encoding),) * num_layers)
