"""The clock of one request: which phase each second before the first token went to."""

from __future__ import annotations

import time
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, TypedDict

from pc_rag.errors import PromptCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pc_rag.types import Tier


class Phase(StrEnum):
    """What a request spends its time on, loading apart: see ``Stopwatch.charge_load``."""

    RETRIEVE = "retrieve"
    """Embedding the question and searching the corpus."""
    PLAN = "plan"
    """Text or PML to a plan."""
    LOOKUP = "lookup"
    """Asking the store which entries it holds."""
    ENCODE = "encode"
    """Encoding modules that the store missed."""
    ASSEMBLE = "assemble"
    """Filling the request's buffer."""
    PREFILL = "prefill"
    """The forward pass over the fresh tokens."""
    FIRST_TOKEN = "first_token"  # noqa: S105 - a phase, no secret
    """Sampling the first token and turning it into text."""
    DECODE = "decode"
    """Every token behind the first."""


class Timings(TypedDict):
    """What a stopwatch measured, as keyword arguments of ``RequestMetrics``."""

    ttft_seconds: float | None
    retrieve_seconds: float
    plan_seconds: float
    lookup_seconds: float
    load_seconds: Mapping[Tier, float]
    encode_seconds: float
    assemble_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    held_back_seconds: float


class Stopwatch:
    """Measures one request from its construction on, on a monotonic clock.

    Phases are disjoint: a phase that starts inside another stops the outer one's clock until it
    ends. So the parts never add up to more than the whole:

        plan     |####|    |######|
        lookup        |####|              plan = 10, lookup = 4

    One request owns one stopwatch. It holds nothing that belongs to a thread, so a stream may be
    pulled from several threads, one after the other.

    Args:
        synchronize: Waits for the device; called before every timestamp. Without it, work that
            the device still does when a phase ends is counted in the phase that waits for it.
        read_clock: Seconds on a monotonic clock.
    """

    def __init__(
        self,
        *,
        synchronize: Callable[[], None] | None = None,
        read_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._synchronize = synchronize
        self._read_clock = read_clock
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._load_seconds: dict[Tier, float] = {}
        self._open: list[Phase] = []
        self._ttft_seconds: float | None = None
        self._held_back_seconds = 0.0
        self._started = self._lap_started = self._now()

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return self._read_clock()

    @property
    def ttft_seconds(self) -> float | None:
        """From the start to the first token; ``None`` before it."""
        return self._ttft_seconds

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Charge the time inside to ``phase``, also when the body raises.

        Do not hold it over a ``yield``: the consumer's time would be charged.
        """
        self._end_lap()
        self._open.append(phase)
        try:
            yield
        finally:
            self._end_lap()
            self._open.pop()

    def _end_lap(self) -> None:
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._lap_started
        self._lap_started = now

    def charge_load(self, tier: Tier, seconds: float) -> None:
        """Move ``seconds`` of the running phase to loading from ``tier``.

        For times that the store measures, such as ``Lease.load_seconds``. Loads that ran side by
        side may add up to more than the phase took; then only the phase's own time is moved, so
        that the parts stay within the whole.

        Raises:
            PromptCacheError: No phase is running.
        """
        if not self._open:
            raise PromptCacheError(
                f"{seconds} s of loading from tier {tier} belong to no phase; call charge_load "
                "inside the phase that waited for the load"
            )
        self._end_lap()
        moved = min(seconds, self._seconds[self._open[-1]])
        self._seconds[self._open[-1]] -= moved
        self._load_seconds[tier] = self._load_seconds.get(tier, 0.0) + moved

    def mark_first_token(self) -> None:
        """The first token is in the caller's hands. Later calls change nothing."""
        if self._ttft_seconds is None:
            self._ttft_seconds = self._now() - self._started
            self._held_back_seconds = self._seconds[Phase.DECODE]

    def seconds(self, phase: Phase) -> float:
        """Time charged to ``phase`` so far, the running lap not included."""
        return self._seconds[phase]

    def timings(self) -> Timings:
        """Everything measured so far."""
        return Timings(
            ttft_seconds=self._ttft_seconds,
            retrieve_seconds=self._seconds[Phase.RETRIEVE],
            plan_seconds=self._seconds[Phase.PLAN],
            lookup_seconds=self._seconds[Phase.LOOKUP],
            load_seconds=dict(self._load_seconds),
            encode_seconds=self._seconds[Phase.ENCODE],
            assemble_seconds=self._seconds[Phase.ASSEMBLE],
            prefill_seconds=self._seconds[Phase.PREFILL],
            first_token_seconds=self._seconds[Phase.FIRST_TOKEN],
            decode_seconds=self._seconds[Phase.DECODE],
            held_back_seconds=self._held_back_seconds,
        )
