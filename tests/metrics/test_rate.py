"""The prefill rate is learned from large passes, robustly, in bounded memory."""

from __future__ import annotations

import math
import threading

import pytest

from pc_rag.errors import ConfigError
from pc_rag.metrics import PrefillRate


def rate_of(*passes, **options):
    rate = PrefillRate(**options)
    for num_tokens, seconds in passes:
        rate.record(num_tokens, seconds)
    return rate.tokens_per_second


def test_rate_is_unknown_when_nothing_was_measured():
    """No pass is no rate, not a rate of zero."""
    assert rate_of() is None


def test_rate_is_the_median_when_passes_vary():
    """One slow pass, as the first often is, does not move it."""
    assert rate_of((100, 1.0), (100, 0.5), (100, 100.0)) == 100.0


def test_rate_is_of_the_latest_when_passes_run_over():
    """A machine that became faster is believed."""
    assert rate_of(*[(100, 1.0)] * 10, *[(100, 0.5)] * 3, max_samples=3) == 200.0


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(63, 1.0), (0, 1.0), (100, 0.0), (100, -1.0), (100, math.nan), (100, math.inf), (100, None)],
)
def test_pass_is_ignored_when_it_says_nothing_about_speed(num_tokens, seconds):
    """Few tokens cost what one costs, and a time that is none divides nothing."""
    assert rate_of((num_tokens, seconds)) is None


def test_large_passes_speak_when_small_ones_are_many():
    """What was saved would have been one large pass; small prefills are slower per token."""
    assert rate_of(*[(2000, 1.0)] * 5, *[(70, 1.0)] * 1000) == 2000.0


def test_small_passes_help_when_large_ones_are_few():
    """One large pass alone is no robust sample."""
    assert rate_of((2000, 1000.0), *[(70, 1.0)] * 9) == 70.0


def test_limit_is_refused_when_below_one():
    """Nothing kept is nothing learned."""
    with pytest.raises(ConfigError, match="max_samples is 0"):
        PrefillRate(max_samples=0)


def test_rate_holds_when_threads_record_and_read():
    """Every method may be called from any thread."""
    rate = PrefillRate(max_samples=8)

    def work() -> None:
        for number in range(500):
            rate.record(64 << (number % 8), 1.0)
            assert rate.tokens_per_second > 0

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rate.tokens_per_second == 64 << 7
