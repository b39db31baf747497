"""Requests are counted once, apart by template and tenant, in bounded memory."""

from __future__ import annotations

import statistics
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.errors import ConfigError
from pc_rag.metrics import OTHER_TEMPLATES, CacheStats, Outcome, TokenKind
from pc_rag.types import FinishReason, HitKind, MissReason
from tests.support.metrics import request_metrics, uncached_metrics


def test_numbers_add_up_when_requests_are_recorded():
    """Tokens, hits and misses of a group are the sums over its requests."""
    stats = CacheStats()
    for _ in range(2):
        stats.record(request_metrics())
    stats.record(uncached_metrics())
    total = stats.snapshot().total
    assert total.prompt_tokens == {
        TokenKind.STORED: 110,
        TokenKind.REUSED: 20,
        TokenKind.ENCODED: 70,
        TokenKind.REPAIRED: 40,
        TokenKind.FRESH: 210,
    }
    assert total.num_prompt_tokens == 3 * 150
    assert total.token_hit_rate == 130 / 450
    assert total.module_hits == {HitKind.EXACT: 2, HitKind.COMPOSED: 2, HitKind.PARTIAL: 0}
    assert total.module_misses[MissReason.NOT_STORED] == 2
    assert total.module_misses[MissReason.REUSE_OFF] == 3
    assert total.module_misses[MissReason.OTHER_PREFIX] == 0
    assert total.qualified_hits[MissReason.OTHER_PREFIX] == 2
    assert total.module_hit_rate == 4 / 9
    assert total.num_generated_tokens == 15


def test_request_is_counted_once_when_it_is_cancelled_or_fails():
    """Every request has one outcome, and outcomes sum to all requests."""
    stats = CacheStats()
    stats.record(request_metrics())
    stats.record(
        request_metrics(
            finish_reason=FinishReason.CANCELLED, ttft_seconds=None, num_generated_tokens=0
        )
    )
    stats.record_failure(template="travel", tenant="acme")
    (group,) = stats.snapshot().groups
    assert group.requests == {
        Outcome.COMPLETED: 1,
        Outcome.CANCELLED: 1,
        Outcome.FAILED: 1,
    }
    assert group.num_requests == 3
    assert group.ttft.count == 1


def test_savings_are_summed_apart_when_some_are_unknown():
    """A saving nobody knows is counted, and not taken for none."""
    stats = CacheStats()
    for rate in (100.0, None, 65_000.0):
        stats.record(request_metrics(prefill_tokens_per_second=rate))
    stats.record_failure(template="travel", tenant="acme")
    total = stats.snapshot().total
    assert total.saved_seconds == pytest.approx((0.65 - 0.14) + (0.001 - 0.14))
    assert (total.num_known_savings, total.num_unknown_savings) == (2, 1)
    assert total.num_cache_read_tokens == 3 * 65
    assert total.to_dict()["num_cache_read_tokens"] == 3 * 65


def test_request_without_metrics_is_counted_when_its_consumer_left():
    """An observer that never saw the numbers still counts the request, as cancelled."""
    stats = CacheStats()
    stats.record_cancelled(template="travel", tenant="acme")
    (group,) = stats.snapshot().groups
    assert group.requests == {Outcome.COMPLETED: 0, Outcome.CANCELLED: 1, Outcome.FAILED: 0}
    assert (group.template, group.tenant) == ("travel", "acme")
    assert (group.num_prompt_tokens, group.num_unknown_savings) == (0, 0)


def test_groups_stay_apart_when_template_or_tenant_differs():
    """One tenant's numbers do not show in another's."""
    stats = CacheStats()
    stats.record(request_metrics(tenant="a"))
    stats.record(request_metrics(tenant="b", ttft_seconds=3.0))
    stats.record(request_metrics(tenant="b", template="legal", ttft_seconds=5.0))
    snapshot = stats.snapshot()
    assert [
        (group.template, group.tenant, group.ttft.sum_seconds) for group in snapshot.groups
    ] == [
        ("travel", "a", 1.0),
        ("travel", "b", 3.0),
        ("legal", "b", 5.0),
    ]
    assert (snapshot.total.template, snapshot.total.tenant) == ("", "")
    assert snapshot.total.num_requests == 3
    assert (snapshot.total.ttft.min_seconds, snapshot.total.ttft.max_seconds) == (1.0, 5.0)


def test_snapshot_is_empty_when_nothing_was_recorded():
    """No requests is no group, no rate and no percentile, not an error."""
    snapshot = CacheStats().snapshot()
    assert snapshot.groups == ()
    assert snapshot.total.num_requests == 0
    assert snapshot.total.token_hit_rate == 0
    assert snapshot.total.module_hit_rate is None
    assert snapshot.total.ttft.p95_seconds is None
    assert snapshot.total.ttft.mean_seconds is None


def test_snapshot_stays_when_later_requests_are_recorded():
    """A snapshot is a moment, not a view."""
    stats = CacheStats()
    stats.record(request_metrics())
    before = stats.snapshot()
    stats.record(request_metrics())
    assert before.total.num_requests == 1
    assert before != stats.snapshot()


def test_everything_is_forgotten_when_reset():
    """Counting starts anew."""
    stats = CacheStats()
    stats.record(request_metrics())
    stats.reset()
    assert stats.snapshot() == CacheStats().snapshot()


@given(seconds=st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_summary_matches_the_samples_when_all_are_kept(seconds):
    """Percentiles are nearest-rank over the kept samples."""
    stats = CacheStats(max_samples=60)
    for each in seconds:
        stats.record(request_metrics(ttft_seconds=each))
    ttft = stats.snapshot().total.ttft
    ordered = sorted(seconds)
    assert ttft.count == len(seconds)
    assert ttft.sum_seconds == pytest.approx(sum(seconds))
    assert (ttft.min_seconds, ttft.max_seconds) == (ordered[0], ordered[-1])
    assert ttft.p50_seconds == statistics.median_low(seconds)
    num_within = sum(each <= ttft.p95_seconds for each in ordered)
    assert num_within >= 0.95 * len(ordered)
    assert sum(each < ttft.p95_seconds for each in ordered) < 0.95 * len(ordered)


def test_percentiles_are_of_the_latest_when_samples_run_over():
    """Old samples leave; counts, sums and extremes remember them."""
    stats = CacheStats(max_samples=10)
    for seconds in [50.0] * 20 + [1.0] * 10:
        stats.record(request_metrics(ttft_seconds=seconds))
    ttft = stats.snapshot().total.ttft
    assert ttft.p95_seconds == 1.0
    assert ttft.max_seconds == 50.0
    assert ttft.count == 30


def test_further_groups_are_counted_together_when_there_are_too_many():
    """Labels made from user text cannot grow memory without bound, and no request is lost."""
    stats = CacheStats(max_groups=2)
    for number in range(5):
        stats.record(request_metrics(template=f"t{number}"))
    stats.record(request_metrics(template="t1"))
    counts = {group.template: group.num_requests for group in stats.snapshot().groups}
    assert counts == {"t0": 1, "t1": 2, OTHER_TEMPLATES: 3}


@pytest.mark.parametrize("limits", [{"max_samples": 0}, {"max_groups": 0}])
def test_limits_are_refused_when_below_one(limits):
    """A limit of nothing keeps nothing to report."""
    with pytest.raises(ConfigError, match="is 0; it must be at least 1"):
        CacheStats(**limits)


@pytest.fixture
def eager_switching():
    """Threads take turns as often as the interpreter can, so that a missing lock shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_no_request_is_lost_when_threads_record_and_read():
    """Every method may be called from any thread."""
    stats = CacheStats()
    totals = []

    def work(number: int) -> None:
        for _ in range(100):
            stats.record(request_metrics(template=f"t{number % 3}"))
            stats.record_failure(template="t0")
            totals.append(stats.snapshot().total)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    final = stats.snapshot().total
    assert final.requests == {Outcome.COMPLETED: 400, Outcome.CANCELLED: 0, Outcome.FAILED: 400}
    assert all(
        total.num_prompt_tokens == 150 * total.requests[Outcome.COMPLETED] for total in totals
    )
