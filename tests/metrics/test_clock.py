"""Every second before the first token belongs to one phase, or to none."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.errors import PromptCacheError
from pc_rag.metrics import Phase, RequestMetrics, Stopwatch
from pc_rag.types import FinishReason, Tier
from tests.support.metrics import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def stopwatch(clock):
    return Stopwatch(read_clock=clock)


def test_time_goes_to_its_phase_when_phases_follow_each_other(stopwatch, clock):
    """Each phase gets what passed inside it; time between phases goes to none."""
    with stopwatch.measure(Phase.PLAN):
        clock.advance(1)
    clock.advance(2)
    for _ in range(2):
        with stopwatch.measure(Phase.PREFILL):
            clock.advance(4)
    assert stopwatch.seconds(Phase.PLAN) == 1
    assert stopwatch.seconds(Phase.PREFILL) == 8
    stopwatch.mark_first_token()
    assert stopwatch.ttft_seconds == 11


def test_outer_phase_pauses_when_another_starts_inside(stopwatch, clock):
    """No second is counted twice."""
    with stopwatch.measure(Phase.PLAN):
        clock.advance(1)
        with stopwatch.measure(Phase.LOOKUP):
            clock.advance(2)
        clock.advance(4)
    assert stopwatch.seconds(Phase.PLAN) == 5
    assert stopwatch.seconds(Phase.LOOKUP) == 2


def test_phase_is_charged_when_its_body_raises(stopwatch, clock):
    """A failure does not lose its time, nor leave the phase running."""

    def fail() -> None:
        clock.advance(3)
        raise KeyError

    with pytest.raises(KeyError), stopwatch.measure(Phase.ENCODE):
        fail()
    clock.advance(5)
    with stopwatch.measure(Phase.PLAN):
        clock.advance(1)
    assert stopwatch.seconds(Phase.ENCODE) == 3
    assert stopwatch.seconds(Phase.PLAN) == 1


def test_load_is_taken_out_of_its_phase_when_the_store_measured_it(stopwatch, clock):
    """Loading is told apart by tier and not counted as assembling too."""
    with stopwatch.measure(Phase.ASSEMBLE):
        clock.advance(10)
        stopwatch.charge_load(Tier.DISK, 6)
        stopwatch.charge_load(Tier.HOST, 1)
        clock.advance(1)
        stopwatch.charge_load(Tier.DISK, 0.5)
    timings = stopwatch.timings()
    assert timings["load_seconds"] == {Tier.DISK: 6.5, Tier.HOST: 1}
    assert timings["assemble_seconds"] == 3.5


def test_load_is_cut_to_its_phase_when_loads_ran_side_by_side(stopwatch, clock):
    """Two loads of 4 s that overlapped in 5 s are 5 s of the request."""
    with stopwatch.measure(Phase.ASSEMBLE):
        clock.advance(5)
        stopwatch.charge_load(Tier.DISK, 4)
        stopwatch.charge_load(Tier.DISK, 4)
    assert stopwatch.timings()["load_seconds"] == {Tier.DISK: 5}
    assert stopwatch.seconds(Phase.ASSEMBLE) == 0


def test_load_is_refused_when_no_phase_waited_for_it(stopwatch):
    """A time outside every phase has nothing to be taken from."""
    with pytest.raises(PromptCacheError, match="belong to no phase"):
        stopwatch.charge_load(Tier.DISK, 1)


def test_ttft_stays_when_the_first_token_is_marked_again(stopwatch, clock):
    """Only the first token counts."""
    assert stopwatch.ttft_seconds is None
    clock.advance(2)
    stopwatch.mark_first_token()
    clock.advance(2)
    stopwatch.mark_first_token()
    assert stopwatch.ttft_seconds == 2


def test_device_is_waited_for_when_synchronising_was_asked(clock):
    """Work that the device still does at the end of a phase counts in that phase."""
    pending = []

    def synchronize() -> None:
        clock.advance(sum(pending))
        pending.clear()

    stopwatch = Stopwatch(synchronize=synchronize, read_clock=clock)
    with stopwatch.measure(Phase.PREFILL):
        pending.append(7)
    with stopwatch.measure(Phase.FIRST_TOKEN):
        clock.advance(1)
    assert stopwatch.seconds(Phase.PREFILL) == 7
    assert stopwatch.seconds(Phase.FIRST_TOKEN) == 1


def test_clock_is_monotonic_and_real_when_none_is_given():
    """The default clock measures real time."""
    stopwatch = Stopwatch()
    with stopwatch.measure(Phase.PLAN):
        time.sleep(0.01)
    stopwatch.mark_first_token()
    assert 0.009 < stopwatch.seconds(Phase.PLAN) <= stopwatch.ttft_seconds < 5


_TREES = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 9), inner), max_size=4),
    max_leaves=12,
)


@given(tree=_TREES)
def test_parts_never_exceed_ttft_when_phases_nest_in_any_way(tree):
    """Whatever nests in whatever, every second is charged exactly once."""
    clock = FakeClock()
    stopwatch = Stopwatch(read_clock=clock)

    def run(branches) -> None:
        for phase, seconds, inner in branches:
            with stopwatch.measure(phase):
                clock.advance(seconds)
                run(inner)
                clock.advance(seconds)

    run(tree)
    stopwatch.mark_first_token()
    assert sum(map(stopwatch.seconds, Phase)) == stopwatch.ttft_seconds


def test_timings_fill_request_metrics_when_passed_as_arguments(stopwatch, clock):
    """A stopwatch's numbers are the timing fields of a request, all of them."""
    for number, phase in enumerate(Phase, start=1):
        with stopwatch.measure(phase):
            clock.advance(number)
    stopwatch.mark_first_token()
    metrics = RequestMetrics(
        **stopwatch.timings(),
        prompt_tokens=1,
        num_cached_tokens=0,
        num_fresh_tokens=1,
        finish_reason=FinishReason.STOP,
    )
    measured = {phase: getattr(metrics, f"{phase}_seconds") for phase in Phase}
    assert measured == {phase: number for number, phase in enumerate(Phase, start=1)}
    assert metrics.ttft_seconds == sum(measured.values())
