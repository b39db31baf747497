"""Many durations in bounded memory: count, sum, extremes, and percentiles of the latest ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Summary:
    """Durations of many requests, in seconds.

    Attributes:
        count: Durations seen.
        sum_seconds: Their sum.
        min_seconds: The shortest; ``None`` of none.
        max_seconds: The longest; ``None`` of none.
        p50_seconds: Median of the latest ones; ``None`` of none.
        p95_seconds: 95th percentile of the latest ones; ``None`` of none.
    """

    count: int = 0
    sum_seconds: float = 0.0
    min_seconds: float | None = None
    max_seconds: float | None = None
    p50_seconds: float | None = None
    p95_seconds: float | None = None

    @property
    def mean_seconds(self) -> float | None:
        """The arithmetic mean; ``None`` of none."""
        return self.sum_seconds / self.count if self.count else None


class Durations:
    """Running count, sum and extremes, and the latest samples for percentiles. Not thread-safe.

    Args:
        max_samples: Latest durations kept.
    """

    def __init__(self, max_samples: int) -> None:
        self.samples: deque[float] = deque(maxlen=max_samples)
        self.count = 0
        self.sum = 0.0
        self.min: float | None = None
        self.max: float | None = None

    def add(self, seconds: float | None) -> None:
        """Take one duration; ``None`` is none."""
        if seconds is None:
            return
        self.samples.append(seconds)
        self.count += 1
        self.sum += seconds
        self.min = seconds if self.min is None else min(self.min, seconds)
        self.max = seconds if self.max is None else max(self.max, seconds)


def summarize(durations: Sequence[Durations]) -> Summary:
    """All of ``durations`` together."""
    samples = sorted(chain.from_iterable(each.samples for each in durations))
    return Summary(
        count=sum(each.count for each in durations),
        sum_seconds=sum(each.sum for each in durations),
        min_seconds=min((each.min for each in durations if each.min is not None), default=None),
        max_seconds=max((each.max for each in durations if each.max is not None), default=None),
        p50_seconds=_percentile(samples, 50),
        p95_seconds=_percentile(samples, 95),
    )


def _percentile(samples: list[float], percent: int) -> float | None:
    """The smallest of the sorted ``samples`` that ``percent`` % of them do not exceed."""
    if not samples:
        return None
    rank = -(-percent * len(samples) // 100)  # rounded up, in whole numbers
    return samples[rank - 1]
