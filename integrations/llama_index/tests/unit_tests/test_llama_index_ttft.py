"""Times of any LLM's calls are what their caller saw, each call once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ToolCallBlock,
)
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.llms.pc_rag import TTFTEventHandler
from llama_index_instrumentation import get_dispatcher

from pc_rag.errors import ConfigError
from pc_rag.metrics import Outcome
from tests.support.llama_index_queries import SpeakingLLM, answer_of, ask, engine_of
from tests.support.metrics import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def handler(clock):
    with TTFTEventHandler(read_clock=clock) as handler:
        yield handler


class SlowReranker(BaseNodePostprocessor):
    """Takes two seconds between retrieval and the call."""

    clock: Any

    def _postprocess_nodes(self, nodes, query_bundle=None):
        self.clock.advance(2.0)
        return nodes


def slow(engine, clock):
    """The engine, with two seconds before its model is asked."""
    engine._node_postprocessors = [SlowReranker(clock=clock)]
    return engine


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_times_are_the_callers_when_a_query_streams(handler, clock, is_chat, is_async):
    """From the call's start, and from the query's with retrieval in it (pitfalls 29, 32)."""
    engine = slow(engine_of(SpeakingLLM(is_chat=is_chat, clock=clock), streaming=True), clock)
    assert await ask(engine, is_async=is_async) == "Norway."
    clock.advance(50.0)  # nobody looks for a while
    (run,) = handler.runs
    (call,) = run.calls
    assert call.outcome is Outcome.COMPLETED
    assert call.is_streamed
    assert call.model == "speaker"
    assert (call.ttft_seconds, call.root_ttft_seconds) == (1.0, 3.0)
    assert (call.decode_seconds, call.tpot_seconds) == (2.0, 1.0)
    assert (call.num_output_tokens, call.total_seconds) == (3, 3.0)
    assert (run.ttft_seconds, run.total_seconds) == (3.0, 5.0)
    (model,) = handler.snapshot()
    assert (model.num_calls, model.num_streamed) == (1, 1)
    assert handler.num_open_runs == 0


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_call_is_counted_once_when_chat_asks_complete(handler, is_chat, streaming, is_async):
    """Events of an inner call are the outer's."""
    engine = engine_of(MockLLM(max_tokens=3, is_chat_model=is_chat), streaming=streaming)
    await ask(engine, is_async=is_async)
    (model,) = handler.snapshot()
    assert (model.model, model.num_calls) == ("MockLLM", 1)
    assert model.calls[Outcome.COMPLETED] == 1
    assert model.num_streamed == int(streaming)
    assert model.num_output_tokens == (3 if streaming else 0)
    assert len(handler.runs) == 1


@pytest.mark.parametrize("own_ttft", [0.5, None])
def test_ttft_is_what_the_response_says_when_nothing_streams(handler, clock, own_ttft):
    """A model that shows nothing may still know its TTFT and its tokens."""
    raw = {"ttft_seconds": own_ttft, "usage": {"completion_tokens": 7}}
    slow(engine_of(SpeakingLLM(clock=clock, own_raw=raw)), clock).query("?")
    (call,) = handler.last_run.calls
    assert not call.is_streamed
    assert call.ttft_seconds == own_ttft
    assert call.root_ttft_seconds == (None if own_ttft is None else 2.5)
    assert call.num_output_tokens == 7
    assert call.tpot_seconds is None
    assert handler.last_run.total_seconds == 5.0


def test_tokens_are_the_responses_when_it_counts_them(handler, clock):
    """A piece may be several tokens, or none."""
    raw = {"usage": {"completion_tokens": 5}}
    list(SpeakingLLM(clock=clock, own_raw=raw).stream_complete("?"))
    (call,) = handler.last_run.calls
    assert (call.num_output_tokens, call.tpot_seconds) == (5, 0.5)


def test_empty_pieces_are_no_token_when_a_model_sends_them(handler, clock):
    """TTFT is to the first piece that carries something."""
    list(SpeakingLLM(clock=clock, pieces=("", "", "a", "b")).stream_complete("?"))
    (call,) = handler.last_run.calls
    assert (call.ttft_seconds, call.num_output_tokens) == (3.0, 2)


class CallingLLM(SpeakingLLM):
    """Streams a tool call without a text."""

    @llm_chat_callback()
    def stream_chat(self, messages, **kwargs):
        def pieces():
            self.clock.advance(1.0)
            yield ChatResponse(message=ChatMessage(role="assistant", content=""), delta="")
            self.clock.advance(1.0)
            blocks = [ToolCallBlock(tool_name="add", tool_kwargs={})]
            yield ChatResponse(message=ChatMessage(role="assistant", blocks=blocks), delta="")

        return pieces()


def test_tool_call_is_the_first_token_when_there_is_no_text(handler, clock):
    """A tool call is generated as text is."""
    list(CallingLLM(clock=clock).stream_chat([ChatMessage(content="?")]))
    assert handler.last_run.calls[0].ttft_seconds == 2.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "speaker"),
        ({"name": "unknown", "own_raw": {"model": "told"}}, "told"),
        ({"name": "unknown"}, "speaking_llm"),
        ({"own_raw": {"model": "told"}}, "speaker"),
    ],
)
def test_model_has_its_best_name_when_it_has_several(handler, settings, expected):
    """Its own, else the response's, else its class's."""
    SpeakingLLM(**settings).complete("?")
    assert [each.model for each in handler.snapshot()] == [expected]


def test_call_is_cancelled_and_timed_when_the_consumer_leaves(handler, clock):
    """A stream closed early is one cancelled call with a TTFT (pitfall 26)."""
    response = slow(engine_of(SpeakingLLM(clock=clock), streaming=True), clock).query("?")
    next(response.response_gen)
    response.response_gen.close()
    (call,) = handler.last_run.calls
    assert call.outcome is Outcome.CANCELLED
    assert (call.ttft_seconds, call.root_ttft_seconds) == (1.0, 3.0)
    assert "speaker: 0 failed, 1 cancelled" in handler.report()
    assert handler.num_open_runs == 0


def test_run_is_open_in_the_report_when_its_stream_is_not_read(handler):
    """A table without rows would not say why."""
    response = engine_of(SpeakingLLM(), streaming=True).query("?")
    assert "still open: " in handler.report()
    answer_of(response)
    assert "still open" not in handler.report()


@pytest.mark.parametrize("streaming", [False, True])
def test_call_is_failed_and_not_timed_when_the_model_raises(handler, clock, streaming):
    """Times of half a call say nothing."""
    engine = engine_of(SpeakingLLM(clock=clock, fails_at=1), streaming=streaming)
    with pytest.raises(ZeroDivisionError):
        answer_of(engine.query("?"))
    (model,) = handler.snapshot()
    assert (model.calls[Outcome.FAILED], model.num_calls, model.ttft.count) == (1, 1, 0)
    assert handler.num_open_runs == 0


def test_no_call_is_lost_when_queries_run_in_threads():
    """Each query has its own call, whichever threads interleave."""
    engines = [
        engine_of(SpeakingLLM(name=f"model {index}"), streaming=bool(index % 2))
        for index in range(4)
    ]
    with TTFTEventHandler() as handler, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda engine: answer_of(engine.query("?")), engines * 4))
    assert sorted((each.model, each.num_calls) for each in handler.snapshot()) == [
        (f"model {index}", 4) for index in range(4)
    ]
    assert [len(run.calls) for run in handler.runs] == [1] * 16


def test_calls_are_timed_when_no_span_is_followed(clock):
    """A handler that was merely added times calls from their own start."""
    handler, root = TTFTEventHandler(read_clock=clock), get_dispatcher()
    root.add_event_handler(handler)
    try:
        llm = SpeakingLLM(clock=clock)
        answer_of(slow(engine_of(llm, streaming=True), clock).query("?"))
    finally:
        root.event_handlers.remove(handler)
    (call,) = handler.last_run.calls
    assert (call.ttft_seconds, call.root_ttft_seconds) == (1.0, 1.0)


def test_oldest_run_leaves_when_there_are_too_many(clock):
    """Memory is bounded; the sums remember."""
    with TTFTEventHandler(max_runs=2, read_clock=clock) as handler:
        for name in "abc":
            SpeakingLLM(name=name).complete("?")
    assert [run.calls[0].model for run in handler.runs] == ["b", "c"]
    assert len(handler.snapshot()) == 3


def test_dictionary_is_json_when_calls_were_timed(handler, clock):
    """Models, runs and calls survive JSON."""
    answer_of(engine_of(SpeakingLLM(clock=clock), streaming=True).query("?"))
    plain = handler.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["models"][0]["num_calls"] == 1
    assert plain["runs"][0]["calls"][0]["tpot_seconds"] == 1.0


def test_nothing_is_reported_when_nothing_ran(handler):
    """No call is no row, and embedding is no call."""
    engine_of(MockLLM())
    assert handler.report() == "no model was called"
    assert handler.runs == ()
    assert handler.last_run is None


@pytest.mark.parametrize("limits", [{"max_runs": 0}, {"max_samples": 0}])
def test_limit_is_refused_when_below_one(limits):
    """A handler that keeps nothing has nothing to report."""
    with pytest.raises(ConfigError, match="is 0; it must be at least 1"):
        TTFTEventHandler(**limits)


def test_text_is_a_token_when_a_model_sends_no_delta(handler, clock):
    """Some models send the text so far, and leave the delta out."""
    list(SpeakingLLM(clock=clock, has_delta=False).stream_complete("?"))
    (call,) = handler.last_run.calls
    assert (call.ttft_seconds, call.num_output_tokens) == (1.0, 3)
