"""What one request attends: stored KV read in place, and one buffer for what it computes.

    segment 0     segment 1       segment 2        tail
    prefix        chunk A         chunk C          fresh tokens, then generated ones
    [store]       [store]         [store]          [one pooled buffer]

Prefill, which decides the time to first token, reads stored KV where it lies: nothing is copied or
changed. The keys of a segment that stands elsewhere than it was encoded stay as they are; the
queries that look at it are rotated instead (see ``positions.rope``).

Decode reads the whole context once per token, and one contiguous buffer is read faster than many
segments. So before the second token a view can be *settled*: every segment is copied to its rows of
a pooled buffer, its keys rotated in float32 on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pc_rag.errors import GenerationError

if TYPE_CHECKING:
    from pc_rag.model.positions import ModelPositions
    from pc_rag.types import Span


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Stored KV of consecutive tokens, as one request sees it.

    Attributes:
        keys: ``[num_layers, num_kv_heads, num_tokens, head_dim]``, position-encoded where they
            were computed. A view; never written.
        values: As ``keys``.
        span: Position IDs the tokens take in this request.
        shift: ``span.start`` minus the position ID that the first key was encoded at.
        layer_keys: The keys, one ``[1, num_kv_heads, num_tokens, head_dim]`` view per layer.
        layer_values: The values, alike.
    """

    keys: torch.Tensor
    values: torch.Tensor
    span: Span
    shift: int = 0
    layer_keys: tuple[torch.Tensor, ...] = field(init=False)
    layer_values: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_keys", self.keys[:, None].unbind(0))
        object.__setattr__(self, "layer_values", self.values[:, None].unbind(0))

    def copy_to(self, keys: torch.Tensor, values: torch.Tensor, positions: ModelPositions) -> None:
        """Write keys and values as they are at ``span``.

        Args:
            keys: Shaped as the segment's; written, keys that moved rotated in float32.
            values: Alike.
            positions: Of the model.
        """
        keys.copy_(positions.place(self.keys, self.shift))
        values.copy_(self.values)


@dataclass(slots=True, eq=False)
class Tail:
    """A request's buffer; rows are filled from the front, no gaps.

    Attributes:
        keys: ``[num_layers, batch_size, num_kv_heads, capacity, head_dim]``.
        values: As ``keys``.
        num_rows: Rows that hold tokens.
        position_ids: ``[capacity]``, of the rows; rows need not follow their order. On the CPU.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_rows: int = 0
    position_ids: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.position_ids = torch.zeros(self.capacity, dtype=torch.long)

    @property
    def capacity(self) -> int:
        """Rows in all."""
        return int(self.keys.shape[3])

    def reserve(self, num_tokens: int) -> None:
        """Check that ``num_tokens`` more rows are free.

        Raises:
            GenerationError: They are not.
        """
        if self.num_rows + num_tokens > self.capacity:
            raise GenerationError(
                f"the request's buffer holds {self.capacity} tokens; {self.num_rows} are filled "
                f"and {num_tokens} more were asked for"
            )


@dataclass(slots=True, eq=False)
class KVView:
    """Everything the fresh tokens of one request can attend.

    Attributes:
        segments: Stored KV, by rising position ID.
        tail: What this request computes; its rows come after all segments or between them.
        first_computed: First row of the tail that this request computed; the rows before it are
            settled copies.
    """

    segments: tuple[Segment, ...]
    tail: Tail
    first_computed: int = 0

    @property
    def num_stored(self) -> int:
        """Tokens of the segments."""
        return sum(len(segment.span) for segment in self.segments)

    @property
    def num_computed(self) -> int:
        """Tokens that this request has computed."""
        return self.tail.num_rows - self.first_computed

    def computed_kv(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of computed tokens ``[start, end)``, in the order of computation.

        Returns:
            Views, each ``[num_layers, num_kv_heads, num_tokens, head_dim]``.
        """
        rows = slice(self.first_computed + start, self.first_computed + end)
        return self.tail.keys[:, 0, :, rows], self.tail.values[:, 0, :, rows]

    def settle(self, into: Tail, positions: ModelPositions) -> Tail:
        """Copy segments and computed rows to ``into``; the view reads no stored KV afterwards.

        Only a view whose later tokens stand behind everything may settle: rows lose their order.

        Args:
            into: An empty buffer with room for all of it and for what will be generated.
            positions: Of the model; moved keys are rotated on the way.

        Returns:
            The former tail, which the view no longer uses.
        """
        into.reserve(self.num_stored + self.tail.num_rows)
        row = 0
        for segment in self.segments:
            rows = slice(row, row + len(segment.span))
            segment.copy_to(into.keys[:, 0, :, rows], into.values[:, 0, :, rows], positions)
            into.position_ids[rows] = torch.arange(segment.span.start, segment.span.end)
            row = rows.stop
        former = self.tail
        computed = slice(row, row + former.num_rows)
        into.keys[:, 0, :, computed] = former.keys[:, 0, :, : former.num_rows]
        into.values[:, 0, :, computed] = former.values[:, 0, :, : former.num_rows]
        into.position_ids[computed] = former.position_ids[: former.num_rows]
        into.num_rows = computed.stop
        self.segments, self.tail, self.first_computed = (), into, computed.start
        return former
