"""CacheStats as a Prometheus collector. Needs the extra ``prometheus``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pc_rag.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        Metric,
        SummaryMetricFamily,
    )

    from pc_rag.kv.base import StoreStats
    from pc_rag.metrics.durations import Summary
    from pc_rag.metrics.stats import CacheStats, GroupStats, StatsSnapshot

_GROUP_LABELS = ("template", "tenant")
_TIER_LABELS = ("tier",)


class CacheStatsCollector:
    """Shows ``stats`` to a Prometheus registry each time it is scraped; counts nothing itself.

    ``prometheus_client.REGISTRY.register(CacheStatsCollector(cache.stats))``

    Args:
        stats: What to show.
        read_store_stats: Called at every scrape for the numbers of the store's tiers, for example
            ``store.stats``; without it the store is not shown.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
    """

    def __init__(
        self,
        stats: CacheStats,
        *,
        read_store_stats: Callable[[], Iterable[StoreStats]] | None = None,
    ) -> None:
        self._stats = stats
        self._read_store_stats = read_store_stats
        self._families = _Families(
            require("prometheus_client.core", feature="the Prometheus exporter", extra="prometheus")
        )

    def describe(self) -> Iterator[Metric]:
        """The metrics without samples: lets a registry find name clashes without a scrape."""
        yield from self._requests(())
        if self._read_store_stats is not None:
            yield from self._store(())

    def collect(self) -> Iterator[Metric]:
        """The metrics with the numbers of this moment."""
        snapshot: StatsSnapshot = self._stats.snapshot()
        yield from self._requests(snapshot.groups)
        if self._read_store_stats is not None:
            yield from self._store(tuple(self._read_store_stats()))

    def _requests(self, groups: tuple[GroupStats, ...]) -> Iterator[Metric]:
        new = self._families
        by_kind, by_reason = (*_GROUP_LABELS, "kind"), (*_GROUP_LABELS, "reason")
        requests = new.counter("requests", "Requests by outcome.", (*_GROUP_LABELS, "outcome"))
        prompt = new.counter("prompt_tokens", "Prompt tokens by where their KV came from.", by_kind)
        generated = new.counter("generated_tokens", "Tokens generated.", _GROUP_LABELS)
        hits = new.counter("module_hits", "Modules served from the store.", by_kind)
        misses = new.counter("module_misses", "Modules not served from the store.", by_reason)
        qualified = new.counter(
            "module_qualified_hits", "Hits that could have been better, by reason.", by_reason
        )
        read = new.counter(
            "cache_read_tokens", "Prompt tokens whose KV existed before.", _GROUP_LABELS
        )
        # A gauge: a request that loads longer than it would have computed takes from it.
        saved = new.gauge(
            "saved_seconds", "Estimated time that stored KV saved; of known savings.", _GROUP_LABELS
        )
        unknown = new.counter(
            "unknown_savings", "Requests whose saved_seconds is unknown.", _GROUP_LABELS
        )
        ttft = new.summary("ttft_seconds", "From the call to the first token.")
        tpot = new.summary("tpot_seconds", "Mean time per token behind the first, by request.")
        for group in groups:
            labels = [_as_utf8(group.template), _as_utf8(group.tenant)]
            for family, counts in (
                (requests, group.requests),
                (prompt, group.prompt_tokens),
                (hits, group.module_hits),
                (misses, group.module_misses),
                (qualified, group.qualified_hits),
            ):
                for kind, count in counts.items():
                    family.add_metric([*labels, str(kind)], count)
            generated.add_metric(labels, group.num_generated_tokens)
            read.add_metric(labels, group.num_cache_read_tokens)
            saved.add_metric(labels, group.saved_seconds)
            unknown.add_metric(labels, group.num_unknown_savings)
            _add_summary(ttft, labels, group.ttft)
            _add_summary(tpot, labels, group.tpot)
        yield from (requests, prompt, generated, hits, misses, qualified)
        yield from (read, saved, unknown, ttft, tpot)

    def _store(self, tiers: tuple[StoreStats, ...]) -> Iterator[Metric]:
        new = self._families
        used = new.gauge("store_bytes", "Bytes that entries occupy.", _TIER_LABELS)
        capacity = new.gauge(
            "store_capacity_bytes", "Limit on store_bytes; absent without one.", _TIER_LABELS
        )
        entries = new.gauge("store_entries", "Entries resident.", _TIER_LABELS)
        hits = new.counter(
            "store_hits", "Leases served by the tier, for warming too.", _TIER_LABELS
        )
        misses = new.counter("store_misses", "Lookups the tier could not serve.", _TIER_LABELS)
        evictions = new.counter("store_evictions", "Entries dropped to make room.", _TIER_LABELS)
        quarantined = new.counter("store_quarantined", "Damaged files set aside.", _TIER_LABELS)
        for tier in tiers:
            labels = [str(tier.tier)]
            used.add_metric(labels, tier.resident_bytes)
            if tier.capacity_bytes is not None:
                capacity.add_metric(labels, tier.capacity_bytes)
            entries.add_metric(labels, tier.num_entries)
            hits.add_metric(labels, tier.num_hits)
            misses.add_metric(labels, tier.num_misses)
            evictions.add_metric(labels, tier.num_evictions)
            quarantined.add_metric(labels, tier.num_quarantined)
        yield from (used, capacity, entries, hits, misses, evictions, quarantined)


class _Families:
    """Makes empty metric families under our prefix, out of the optional package."""

    def __init__(self, core: Any) -> None:  # noqa: ANN401 - a module has no type
        self._core = core

    def counter(
        self, name: str, documentation: str, labels: tuple[str, ...]
    ) -> CounterMetricFamily:
        family: CounterMetricFamily = self._core.CounterMetricFamily(
            f"pc_rag_{name}", documentation, labels=labels
        )
        return family

    def summary(self, name: str, documentation: str) -> SummaryMetricFamily:
        family: SummaryMetricFamily = self._core.SummaryMetricFamily(
            f"pc_rag_{name}", documentation, labels=_GROUP_LABELS
        )
        return family

    def gauge(self, name: str, documentation: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
        family: GaugeMetricFamily = self._core.GaugeMetricFamily(
            f"pc_rag_{name}", documentation, labels=labels
        )
        return family


def _add_summary(family: SummaryMetricFamily, labels: list[str], summary: Summary) -> None:
    family.add_metric(labels, summary.count, summary.sum_seconds)
    named = dict(zip(_GROUP_LABELS, labels, strict=True))
    for quantile, seconds in (("0.5", summary.p50_seconds), ("0.95", summary.p95_seconds)):
        if seconds is not None:
            family.add_sample(family.name, {**named, "quantile": quantile}, seconds)


def _as_utf8(label: str) -> str:
    """The label with lone surrogates escaped: the text format cannot carry them."""
    return label.encode("utf-8", "backslashreplace").decode("utf-8")
