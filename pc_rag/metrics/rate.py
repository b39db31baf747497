"""How fast a model prefills, learned from the forward passes that an engine runs anyway."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from typing import Final

from pc_rag.errors import ConfigError

MIN_PASS_TOKENS: Final = 64
"""Passes over fewer tokens are not learned from: what they cost does not depend on their tokens."""

_ENOUGH_SAMPLES: Final = 5
"""Samples of large passes that make those of smaller ones needless."""


class PrefillRate:
    """Tokens per second of a plain prefill; every method may be called from any thread.

    A device is busier, and so faster per token, the more tokens a pass computes. What a cached
    prompt saved would have been one large pass, so large passes speak first: passes are kept apart
    by size (powers of two), and the rate is the median over the largest sizes that together have
    some samples. The many small prefills of a well-cached workload neither drown nor displace the
    large passes of its ingestion. Memory is bounded: the latest ``max_samples`` of each size.

    Args:
        max_samples: Latest passes kept of each size.

    Raises:
        ConfigError: ``max_samples`` is below 1.
    """

    def __init__(self, *, max_samples: int = 16) -> None:
        if max_samples < 1:
            raise ConfigError(f"PrefillRate: max_samples is {max_samples}; it must be at least 1")
        self._max_samples = max_samples
        self._lock = threading.RLock()  # reentrant: see CacheStats
        self._rates: dict[int, deque[float]] = {}
        self._median: float | None = None

    def record(self, num_tokens: int, seconds: float | None) -> None:
        """Learn from one forward pass.

        Passes over fewer than ``MIN_PASS_TOKENS`` tokens, and times that are unknown or no
        duration, are ignored.

        Args:
            num_tokens: Tokens computed, padding not included.
            seconds: What the pass took on the device; ``None`` where nobody knows.
        """
        if num_tokens < MIN_PASS_TOKENS or seconds is None:
            return
        if not (math.isfinite(seconds) and seconds > 0):
            return
        size = num_tokens.bit_length()
        with self._lock:
            rates = self._rates.setdefault(size, deque(maxlen=self._max_samples))
            rates.append(num_tokens / seconds)
            self._median = statistics.median(self._speaking())

    def _speaking(self) -> list[float]:
        """Samples of the largest sizes, size by size, until there are enough."""
        samples: list[float] = []
        for size in sorted(self._rates, reverse=True):
            samples += self._rates[size]
            if len(samples) >= _ENOUGH_SAMPLES:
                break
        return samples

    @property
    def tokens_per_second(self) -> float | None:
        """The rate learned so far; ``None`` before the first pass over enough tokens."""
        return self._median
