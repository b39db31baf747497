"""What every sequence of a batch has for itself: rows in a buffer of sequences of like length.

One buffer for many sequences lets one call attend all of them, but its rows are as many as the
longest needs. So sequences are put into blocks, of which each holds lengths that differ little:

    block 0   slot 0  ##########
              slot 1  #########.      # filled, or to be filled
    block 1   slot 0  ####            . padding
              slot 1  ####
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.attention.kv_view import Segment
    from pc_rag.model.buffer_pool import KVShape
    from pc_rag.model.positions import ModelPositions

_LEAST_FILLED = 0.875
"""Rows that a sequence needs, over those of its block; what is missing is padding."""


@dataclass(frozen=True, slots=True, eq=False)
class TailBlock:
    """One buffer of several sequences, a slot each.

    Attributes:
        keys: ``[num_layers, num_slots, num_kv_heads, capacity, head_dim]``. Finite everywhere: rows
            that hold no token are attended under a mask, which would let a NaN through.
        values: As ``keys``.
        position_ids: ``[num_slots, capacity]``, of the rows. On the CPU.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position_ids: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        num_slots, capacity = self.keys.shape[1], self.keys.shape[3]
        position_ids = torch.zeros((num_slots, capacity), dtype=torch.long)
        object.__setattr__(self, "position_ids", position_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(slots=True, eq=False)
class SequenceTail:
    """The rows of one sequence; filled from the front, no gaps.

    Attributes:
        block: Where they lie.
        slot: Which slot of the block they are.
        num_rows: Rows that hold tokens.
    """

    block: TailBlock
    slot: int
    num_rows: int = 0

    @property
    def position_ids(self) -> torch.Tensor:
        """``[capacity]``, of the rows: a view."""
        return self.block.position_ids[self.slot]

    def settle(self, segment: Segment, positions: ModelPositions) -> slice:
        """Copy stored KV to the next rows, its keys rotated to where they stand.

        Returns:
            The rows.
        """
        rows = slice(self.num_rows, self.num_rows + len(segment.span))
        segment.copy_to(
            self.block.keys[:, self.slot, :, rows],
            self.block.values[:, self.slot, :, rows],
            positions,
        )
        self.position_ids[rows] = torch.arange(segment.span.start, segment.span.end)
        self.num_rows = rows.stop
        return rows

    def layer_kv(self, layer: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer's rows: views, ``[1, num_kv_heads, num_rows, head_dim]``."""
        slots = slice(self.slot, self.slot + 1)
        keys: torch.Tensor = self.block.keys[layer, slots, :, rows]
        return keys, self.block.values[layer, slots, :, rows]


def allocate_tails(
    shape: KVShape, capacities: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> list[SequenceTail]:
    """Buffers for sequences of these numbers of rows.

    Args:
        shape: Geometry of the model's KV.
        capacities: Rows that each sequence needs.
        dtype: Compute dtype.
        device: Where the buffers lie.

    Returns:
        An empty tail for each sequence, in the order of ``capacities``.
    """
    by_length = sorted(range(len(capacities)), key=lambda number: -capacities[number])
    groups: list[list[int]] = []
    for number in by_length:
        if groups and capacities[number] >= _LEAST_FILLED * capacities[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    tails: dict[int, SequenceTail] = {}
    for group in groups:
        lead = (shape.num_layers, len(group), shape.num_kv_heads, capacities[group[0]])
        block = TailBlock(
            torch.zeros((*lead, shape.key_dim), dtype=dtype, device=device),
            torch.zeros((*lead, shape.value_dim), dtype=dtype, device=device),
        )
        tails.update((number, SequenceTail(block, slot)) for slot, number in enumerate(group))
    return [tails[number] for number in range(len(capacities))]
