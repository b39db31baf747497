"""A scrape shows what was counted, under names and labels that Prometheus accepts."""

from __future__ import annotations

import sys

import pytest

from pc_rag.errors import MissingDependencyError
from pc_rag.kv.base import StoreStats
from pc_rag.metrics import CacheStats, CacheStatsCollector
from pc_rag.types import Tier
from tests.support.metrics import request_metrics

prometheus_client = pytest.importorskip("prometheus_client", reason="the extra `prometheus`")
parser = pytest.importorskip("prometheus_client.parser", reason="the extra `prometheus`")

TIERS = (
    StoreStats(
        tier=Tier.HOST, num_entries=2, resident_bytes=300, capacity_bytes=1000, num_evictions=4
    ),
    StoreStats(
        tier=Tier.DISK,
        num_entries=5,
        resident_bytes=900,
        capacity_bytes=None,
        num_hits=7,
        num_misses=8,
        num_quarantined=1,
    ),
)


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry(auto_describe=True)


@pytest.fixture
def stats():
    stats = CacheStats()
    stats.record(request_metrics())
    return stats


def sample(registry, name, *, template="travel", tenant="acme", **labels):
    return registry.get_sample_value(name, {"template": template, "tenant": tenant, **labels})


def test_counts_are_shown_when_scraped(registry, stats):
    """Requests, tokens, hits and misses appear by their kinds."""
    registry.register(CacheStatsCollector(stats))
    stats.record_failure(template="travel", tenant="acme")
    assert sample(registry, "pc_rag_requests_total", outcome="completed") == 1
    assert sample(registry, "pc_rag_requests_total", outcome="failed") == 1
    assert sample(registry, "pc_rag_requests_total", outcome="cancelled") == 0
    assert sample(registry, "pc_rag_prompt_tokens_total", kind="stored") == 55
    assert sample(registry, "pc_rag_prompt_tokens_total", kind="reused") == 10
    assert sample(registry, "pc_rag_generated_tokens_total") == 5
    assert sample(registry, "pc_rag_module_hits_total", kind="composed") == 1
    assert sample(registry, "pc_rag_module_misses_total", reason="not-stored") == 1
    assert sample(registry, "pc_rag_module_qualified_hits_total", reason="other-prefix") == 1


def test_savings_are_shown_when_scraped(registry, stats):
    """Tokens read, seconds saved (a gauge: it can sink), and requests that know of no saving."""
    registry.register(CacheStatsCollector(stats))
    stats.record(request_metrics(prefill_tokens_per_second=65_000.0))
    assert sample(registry, "pc_rag_cache_read_tokens_total") == 2 * 65
    assert sample(registry, "pc_rag_saved_seconds") == pytest.approx(0.001 - 0.14)
    assert sample(registry, "pc_rag_unknown_savings_total") == 1


def test_times_are_a_summary_when_scraped(registry, stats):
    """TTFT and TPOT carry count, sum and quantiles, in seconds."""
    registry.register(CacheStatsCollector(stats))
    stats.record(request_metrics(ttft_seconds=3.0))
    assert sample(registry, "pc_rag_ttft_seconds_count") == 2
    assert sample(registry, "pc_rag_ttft_seconds_sum") == 4.0
    assert sample(registry, "pc_rag_ttft_seconds", quantile="0.5") == 1.0
    assert sample(registry, "pc_rag_ttft_seconds", quantile="0.95") == 3.0
    assert sample(registry, "pc_rag_tpot_seconds_sum") == pytest.approx(0.2)


def test_tiers_are_shown_when_the_store_is_given(registry, stats):
    """Each tier has its gauges and counters; a tier without a limit has no capacity."""
    registry.register(CacheStatsCollector(stats, read_store_stats=lambda: TIERS))
    for name, host, disk in (
        ("pc_rag_store_bytes", 300, 900),
        ("pc_rag_store_capacity_bytes", 1000, None),
        ("pc_rag_store_entries", 2, 5),
        ("pc_rag_store_hits_total", 0, 7),
        ("pc_rag_store_misses_total", 0, 8),
        ("pc_rag_store_evictions_total", 4, 0),
        ("pc_rag_store_quarantined_total", 0, 1),
    ):
        assert registry.get_sample_value(name, {"tier": "host"}) == host, name
        assert registry.get_sample_value(name, {"tier": "disk"}) == disk, name


@pytest.mark.parametrize("label", ['quote " back \\ line \n end', "日本 🚄", "", "a{b=c}"])
def test_labels_survive_when_they_hold_markup(registry, label):
    """A label made of any text comes out of the text format as it went in."""
    stats = CacheStats()
    stats.record(request_metrics(template=label, tenant=label))
    registry.register(CacheStatsCollector(stats))
    text = prometheus_client.generate_latest(registry).decode()
    labels = [
        each.labels
        for family in parser.text_string_to_metric_families(text)
        for each in family.samples
        if each.name == "pc_rag_generated_tokens_total"
    ]
    assert labels == [{"template": label, "tenant": label}]


def test_scrape_succeeds_when_a_label_is_not_unicode(registry):
    """A lone surrogate, as from a file name, does not break the whole endpoint."""
    stats = CacheStats()
    stats.record(request_metrics(template="\udc80"))
    registry.register(CacheStatsCollector(stats))
    assert b'template="\\\\udc80"' in prometheus_client.generate_latest(registry)


def test_store_is_not_read_when_registering(registry, stats):
    """Registration describes metrics only, and finds clashes of names."""

    def read():
        raise OSError("not open yet")

    registry.register(CacheStatsCollector(stats, read_store_stats=read))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(CacheStatsCollector(stats))


def test_extra_is_named_when_the_client_is_not_installed(monkeypatch, stats):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(MissingDependencyError, match=r"pc-rag\[prometheus\]"):
        CacheStatsCollector(stats)
