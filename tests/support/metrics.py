"""Requests' numbers made by hand."""

from __future__ import annotations

from pc_rag.metrics import ModuleUse, RequestMetrics
from pc_rag.types import FinishReason, HitKind, MissReason, Tier


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


HIT = ModuleUse(label="rome", num_tokens=60, hit_kind=HitKind.EXACT, tier=Tier.HOST)
MOVED = ModuleUse(
    label="oslo",
    num_tokens=20,
    hit_kind=HitKind.COMPOSED,
    tier=Tier.DISK,
    miss_reason=MissReason.OTHER_PREFIX,
)
ENCODED = ModuleUse(
    label="lima", num_tokens=40, miss_reason=MissReason.NOT_STORED, num_encoded_tokens=35
)


def request_metrics(**changes) -> RequestMetrics:
    """150 tokens: 55 read from entries, 10 reused, 35 encoded, 20 repaired, 30 fresh."""
    values = {
        "prompt_tokens": 150,
        "num_cached_tokens": 100,
        "num_reused_tokens": 10,
        "num_repaired_tokens": 20,
        "num_fresh_tokens": 30,
        "num_generated_tokens": 5,
        "ttft_seconds": 1.0,
        "plan_seconds": 0.01,
        "lookup_seconds": 0.02,
        "load_seconds": {Tier.HOST: 0.03, Tier.DISK: 0.04},
        "encode_seconds": 0.2,
        "assemble_seconds": 0.05,
        "prefill_seconds": 0.5,
        "first_token_seconds": 0.1,
        "decode_seconds": 0.4,
        "modules": (HIT, MOVED, ENCODED),
        "template": "travel",
        "tenant": "acme",
        "finish_reason": FinishReason.STOP,
    }
    return RequestMetrics(**(values | changes))


def uncached_metrics(**changes) -> RequestMetrics:
    """The uncached arm of the same prompt: every token fresh, every module a miss."""
    modules = tuple(
        ModuleUse(label=use.label, num_tokens=use.num_tokens, miss_reason=MissReason.REUSE_OFF)
        for use in (HIT, MOVED, ENCODED)
    )
    values = {
        "num_cached_tokens": 0,
        "num_reused_tokens": 0,
        "num_repaired_tokens": 0,
        "num_fresh_tokens": 150,
        "load_seconds": {},
        "encode_seconds": 0.0,
        "modules": modules,
    }
    return request_metrics(**(values | changes))
