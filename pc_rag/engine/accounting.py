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
class _Occurrence:
    """The parts of one module at one place of a prompt."""

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
            _module_use(occurrence, served, remarks)
            for occurrence in _occurrences(plan)
            if not occurrence.cached or occurrence.cached[0].key in served
        ),
        template=template,
        tenant=tenant,
        finish_reason=finish_reason,
        prefill_tokens_per_second=prefill_tokens_per_second,
    )


def _module_use(
    occurrence: _Occurrence,
    served: Mapping[ModuleKey, Served],
    remarks: Mapping[str, MissReason],
) -> ModuleUse:
    label, num_tokens = occurrence.label, occurrence.num_tokens
    if not occurrence.cached:
        reason = MissReason.REUSE_OFF if occurrence.is_uncached else MissReason.REPAIRED
        reason = MissReason.SPLIT if occurrence.is_text else reason
        return ModuleUse(label=label, num_tokens=num_tokens, miss_reason=reason)
    first = occurrence.cached[0]
    source = served[first.key]
    if source.tier is None:
        return ModuleUse(
            label=label,
            num_tokens=num_tokens,
            miss_reason=source.miss_reason or MissReason.NOT_STORED,
            num_encoded_tokens=sum(len(part.token_ids) for part in occurrence.cached),
        )
    kinds = {part.hit_kind for part in occurrence.cached}
    kind = kinds.pop() if len(kinds) == 1 else HitKind.COMPOSED
    return ModuleUse(
        label=label,
        num_tokens=num_tokens,
        hit_kind=kind,
        tier=source.tier,
        miss_reason=MissReason.SPLIT if kind is HitKind.PARTIAL else remarks.get(label),
    )


def _occurrences(plan: RequestPlan) -> Iterator[_Occurrence]:
    """Group the parts that belong to one module at one place."""
    current: _Occurrence | None = None
    for part in plan.parts:
        label = _module_label(part)
        if not label:
            if current is not None:
                yield current
            current = None
            continue
        if current is not None and _starts_anew(current, part, is_last=part is plan.parts[-1]):
            yield current
            current = None
        current = current or _Occurrence(label)
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


def _starts_anew(current: _Occurrence, part: Part, *, is_last: bool) -> bool:
    """Whether a labelled part opens another occurrence.

    One occurrence is its repaired first tokens, its rows (cached, or computed because reuse is
    off), and perhaps the very last token of the prompt, recomputed for its logits. Text that is a
    part of a chunk is one of its own, of which the exact prefix cache may hold the first tokens.
    """
    if part.label != current.label:
        return True
    is_text = not isinstance(part, Cached) and part.kind is FreshKind.PART
    if is_text is not current.is_text:
        return True
    if isinstance(part, Cached):
        return bool(current.cached) and part.rows.start <= current.cached[-1].rows.start
    if part.kind is FreshKind.UNCACHED:
        return current.is_uncached
    before = current.fresh[-1] if current.fresh else None
    is_rest = isinstance(part, Fresh) and isinstance(before, Reused)
    if is_text:
        return not is_rest
    # One repaired from its first token to its last has no rows: the next part is of another one.
    has_rows = bool(current.cached) or current.is_uncached
    return not is_last and (has_rows or not is_rest)
