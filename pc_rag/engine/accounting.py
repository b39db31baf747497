"""From a plan and where its entries came from to the metrics of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.layout.plan import Cached, Fresh, FreshKind, Reused
from pc_rag.metrics import ModuleUse, RequestMetrics
from pc_rag.types import HitKind, MissReason, ModuleKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pc_rag.engine.entry_source import Served
    from pc_rag.layout.plan import Part, RequestPlan
    from pc_rag.metrics import Stopwatch
    from pc_rag.types import FinishReason


@dataclass(slots=True)
class _Use:
    """The parts of one module at one place of a prompt, arguments left out."""

    label: str
    cached: list[Cached] = field(default_factory=list)
    fresh: list[Fresh | Reused] = field(default_factory=list)

    @property
    def is_uncached(self) -> bool:
        """Whether a part of it was computed because reuse is off."""
        return any(part.kind is FreshKind.UNCACHED for part in self.fresh)

    @property
    def is_text(self) -> bool:
        """Whether it is text of the request that is a part of a chunk."""
        return any(part.kind is FreshKind.PART for part in self.fresh)

    @property
    def is_unplaced(self) -> bool:
        """Whether a part of it was computed because no entry can stand there."""
        return any(part.kind is FreshKind.UNPLACED for part in self.fresh)

    @property
    def last(self) -> Part:
        """Its part that stands last in the prompt."""
        ends = [parts[-1] for parts in (self.cached, self.fresh) if parts]
        return max(ends, key=lambda part: part.span.start)

    @property
    def num_tokens(self) -> int:
        parts: list[Part] = [*self.cached, *self.fresh]
        return sum(len(part.token_ids) for part in parts)


def request_metrics(
    plan: RequestPlan,
    served: Mapping[ModuleKey, Served],
    *,
    remarks: Mapping[str, MissReason],
    watch: Stopwatch,
    finish_reason: FinishReason,
    num_generated_tokens: int,
    num_decode_steps: int,
    template: str,
    tenant: str,
    prefill_tokens_per_second: float | None = None,
) -> RequestMetrics:
    """The metrics of a request that ended.

    Args:
        plan: What was run; tokens reused by the exact prefix cache are reused parts.
        served: Where each entry came from; empty where the request ended before it asked for any.
        remarks: By label: why a hit is no better than it is.
        watch: The request's clock.
        finish_reason: Why it ended.
        num_generated_tokens: Tokens generated.
        num_decode_steps: Forward passes behind the prompt's.
        template: Label of the schema or corpus.
        tenant: The engine's tenant.
        prefill_tokens_per_second: The model's prefill rate, as far as the engine knows it.
    """
    num_repaired = plan.num_repaired_tokens
    return RequestMetrics(
        **watch.timings(),
        prompt_tokens=plan.num_tokens,
        num_cached_tokens=plan.num_cached_tokens,
        num_reused_tokens=sum(len(p.token_ids) for p in plan.parts if isinstance(p, Reused)),
        num_repaired_tokens=num_repaired,
        num_fresh_tokens=plan.num_tokens - plan.num_cached_tokens - num_repaired,
        num_generated_tokens=num_generated_tokens,
        num_decode_steps=num_decode_steps,
        modules=tuple(
            _module_use(use, served, remarks)
            for use in _occurrences(plan)
            if not use.cached or use.cached[0].key in served
        ),
        template=template,
        tenant=tenant,
        finish_reason=finish_reason,
        prefill_tokens_per_second=prefill_tokens_per_second,
    )


def _module_use(
    use: _Use,
    served: Mapping[ModuleKey, Served],
    remarks: Mapping[str, MissReason],
) -> ModuleUse:
    label, num_tokens = use.label, use.num_tokens
    if not use.cached:
        reason = MissReason.REUSE_OFF if use.is_uncached else MissReason.REPAIRED
        reason = MissReason.SPLIT if use.is_text else reason
        reason = MissReason.UNPLACED if use.is_unplaced else reason
        return ModuleUse(label=label, num_tokens=num_tokens, miss_reason=reason)
    first = use.cached[0]
    source = served[first.key]
    if source.tier is None:
        return ModuleUse(
            label=label,
            num_tokens=num_tokens,
            miss_reason=source.miss_reason or MissReason.NOT_STORED,
            num_encoded_tokens=sum(len(part.token_ids) for part in use.cached),
        )
    kinds = {part.hit_kind for part in use.cached}
    kind = kinds.pop() if len(kinds) == 1 else HitKind.COMPOSED
    return ModuleUse(
        label=label,
        num_tokens=num_tokens,
        hit_kind=kind,
        tier=source.tier,
        miss_reason=MissReason.SPLIT if kind is HitKind.PARTIAL else remarks.get(label),
    )


def _occurrences(plan: RequestPlan) -> Iterator[_Use]:
    """Group the parts that belong to one module at one place."""
    current: _Use | None = None
    for part in plan.parts:
        if not isinstance(part, Cached) and part.kind is FreshKind.ARGUMENT:
            continue  # stands inside the module around it
        label = _module_label(part)
        if current is not None and not (label and _goes_on(current, part)):
            yield current
            current = None
        if not label:
            continue
        current = current or _Use(label)
        if isinstance(part, Cached):
            current.cached.append(part)
        else:
            current.fresh.append(part)
    if current is not None:
        yield current


def _module_label(part: Part) -> str:
    """The module that a part was stored as; empty for the request's own text."""
    if not isinstance(part, Cached) and part.kind is FreshKind.TEXT:
        return ""
    return part.label


def _goes_on(current: _Use, part: Part) -> bool:
    """Whether a labelled part belongs to the module that the parts before it began.

    A module's parts stand for rows of one entry, used once: its repaired first tokens, its rows
    (cached, or computed because reuse is off), what stands behind its arguments, and perhaps the
    very last token of the prompt. Text that is a part of a chunk has no entry; the exact prefix
    cache may hold its first tokens.
    """
    before = current.last
    if part.label != current.label or part.occurrence != before.occurrence:
        return False
    is_rest = isinstance(part, Fresh) and isinstance(before, Reused) and part.kind is before.kind
    return part.occurrence is not None or is_rest
