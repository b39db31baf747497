"""The handler for a ``CallbackManager`` tells what the event handler tells."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core import Settings
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import MockLLM
from llama_index.llms.pc_rag import (
    CallOutcome,
    DocumentOutcome,
    PcRagLLM,
    PromptCacheCallbackHandler,
)

from pc_rag.errors import ConfigError
from pc_rag.metrics import Outcome
from pc_rag.types import MissReason
from tests.support.corpora import CAT, DOG, opened
from tests.support.llama_index_queries import (
    SpeakingLLM,
    answer_of,
    ask,
    engine_of,
    nodes_of,
)
from tests.support.uses import TEXTS, metrics_of, use_of

OSLO, LIMA, ROME = TEXTS
METRICS = metrics_of(use_of(OSLO), use_of(LIMA, MissReason.NOT_STORED))


@pytest.fixture
def handler():
    return PromptCacheCallbackHandler()


@pytest.fixture
def manager(handler):
    return CallbackManager([handler])


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add([CAT, DOG])
        yield corpus


def fates(run):
    return {each.source: each.outcome for each in run.documents}


def counts(handler):
    return {outcome: count for outcome, count in handler.calls.items() if count}


@pytest.mark.parametrize("streaming", [False, True])
def test_query_is_one_run_when_it_retrieved_and_asked(handler, manager, streaming):
    """Nodes have their outcomes, also where the stream is read behind the query's end."""
    llm = SpeakingLLM(reported=METRICS)
    engine = engine_of(llm, callback_manager=manager, streaming=streaming)
    assert answer_of(engine.query("?")) == "Norway."
    (run,) = handler.runs
    assert run.run_id.startswith("query-")
    assert fates(run) == {
        "Oslo": DocumentOutcome.HIT,
        "Lima": DocumentOutcome.MISS,
        "Rome": DocumentOutcome.NOT_INDEXED,
    }
    assert counts(handler) == {CallOutcome.REPORTED: 1}
    assert handler.snapshot().total.num_cache_read_tokens == 10
    assert "Lima: miss (not-stored)" in handler.report()
    assert json.loads(json.dumps(handler.to_dict())) == handler.to_dict()
    assert handler.num_open_runs == 0


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_hits_are_the_engines_when_our_model_answers(
    handler, manager, corpus, streaming, is_async
):
    """Our own model sends one event a call, with its metrics."""
    llm = PcRagLLM(corpus=corpus, max_tokens=4)
    nodes = nodes_of(CAT, DOG)
    engine = engine_of(llm, nodes, callback_manager=manager, streaming=streaming)
    await ask(engine, is_async=is_async)
    counted = corpus.engine.stats.snapshot().total
    assert counts(handler) == {CallOutcome.REPORTED: 1}
    assert handler.snapshot().total.num_cache_read_tokens == counted.num_cache_read_tokens > 0
    (run,) = handler.runs
    assert set(fates(run).values()) == {DocumentOutcome.HIT}


def test_query_is_found_when_the_manager_is_the_settings(handler, manager, monkeypatch):
    """The one line that the documentation names."""
    monkeypatch.setattr(Settings, "_callback_manager", manager)
    engine_of(SpeakingLLM(reported=METRICS)).query("?")
    assert counts(handler) == {CallOutcome.REPORTED: 1}
    assert handler.last_run.num_documents_hit == 1


def test_call_is_unreported_when_another_model_answers(handler, manager):
    """Another model brings no metrics."""
    engine_of(MockLLM(max_tokens=2), callback_manager=manager).query("?")
    assert counts(handler) == {CallOutcome.UNREPORTED: 1}
    assert 'does not pass on raw["pc_rag"]' in handler.report()


def test_call_is_unreadable_when_metrics_are_malformed(handler, manager):
    """Malformed metrics are told, and are no zero hits."""
    engine_of(SpeakingLLM(reported={"prompt_tokens": 1}), callback_manager=manager).query("?")
    assert counts(handler) == {CallOutcome.UNREADABLE: 1}


def test_request_is_cancelled_once_when_the_consumer_leaves(handler, manager):
    """A stream closed early is one cancelled request (pitfall 26)."""
    engine = engine_of(SpeakingLLM(reported=METRICS), callback_manager=manager, streaming=True)
    response = engine.query("?")
    next(response.response_gen)
    response.response_gen.close()
    gc.collect()
    assert counts(handler) == {CallOutcome.CANCELLED: 1}
    assert handler.snapshot().total.requests[Outcome.CANCELLED] == 1
    assert len(handler.runs) == 1
    assert handler.num_open_runs == 0


@pytest.mark.parametrize("streaming", [False, True])
def test_request_is_failed_once_when_the_model_raises(handler, manager, streaming):
    """An error counts once."""
    engine = engine_of(SpeakingLLM(fails_at=1), callback_manager=manager, streaming=streaming)
    with pytest.raises(ZeroDivisionError):
        answer_of(engine.query("?"))
    assert counts(handler) == {CallOutcome.FAILED: 1}
    assert len(handler.runs) == 1
    assert handler.num_open_runs == 0


def test_stream_belongs_to_its_query_when_it_is_read_in_another_trace(handler, manager):
    """Whoever reads a stream, its call is the query's."""
    engine = engine_of(SpeakingLLM(reported=METRICS), callback_manager=manager, streaming=True)
    response = engine.query("?")
    with manager.as_trace("reading"):
        answer_of(response)
    (run,) = handler.runs
    assert run.run_id.startswith("query-")
    assert (run.num_documents_hit, run.calls[CallOutcome.REPORTED]) == (1, 1)


def test_model_is_its_own_run_when_it_is_called_alone(handler, manager):
    """A model with the manager needs no query around it."""
    SpeakingLLM(reported=METRICS, callback_manager=manager).complete("?")
    assert handler.last_run.run_id.startswith("completion-")
    assert handler.last_run.num_module_hits == 1
    assert handler.last_run.num_documents == 0


def test_runs_stay_apart_when_queries_run_in_threads(handler, manager):
    """Each query has its own nodes and hits, whichever threads interleave."""
    engines = [
        engine_of(
            SpeakingLLM(reported=metrics_of(use_of(text))),
            nodes_of(text),
            callback_manager=manager,
            streaming=odd,
        )
        for text in TEXTS
        for odd in (False, True)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda engine: answer_of(engine.query("?")), engines * 2))
    assert counts(handler) == {CallOutcome.REPORTED: 12}
    assert len(handler.runs) == 12
    for run in handler.runs:
        assert [each.outcome for each in run.documents] == [DocumentOutcome.HIT]


def test_limit_is_refused_when_below_one():
    """A handler that keeps no run has nothing to report."""
    with pytest.raises(ConfigError, match="max_runs is 0"):
        PromptCacheCallbackHandler(max_runs=0)
