"""The prefill rate is learned from large passes, robustly, in bounded memory."""

from __future__ import annotations

import math
import threading

import pytest

from pc_rag.errors import ConfigError
from pc_rag.metrics import PrefillRate


def rate_of(*passes, **options):
    """The rate after a first pass, which never counts, and those given."""
    rate = PrefillRate(**options)
    for num_tokens, seconds in ((300, 9.0), *passes):
        rate.record(num_tokens, seconds, num_context_tokens=0)
    return rate.tokens_per_second


def test_rate_is_unknown_when_nothing_was_measured():
    """No pass is no rate, not a rate of zero."""
    assert PrefillRate().tokens_per_second is None


def test_pass_is_ignored_when_it_is_the_first():
    """It pays for what a device does once, whatever its size; one that says nothing is none."""
    assert rate_of() is None
    rate = PrefillRate()
    for num_tokens, seconds in ((300, None), (1, 1.0), (300, 1.0)):
        rate.record(num_tokens, seconds, num_context_tokens=0)
    assert rate.tokens_per_second == 300.0


def test_rate_is_the_median_when_passes_vary():
    """One slow pass does not move it."""
    assert rate_of((300, 1.0), (300, 0.5), (300, 100.0)) == 300.0


def test_rate_is_of_the_latest_when_passes_run_over():
    """A machine that became faster is believed."""
    assert rate_of(*[(300, 1.0)] * 10, *[(300, 0.5)] * 3, max_samples=3) == 600.0


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(255, 1.0), (0, 1.0), (300, 0.0), (300, -1.0), (300, math.nan), (300, math.inf), (300, None)],
)
def test_pass_is_ignored_when_it_says_nothing_about_speed(num_tokens, seconds):
    """Few tokens cost what one costs, and a time that is none divides nothing."""
    assert rate_of((num_tokens, seconds)) is None


def test_pass_is_ignored_when_it_attended_much_that_is_stored():
    """The prefill of a cached prompt is slower than what it saved, so it would flatter."""
    rate = PrefillRate()
    for num_context_tokens in (0, 31, 1263):
        rate.record(300, 1.0, num_context_tokens=num_context_tokens)
    assert rate.tokens_per_second is None
    rate.record(300, 0.5, num_context_tokens=30)
    assert rate.tokens_per_second == 600.0


def test_large_passes_speak_when_small_ones_are_many():
    """What was saved would have been one large pass; small prefills are slower per token."""
    assert rate_of(*[(2000, 1.0)] * 5, *[(300, 1.0)] * 1000) == 2000.0


def test_small_passes_help_when_large_ones_are_few():
    """One large pass alone is no robust sample."""
    assert rate_of((2000, 1000.0), *[(300, 1.0)] * 9) == 300.0


def test_limit_is_refused_when_below_one():
    """Nothing kept is nothing learned."""
    with pytest.raises(ConfigError, match="max_samples is 0"):
        PrefillRate(max_samples=0)


def test_rate_holds_when_threads_record_and_read():
    """Every method may be called from any thread."""
    rate = PrefillRate(max_samples=8)

    def work() -> None:
        for number in range(500):
            rate.record(256 << (number % 8), 1.0, num_context_tokens=0)
            assert number < 1 or rate.tokens_per_second > 0

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rate.tokens_per_second == 256 << 7
