"""Where ``benchmarks/gap_study.py`` leaves position IDs out, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZES = (16, 64, 256, 1_000, 4_000, 16_000, 100_000)
"""Position IDs that one gap leaves out; a cell without gaps is always there."""
COUNTS = (1, 2, 4)
"""How many gaps there are between chunks."""


class Place(StrEnum):
    """Where gaps stand."""

    NOWHERE = "no gap"
    BEFORE_CHUNKS = "before the first chunk"
    BETWEEN_CHUNKS = "between chunks"
    BEFORE_QUESTION = "before the question"


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of placing a prompt.

    Attributes:
        place: Where gaps stand.
        num_gaps: How many.
        size: Position IDs that each leaves out.
    """

    place: Place = Place.NOWHERE
    num_gaps: int = 0
    size: int = 0

    @property
    def total(self) -> int:
        """Position IDs that all gaps leave out."""
        return self.num_gaps * self.size

    def gaps(self, num_chunks: int) -> tuple[int, ...]:
        """Position IDs left out before each chunk and before the question, ``num_chunks + 1``.

        Several gaps between chunks are spread evenly; one stands in the middle.
        """
        gaps = [0] * (num_chunks + 1)
        if self.place is Place.BEFORE_CHUNKS:
            gaps[0] = self.size
        elif self.place is Place.BEFORE_QUESTION:
            gaps[-1] = self.size
        elif self.place is Place.BETWEEN_CHUNKS:
            for number in range(self.num_gaps):
                gaps[1 + (2 * number + 1) * (num_chunks - 1) // (2 * self.num_gaps)] = self.size
        return tuple(gaps)


GAPLESS = Cell()


def grid(sizes: Sequence[int], counts: Sequence[int]) -> Iterator[Cell]:
    """All cells, the one without gaps first."""
    yield GAPLESS
    places = [(Place.BEFORE_CHUNKS, 1)]
    places += [(Place.BETWEEN_CHUNKS, count) for count in counts]
    places += [(Place.BEFORE_QUESTION, 1)]
    for place, num_gaps in places:
        for size in sizes:
            yield Cell(place, num_gaps, size)
