"""What callbacks tell of runs is counted once, by hits and by times."""

from __future__ import annotations

import threading

import pytest

from pc_rag.errors import ConfigError
from pc_rag.metrics import Outcome
from pc_rag.serving.runs import (
    RETRIEVER,
    CacheHitRuns,
    CallOutcome,
    DocumentOutcome,
    FoundDocument,
    Told,
    TTFTRuns,
)
from pc_rag.types import FinishReason
from tests.support.metrics import FakeClock
from tests.support.uses import TEXTS, metrics_of, use_of

OSLO, LIMA, ROME = TEXTS


def _hits(**settings):
    return CacheHitRuns(owner="Handler", carrier="raw", **settings)


def _requests(runs):
    return {each: count for each, count in runs.snapshot().total.requests.items() if count}


def test_documents_are_the_outer_retrievers_when_retrievers_nest():
    """What an inner retriever found is no document before the outer chose it."""
    runs = _hits()
    runs.start_run("query", None)
    runs.start_run("outer", "query", mark=RETRIEVER)
    runs.start_run("inner", "outer", mark=RETRIEVER)
    runs.add_retrieved("inner", [FoundDocument(text, text[:4]) for text in TEXTS])
    runs.end_run("inner")
    runs.add_retrieved("outer", [FoundDocument(OSLO, "Oslo")])
    runs.end_run("outer")
    runs.start_call("call", "query", [f"From: {OSLO}"])
    runs.end_call("call", CallOutcome.REPORTED, metrics_of(use_of(OSLO)))
    runs.end_run("query")
    (document,) = runs.last_run.documents
    assert (document.source, document.outcome) == ("Oslo", DocumentOutcome.HIT)


@pytest.mark.parametrize(
    ("outcome", "metrics", "requests"),
    [
        (CallOutcome.REPORTED, (metrics_of(),), {Outcome.COMPLETED: 1}),
        (CallOutcome.REPORTED, (metrics_of(), metrics_of()), {Outcome.COMPLETED: 2}),
        (
            CallOutcome.CANCELLED,
            (metrics_of(finish_reason=FinishReason.CANCELLED),),
            {Outcome.CANCELLED: 1},
        ),
        (CallOutcome.CANCELLED, (), {Outcome.CANCELLED: 1}),
        (CallOutcome.FAILED, (), {Outcome.FAILED: 1}),
        (CallOutcome.UNREPORTED, (), {}),
        (CallOutcome.REPLAYED, (), {}),
    ],
)
def test_request_is_counted_once_when_a_call_ends(outcome, metrics, requests):
    """Sums and calls agree, whether metrics came or not; a second end changes nothing more."""
    runs = _hits()
    runs.start_call("call", None, ["?"])
    runs.end_call("call", outcome, *metrics)
    assert _requests(runs) == requests
    assert runs.calls[outcome] == runs.last_run.calls[outcome] == max(1, len(metrics))
    assert runs.num_open_runs == 0


@pytest.mark.parametrize(
    ("plain", "outcome"),
    [
        (metrics_of().to_dict(), CallOutcome.REPORTED),
        ({"prompt_tokens": "many"}, CallOutcome.UNREADABLE),
        (None, CallOutcome.UNREPORTED),
    ],
)
def test_outcome_is_read_from_the_response_when_a_call_ends(plain, outcome):
    """Metrics, malformed metrics and none are told apart."""
    runs = _hits()
    runs.start_call("call", None, ["?"])
    runs.end_call_with("call", plain)
    assert {each for each, count in runs.calls.items() if count} == {outcome}


def test_late_metrics_explain_the_run_when_its_call_was_counted():
    """They change no sum: the request stands there already."""
    runs = _hits()
    record = runs.start_call("call", None, ["?"])
    runs.end_call("call", CallOutcome.CANCELLED)
    runs.add_late_metrics(record, metrics_of(use_of(OSLO)))
    assert _requests(runs) == {Outcome.CANCELLED: 1}
    assert runs.last_run.num_module_hits == 1
    assert runs.snapshot().total.num_cache_read_tokens == 0


def test_runs_are_settled_when_they_are_read():
    """Runs that turn out to have ended are finished by whoever looks."""
    ended = []

    def take_ended():
        taken = list(ended)
        ended.clear()
        return taken

    runs = _hits(is_patient=True, take_ended=take_ended)
    runs.start_run("query", None)
    runs.start_call("call", "query", ["?"])
    runs.end_call("call", CallOutcome.UNREPORTED)
    assert runs.runs == ()
    ended.append("query")
    assert [run.run_id for run in runs.runs] == ["query"]


def test_time_is_that_of_the_last_token_when_the_end_is_found_late():
    """Nobody waited for a model while nobody looked."""
    clock, ended = FakeClock(), []
    runs = TTFTRuns(
        owner="Handler", read_clock=clock, is_patient=True, take_ended=lambda: ended[:1]
    )
    runs.start_run("query", None)
    clock.advance(1.0)
    runs.start_call("call", "query", "model")
    clock.advance(1.0)
    runs.see_token("call")
    runs.end_call("call", Outcome.COMPLETED, Told())
    clock.advance(50.0)
    ended.append("query")
    assert (runs.last_run.total_seconds, runs.last_run.ttft_seconds) == (2.0, 2.0)


def test_empty_runs_leave_no_report_when_they_are_not_kept():
    """What neither asked nor retrieved is no run that anybody looks for."""
    hits, times = _hits(keeps_empty=False), TTFTRuns(owner="Handler", keeps_empty=False)
    for runs in (hits, times):
        runs.start_run("embedding", None)
        runs.end_run("embedding")
        assert runs.last_run is None
    hits.start_run("retriever", None, mark=RETRIEVER)
    hits.add_retrieved("retriever", [])
    hits.end_run("retriever")
    assert hits.last_run.run_id == "retriever"


def test_sums_are_waited_for_outside_the_lock_when_a_call_ends(monkeypatch):
    """A stream that is collected inside the sums comes from there to us: nobody goes both ways."""
    times, is_there, may_go = TTFTRuns(owner="Handler"), threading.Event(), threading.Event()
    record = times._stats.record

    def wait(call):
        is_there.set()
        may_go.wait(20)
        record(call)

    monkeypatch.setattr(times._stats, "record", wait)
    times.start_call("call", None, "model")
    ending = threading.Thread(target=times.end_call, args=("call", Outcome.COMPLETED, Told()))
    ending.start()
    assert is_there.wait(20)
    try:
        assert times._lock.acquire(timeout=5)
        times._lock.release()
    finally:
        may_go.set()
        ending.join(20)
    assert times.snapshot()[0].num_calls == 1


def test_limit_is_refused_when_below_one():
    """The message names the handler that was given it."""
    with pytest.raises(ConfigError, match="Handler: max_runs is 0"):
        _hits(max_runs=0)
    with pytest.raises(ConfigError, match="Handler: max_runs is 0"):
        TTFTRuns(owner="Handler", max_runs=0)
