"""Requests for chunks whose texts are known, as models report them."""

from __future__ import annotations

from typing import Any

from pc_rag.corpus import chunk_id_of
from pc_rag.metrics import ModuleUse, RequestMetrics
from pc_rag.types import FinishReason, HitKind, MissReason, Tier

TEXTS = ("Oslo lies in Norway.", "Lima lies in Peru.", "Rome lies in Italy.")
RATE = 1000.0


def use_of(
    text: str, miss_reason: MissReason | None = None, *, hit_kind: HitKind = HitKind.EXACT
) -> ModuleUse:
    """A chunk of ten tokens that was hit, or missed and computed."""
    label = chunk_id_of(text)
    if miss_reason is None:
        return ModuleUse(label=label, num_tokens=10, hit_kind=hit_kind, tier=Tier.HOST)
    return ModuleUse(label=label, num_tokens=10, miss_reason=miss_reason)


def metrics_of(*modules: ModuleUse, rate: float | None = RATE, **changes: Any) -> RequestMetrics:
    """A request of these modules and of twenty tokens of its own."""
    read = sum(use.num_tokens for use in modules if use.is_hit)
    total = sum(use.num_tokens for use in modules) + 20
    values = {
        "prompt_tokens": total,
        "num_cached_tokens": read,
        "num_fresh_tokens": total - read,
        "num_generated_tokens": 3,
        "ttft_seconds": 0.25,
        "lookup_seconds": 0.002,
        "modules": modules,
        "template": "travel",
        "finish_reason": FinishReason.STOP,
        "prefill_tokens_per_second": rate,
    }
    return RequestMetrics(**(values | changes))
