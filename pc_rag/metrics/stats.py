"""The numbers of all requests together, kept apart by template and tenant."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping  # noqa: TC003 - `get_type_hints` resolves the fields
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from pc_rag.metrics.durations import Durations, Summary, summarize
from pc_rag.metrics.export import Plain, plain_fields, to_plain
from pc_rag.metrics.limits import check_limits
from pc_rag.types import HitKind, MissReason

if TYPE_CHECKING:
    from pc_rag.metrics.request import RequestMetrics

Kind = TypeVar("Kind", bound=StrEnum)

OTHER_TEMPLATES: Final = "(other)"
"""Where requests are counted once there are as many templates and tenants as are kept apart."""


class Outcome(StrEnum):
    """How a request ended; every request has exactly one."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TokenKind(StrEnum):
    """Where the KV of a prompt's token came from; every token has exactly one kind."""

    STORED = "stored"
    """An entry stored before the request."""
    REUSED = "reused"
    """The exact prefix cache."""
    ENCODED = "encoded"
    """An entry that the request had to encode first."""
    REPAIRED = "repaired"
    """Recomputed although stored."""
    FRESH = "fresh"
    """Computed: the request's own text, or stored text without an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """What the requests of one template and tenant did, or all of them.

    Attributes:
        template: Label of the schema or corpus.
        tenant: The engine's tenant.
        requests: Requests by outcome.
        prompt_tokens: Prompt tokens by where their KV came from; they sum to all prompt tokens.
        num_generated_tokens: Tokens generated.
        module_hits: Modules served from the store, by kind.
        module_misses: Modules not served from the store, by reason.
        qualified_hits: Hits that could have been better, by reason (another prefix, a part only).
        saved_seconds: Estimated time that stored KV saved: ``RequestMetrics.saved_seconds``, summed
            over the requests that know it.
        num_known_savings: Those requests.
        num_unknown_savings: Requests with metrics whose saving is unknown, because the model's
            prefill rate was.
        ttft: Times to the first token.
        tpot: Mean times per token behind the first, one for each request.
    """

    template: str = ""
    tenant: str = ""
    requests: Mapping[Outcome, int] = field(default_factory=dict, hash=False)
    prompt_tokens: Mapping[TokenKind, int] = field(default_factory=dict, hash=False)
    num_generated_tokens: int = 0
    module_hits: Mapping[HitKind, int] = field(default_factory=dict, hash=False)
    module_misses: Mapping[MissReason, int] = field(default_factory=dict, hash=False)
    qualified_hits: Mapping[MissReason, int] = field(default_factory=dict, hash=False)
    saved_seconds: float = 0.0
    num_known_savings: int = 0
    num_unknown_savings: int = 0
    ttft: Summary = field(default_factory=Summary)
    tpot: Summary = field(default_factory=Summary)

    @property
    def num_requests(self) -> int:
        """All requests, whatever their outcome."""
        return sum(self.requests.values())

    @property
    def num_prompt_tokens(self) -> int:
        """All prompt tokens."""
        return sum(self.prompt_tokens.values())

    @property
    def num_cache_read_tokens(self) -> int:
        """Prompt tokens whose KV existed before their request: those that were not computed."""
        stored = self.prompt_tokens.get(TokenKind.STORED, 0)
        return stored + self.prompt_tokens.get(TokenKind.REUSED, 0)

    @property
    def token_hit_rate(self) -> float:
        """Share of prompt tokens whose KV existed before their request; 0 of no tokens."""
        read = self.num_cache_read_tokens
        return read / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def module_hit_rate(self) -> float | None:
        """Share of modules that were hits; ``None`` when there was nothing to hit."""
        hits = sum(self.module_hits.values())
        uses = hits + sum(self.module_misses.values())
        return hits / uses if uses else None

    def to_dict(self) -> dict[str, Plain]:
        """Every field and every derived number, as JSON can say them."""
        return plain_fields(self) | {name: to_plain(getattr(self, name)) for name in _DERIVED}


_DERIVED = (
    "num_requests",
    "num_prompt_tokens",
    "num_cache_read_tokens",
    "token_hit_rate",
    "module_hit_rate",
)


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """The numbers at one moment.

    Attributes:
        total: All requests.
        groups: The same by template and tenant, in the order they were first seen.
    """

    total: GroupStats
    groups: tuple[GroupStats, ...]

    def to_dict(self) -> dict[str, Plain]:
        """Every number, as JSON can say them."""
        return {
            "total": self.total.to_dict(),
            "groups": [group.to_dict() for group in self.groups],
        }


class _Group:
    """The running numbers of one template and tenant."""

    def __init__(self, template: str, tenant: str, *, max_samples: int) -> None:
        self.template = template
        self.tenant = tenant
        self.requests: Counter[Outcome] = Counter()
        self.prompt_tokens: Counter[TokenKind] = Counter()
        self.num_generated_tokens = 0
        self.module_hits: Counter[HitKind] = Counter()
        self.module_misses: Counter[MissReason] = Counter()
        self.qualified_hits: Counter[MissReason] = Counter()
        self.saved_seconds = 0.0
        self.num_known_savings = 0
        self.num_unknown_savings = 0
        self.ttft = Durations(max_samples)
        self.tpot = Durations(max_samples)

    def add(self, metrics: RequestMetrics) -> None:
        self.requests[Outcome.CANCELLED if metrics.is_cancelled else Outcome.COMPLETED] += 1
        self.prompt_tokens.update(_tokens_by_kind(metrics))
        self.num_generated_tokens += metrics.num_generated_tokens
        for module in metrics.modules:
            if module.hit_kind is not None:
                self.module_hits[module.hit_kind] += 1
                if module.miss_reason is not None:
                    self.qualified_hits[module.miss_reason] += 1
            elif module.miss_reason is not None:
                self.module_misses[module.miss_reason] += 1
        if metrics.saved_seconds is None:
            self.num_unknown_savings += 1
        else:
            self.saved_seconds += metrics.saved_seconds
            self.num_known_savings += 1
        self.ttft.add(metrics.ttft_seconds)
        self.tpot.add(metrics.tpot_seconds)


def _tokens_by_kind(metrics: RequestMetrics) -> dict[TokenKind, int]:
    return {
        TokenKind.STORED: metrics.num_cache_read_tokens - metrics.num_reused_tokens,
        TokenKind.REUSED: metrics.num_reused_tokens,
        TokenKind.ENCODED: metrics.num_cache_creation_tokens,
        TokenKind.REPAIRED: metrics.num_repaired_tokens,
        TokenKind.FRESH: metrics.num_fresh_tokens,
    }


class CacheStats:
    """Adds up requests; every method may be called from any thread.

    Memory is bounded: percentiles are over the latest ``max_samples`` requests of a group, and
    once ``max_groups`` pairs of template and tenant were seen, further ones are counted together
    under ``OTHER_TEMPLATES``.

    Args:
        max_samples: Latest durations kept for each group, for percentiles.
        max_groups: Pairs of template and tenant that are kept apart.

    Raises:
        ConfigError: A limit is below 1.
    """

    def __init__(self, *, max_samples: int = 512, max_groups: int = 64) -> None:
        check_limits("CacheStats", max_samples=max_samples, max_groups=max_groups)
        self._max_samples = max_samples
        self._max_groups = max_groups
        # Reentrant: the garbage collector may close an abandoned stream, whose request is then
        # recorded, on a thread that is in here.
        self._lock = threading.RLock()
        self._groups: dict[tuple[str, str], _Group] = {}

    def record(self, metrics: RequestMetrics) -> None:
        """Count a request that ended, once: completed, or cancelled by its consumer."""
        with self._lock:
            self._group(metrics.template, metrics.tenant).add(metrics)

    def record_cancelled(self, *, template: str = "", tenant: str = "") -> None:
        """Count a request that its consumer left before its metrics were known, once.

        For observers outside the engine; where there are metrics, ``record`` them.
        """
        self._count(Outcome.CANCELLED, template, tenant)

    def record_failure(self, *, template: str = "", tenant: str = "") -> None:
        """Count a request that ended with an error, once, and instead of ``record``.

        Its tokens and times are not counted: they would be those of half a request.
        """
        self._count(Outcome.FAILED, template, tenant)

    def _count(self, outcome: Outcome, template: str, tenant: str) -> None:
        with self._lock:
            self._group(template, tenant).requests[outcome] += 1

    def _group(self, template: str, tenant: str) -> _Group:
        key = (template, tenant)
        if key not in self._groups and len(self._groups) >= self._max_groups:
            key = (OTHER_TEMPLATES, "")
        if key not in self._groups:
            self._groups[key] = _Group(*key, max_samples=self._max_samples)
        return self._groups[key]

    def snapshot(self) -> StatsSnapshot:
        """The numbers now, as plain values that no later request changes."""
        with self._lock:
            groups = tuple(self._groups.values())
            return StatsSnapshot(
                total=_freeze(groups),
                groups=tuple(
                    _freeze((group,), template=group.template, tenant=group.tenant)
                    for group in groups
                ),
            )

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            self._groups.clear()


def _freeze(groups: tuple[_Group, ...], *, template: str = "", tenant: str = "") -> GroupStats:
    """The sum of ``groups`` as plain values, under the given labels."""
    return GroupStats(
        template=template,
        tenant=tenant,
        requests=_sum_counts(Outcome, (group.requests for group in groups)),
        prompt_tokens=_sum_counts(TokenKind, (group.prompt_tokens for group in groups)),
        num_generated_tokens=sum(group.num_generated_tokens for group in groups),
        module_hits=_sum_counts(HitKind, (group.module_hits for group in groups)),
        module_misses=_sum_counts(MissReason, (group.module_misses for group in groups)),
        qualified_hits=_sum_counts(MissReason, (group.qualified_hits for group in groups)),
        saved_seconds=sum(group.saved_seconds for group in groups),
        num_known_savings=sum(group.num_known_savings for group in groups),
        num_unknown_savings=sum(group.num_unknown_savings for group in groups),
        ttft=summarize([group.ttft for group in groups]),
        tpot=summarize([group.tpot for group in groups]),
    )


def _sum_counts(kinds: type[Kind], counts: Iterable[Counter[Kind]]) -> dict[Kind, int]:
    """Every kind with its sum, zeros included: a reader can tell "none" from "not counted"."""
    counts = tuple(counts)
    return {kind: sum(count[kind] for count in counts) for kind in kinds}
