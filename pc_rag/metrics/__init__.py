"""What requests cost: the clock of one request, its numbers, their sums, and exporters."""

from __future__ import annotations

from pc_rag.metrics.clock import Phase, Stopwatch, Timings
from pc_rag.metrics.durations import Summary
from pc_rag.metrics.export import Plain, to_json, to_plain
from pc_rag.metrics.prometheus import CacheStatsCollector
from pc_rag.metrics.rate import PrefillRate
from pc_rag.metrics.request import ModuleUse, RequestMetrics
from pc_rag.metrics.stats import (
    OTHER_TEMPLATES,
    CacheStats,
    GroupStats,
    Outcome,
    StatsSnapshot,
    TokenKind,
)

__all__ = [
    "OTHER_TEMPLATES",
    "CacheStats",
    "CacheStatsCollector",
    "GroupStats",
    "ModuleUse",
    "Outcome",
    "Phase",
    "Plain",
    "PrefillRate",
    "RequestMetrics",
    "StatsSnapshot",
    "Stopwatch",
    "Summary",
    "Timings",
    "TokenKind",
    "to_json",
    "to_plain",
]
