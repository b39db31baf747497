"""Calls of any model are summed by model, in bounded memory."""

from __future__ import annotations

import pytest

from pc_rag.errors import ConfigError
from pc_rag.metrics.speed import OTHER_MODELS, CallTimes, SpeedStats, speed_text
from pc_rag.metrics.stats import Outcome


def call(**changes):
    values = {
        "model": "m",
        "outcome": Outcome.COMPLETED,
        "total_seconds": 4.0,
        "ttft_seconds": 2.0,
        "root_ttft_seconds": 3.0,
        "decode_seconds": 1.0,
        "num_output_tokens": 3,
        "is_streamed": True,
    }
    return CallTimes(**(values | changes))


def summed(*calls, **options):
    stats = SpeedStats(**options)
    for each in calls:
        stats.record(each)
    return stats.snapshot()


def test_times_are_summed_by_model_when_recorded():
    """Each model has its own percentiles and its own throughput."""
    slow, fast = summed(call(), call(ttft_seconds=6.0), call(model="f", num_output_tokens=9))
    assert (slow.model, slow.num_calls, slow.num_streamed) == ("m", 2, 2)
    assert (slow.ttft.p50_seconds, slow.ttft.p95_seconds) == (2.0, 6.0)
    assert slow.root_ttft.p50_seconds == 3.0
    assert slow.tpot.p50_seconds == 0.5
    assert slow.tokens_per_second == 6 / 8
    assert fast.tpot.p50_seconds == 1 / 8
    assert fast.to_dict()["num_calls"] == 1


@pytest.mark.parametrize(
    "changes", [{"decode_seconds": None}, {"num_output_tokens": None}, {"num_output_tokens": 1}]
)
def test_tpot_is_unknown_when_there_was_nothing_behind_the_first_token(changes):
    """One token, or tokens nobody saw, take no time each."""
    assert call(**changes).tpot_seconds is None


def test_failed_calls_are_counted_and_not_timed():
    """A cancelled call's first token was seen; a failed call's times are of half a call."""
    (model,) = summed(
        call(outcome=Outcome.FAILED), call(outcome=Outcome.CANCELLED, ttft_seconds=5.0)
    )
    assert model.calls == {Outcome.COMPLETED: 0, Outcome.CANCELLED: 1, Outcome.FAILED: 1}
    assert model.ttft.p50_seconds == 5.0
    assert model.total.count == 0


def test_throughput_is_unknown_when_no_call_counted_its_tokens():
    """No count is not a speed of zero."""
    (model,) = summed(call(num_output_tokens=None))
    assert model.tokens_per_second is None


def test_further_models_are_counted_together_when_there_are_too_many():
    """Names cannot grow memory without bound, and no call is lost."""
    models = summed(*[call(model=f"m{number}") for number in range(5)], max_models=2)
    assert {each.model: each.num_calls for each in models} == {"m0": 1, "m1": 1, OTHER_MODELS: 3}


def test_everything_is_forgotten_when_reset():
    """Counting starts anew."""
    stats = SpeedStats()
    stats.record(call())
    stats.reset()
    assert stats.snapshot() == ()


@pytest.mark.parametrize("limits", [{"max_samples": 0}, {"max_models": 0}])
def test_limits_are_refused_when_below_one(limits):
    """A limit of nothing keeps nothing to report."""
    with pytest.raises(ConfigError, match="is 0; it must be at least 1"):
        SpeedStats(**limits)


def test_text_explains_when_something_is_missing():
    """A dash has its reason below the table."""
    unseen = {"ttft_seconds": None, "root_ttft_seconds": None, "decode_seconds": None}
    text = speed_text(summed(call(**unseen, is_streamed=False), call(outcome=Outcome.FAILED)))
    assert "m: 1 failed, 0 cancelled" in text
    assert "m: no first token was seen: its calls did not stream" in text
    assert speed_text(()) == "no model was called"
