"""How fast a model prefills, learned from the forward passes that an engine runs anyway."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from typing import Final

from pc_rag.metrics.limits import check_limits

MIN_PASS_TOKENS: Final = 256
"""Passes over fewer tokens are not learned from: what they cost depends little on their tokens."""

MAX_CONTEXT_SHARE: Final = 0.1
"""Stored tokens that a pass may attend, for each that it computes, to count as a plain prefill."""

_ENOUGH_SAMPLES: Final = 5
"""Samples of large passes that make those of smaller ones needless."""


class PrefillRate:
    """Tokens per second of a plain prefill; every method may be called from any thread.

    What a cached prompt saved would have been one large pass over its tokens, with nothing stored
    before them. Only passes like it are learned from: the short prefill of a cached prompt is two
    or three times slower per token, for it is small and attends all that is stored. So the rate is
    learned from ingestion and from prompts that were computed, and a process that only ever reads
    what is stored does not know it.

    A device is busier, and so faster per token, the more tokens a pass computes, so large passes
    speak first: passes are kept apart by size (powers of two), and the rate is the median over the
    largest sizes that together have some samples. The first pass of all is left out; it pays for
    what a device does once. Memory is bounded: the latest ``max_samples`` of each size.

    Args:
        max_samples: Latest passes kept of each size.

    Raises:
        ConfigError: ``max_samples`` is below 1.
    """

    def __init__(self, *, max_samples: int = 16) -> None:
        check_limits("PrefillRate", max_samples=max_samples)
        self._max_samples = max_samples
        self._lock = threading.RLock()  # reentrant: see CacheStats
        self._is_warm = False
        self._rates: dict[int, deque[float]] = {}
        self._median: float | None = None

    def record(self, num_tokens: int, seconds: float | None, *, num_context_tokens: int) -> None:
        """Learn from one forward pass.

        The first pass is ignored, and so are passes over fewer than ``MIN_PASS_TOKENS`` tokens,
        those that attended more than ``MAX_CONTEXT_SHARE`` as many stored tokens, and times that
        are unknown or no duration.

        Args:
            num_tokens: Tokens computed, of all rows together, padding not included.
            seconds: What the pass took on the device; ``None`` where nobody knows.
            num_context_tokens: Stored tokens that each row attended.
        """
        if seconds is None or not (math.isfinite(seconds) and seconds > 0):
            return
        with self._lock:
            is_first, self._is_warm = not self._is_warm, True
            if is_first or num_tokens < MIN_PASS_TOKENS:
                return
            if num_context_tokens > MAX_CONTEXT_SHARE * num_tokens:
                return
            size = num_tokens.bit_length()
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
