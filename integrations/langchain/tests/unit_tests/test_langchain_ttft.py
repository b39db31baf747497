"""Times to the first token of any model are those that its caller saw."""

from __future__ import annotations

import asyncio
import gc
import json
import sys

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool
from langchain_pc_rag import TTFTHandler

from pc_rag.errors import ConfigError
from pc_rag.metrics.stats import Outcome
from tests.support.langchain_models import (
    ListRetriever,
    SilentChat,
    SpeakingChat,
    SpeakingLLM,
    ToolCallingChat,
)
from tests.support.metrics import FakeClock
from tests.support.uses import metrics_of


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def handler(clock):
    return TTFTHandler(read_clock=clock)


def config(handler):
    return {"callbacks": [handler]}


def chain_of(model, clock):
    """A second of retrieval, then the model."""
    return ListRetriever(clock=clock) | RunnableLambda(str) | model | StrOutputParser()


@pytest.mark.parametrize("kind", [SpeakingChat, SpeakingLLM])
@pytest.mark.parametrize("way", ["stream", "astream"])
async def test_times_are_the_callers_when_a_chain_streams(handler, clock, kind, way):
    """TTFT of the call and of the run around it, and time per token behind the first."""
    chain = chain_of(kind(clock=clock), clock)
    if way == "stream":
        list(chain.stream("?", config(handler)))
    else:
        async for _ in chain.astream("?", config(handler)):
            pass
    run = handler.last_run
    (call,) = run.calls
    assert call.ttft_seconds == 2.0
    assert call.root_ttft_seconds == run.ttft_seconds == 3.0
    assert call.num_output_tokens == 3
    assert call.tpot_seconds == 0.5
    assert call.total_seconds == 3.0
    assert run.total_seconds == 4.0
    assert call.is_streamed
    assert handler._tree.num_open_runs == len(handler._calls) == 0


@pytest.mark.parametrize("kind", [SpeakingChat, SpeakingLLM])
def test_tokens_are_the_responses_when_it_counts_them(handler, clock, kind):
    """A piece may hold several tokens; the response knows."""
    model = kind(clock=clock, num_output_tokens=11, metrics=metrics_of())
    list(model.stream("?", config(handler)))
    (call,) = handler.last_run.calls
    assert call.num_output_tokens == (11 if kind is SpeakingChat else 3)
    assert call.tpot_seconds == pytest.approx(1.0 / (call.num_output_tokens - 1))


def test_tokens_are_the_outputs_when_a_string_model_counts_them_apart(handler, clock):
    """``llm_output["token_usage"]`` is where string models say it."""
    SpeakingLLM(clock=clock, num_output_tokens=7).invoke("?", config(handler))
    (call,) = handler.last_run.calls
    assert call.num_output_tokens == 7
    (model,) = handler.snapshot()
    assert model.tokens_per_second == pytest.approx(7 / 3)


@pytest.mark.parametrize("pieces", [("", "", "a"), ([], [{"type": "text", "text": ""}], "a")])
def test_empty_pieces_are_no_token_when_a_model_sends_them(handler, clock, pieces):
    """A first chunk with a role and nothing else is not yet an answer."""
    list(SpeakingChat(clock=clock, pieces=pieces).stream("?", config(handler)))
    (call,) = handler.last_run.calls
    assert (call.ttft_seconds, call.num_output_tokens) == (3.0, 1)


@pytest.mark.parametrize(
    "block", [{"type": "text", "text": "a"}, {"type": "reasoning", "reasoning": "hm"}]
)
def test_blocks_are_tokens_when_they_carry_something(handler, clock, block):
    """Content in blocks counts as content in text does."""
    list(SpeakingChat(clock=clock, pieces=([block], [block])).stream("?", config(handler)))
    assert handler.last_run.calls[0].ttft_seconds == 2.0


def test_events_are_tokens_when_a_model_streams_by_the_newer_protocol(handler, clock):
    """``stream_events`` of version 3 sends events in the place of tokens."""
    stream = SpeakingChat(clock=clock).stream_events("?", config(handler), version="v3")
    assert "".join(stream.text) == "Norway."
    (call,) = handler.last_run.calls
    assert (call.ttft_seconds, call.num_output_tokens, call.tpot_seconds) == (2.0, 3, 0.5)


@pytest.mark.parametrize("kind", [SpeakingChat, SpeakingLLM, SilentChat])
@pytest.mark.parametrize("own_ttft", [None, 0.75])
def test_ttft_is_what_the_response_says_when_nothing_streams(handler, clock, kind, own_ttft):
    """``invoke`` shows no token; ours say their TTFT themselves, others leave it unknown."""
    chain_of(kind(clock=clock, own_ttft=own_ttft), clock).invoke("?", config(handler))
    (call,) = handler.last_run.calls
    assert not call.is_streamed
    assert call.total_seconds == 3.0
    assert call.ttft_seconds == own_ttft
    assert handler.last_run.ttft_seconds == (None if own_ttft is None else 1.0 + own_ttft)
    assert call.tpot_seconds is None
    assert ("no first token was seen" in handler.report()) is (own_ttft is None)


def test_tokens_are_seen_when_a_bound_model_is_told_to_stream(handler, clock):
    """``bind(stream=True)`` makes ``invoke`` stream inside, as an agent's calls need."""
    SpeakingChat(clock=clock).bind(stream=True).invoke("?", config(handler))
    assert handler.last_run.calls[0].ttft_seconds == 2.0


@pytest.mark.parametrize("way", ["stream", "astream"])
async def test_runs_nest_when_an_agent_calls_a_tool(handler, clock, way):
    """A piece of a tool call is a token; the agent's run has both calls and the tool's time."""
    tools = [create_retriever_tool(ListRetriever(clock=clock), "search", "Look it up.")]
    agent = create_agent(ToolCallingChat(clock=clock), tools=tools)
    question = {"messages": [("user", "?")]}
    if way == "stream":
        list(agent.stream(question, config(handler), stream_mode="messages"))
    else:
        async for _ in agent.astream(question, config(handler), stream_mode="messages"):
            pass
    (run,) = handler.runs
    first, second = run.calls
    assert (first.ttft_seconds, second.ttft_seconds) == (2.5, 2.0)
    assert (first.root_ttft_seconds, second.root_ttft_seconds) == (2.5, 2.5 + 1.0 + 2.0)
    assert run.ttft_seconds == 2.5
    assert handler._tree.num_open_runs == len(handler._calls) == 0


def test_models_are_kept_apart_when_several_answer(handler, clock):
    """A row for each name; medians of each are its own."""
    for seconds in (1.0, 2.0, 9.0):
        list(SpeakingChat(clock=clock, prefill=seconds).stream("?", config(handler)))
    list(SpeakingLLM(clock=clock, prefill=5.0).stream("?", config(handler)))
    chat, llm = handler.snapshot()
    assert (chat.model, chat.num_calls, chat.ttft.p50_seconds) == ("speaker", 3, 2.0)
    assert (chat.ttft.p95_seconds, chat.tpot.p50_seconds) == (9.0, 0.5)
    assert chat.tokens_per_second == pytest.approx(9 / 15)
    assert (llm.model, llm.ttft.p50_seconds) == ("string-speaker", 5.0)
    report = handler.report()
    assert "speaker" in report
    assert "2.00 s" in report


def test_class_is_the_name_when_a_model_has_none(handler):
    """A model that says nothing of itself still has a row."""
    model = GenericFakeChatModel(messages=iter([AIMessage("hello there")]))
    list(model.stream("?", config(handler)))
    assert [each.model for each in handler.snapshot()] == ["GenericFakeChatModel"]
    assert handler.last_run.calls[0].num_output_tokens == 3


@pytest.mark.parametrize("kind", [SpeakingChat, SpeakingLLM])
def test_call_is_cancelled_and_timed_when_the_consumer_leaves(handler, clock, kind):
    """A break is no failure, and the first token was seen."""
    stream = kind(clock=clock).stream("?", config(handler))
    next(stream)
    stream.close()
    gc.collect()
    (model,) = handler.snapshot()
    assert model.calls == {Outcome.COMPLETED: 0, Outcome.CANCELLED: 1, Outcome.FAILED: 0}
    assert model.ttft.p50_seconds == 2.0
    assert model.total.count == 0
    assert "0 failed, 1 cancelled" in handler.report()


@pytest.mark.parametrize("kind", [SpeakingChat, SpeakingLLM])
def test_call_is_failed_and_not_timed_when_the_model_raises(handler, clock, kind):
    """Half a request's times would be wrong ones."""
    with pytest.raises(ZeroDivisionError):
        list(kind(clock=clock, fail_at=1).stream("?", config(handler)))
    (model,) = handler.snapshot()
    assert model.calls[Outcome.FAILED] == 1
    assert model.ttft.count == 0
    assert len(handler._calls) == 0


def test_answer_is_replayed_and_no_call_when_the_response_cache_gave_it(handler, clock):
    """A replayed answer took no model's time."""
    model = SpeakingChat(clock=clock, own_ttft=0.75, cache=InMemoryCache())
    for _ in range(3):
        model.invoke("?", config(handler))
    assert handler.num_replayed == 2
    assert handler.last_run.num_replayed == 1
    assert handler.last_run.ttft_seconds is None
    assert handler.snapshot()[0].num_calls == 1
    assert "replayed by the response cache: 2" in handler.report()


@pytest.fixture
def eager_switching():
    """Threads take turns as often as the interpreter can, so that a missing lock shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_no_call_is_lost_when_a_batch_runs_in_threads():
    """Every run has its own call, whatever interleaves."""
    handler = TTFTHandler()
    chain = chain_of(SpeakingChat().bind(stream=True), None)
    chain.batch(["?"] * 40, {**config(handler), "max_concurrency": 8})
    assert len({run.run_id for run in handler.runs}) == 40
    assert all(len(run.calls) == 1 for run in handler.runs)
    assert handler.snapshot()[0].num_streamed == 40
    assert handler._tree.num_open_runs == len(handler._calls) == 0


async def test_no_call_is_lost_when_tasks_interleave():
    """The same on one event loop."""
    handler = TTFTHandler()
    chain = chain_of(SpeakingChat(), None)

    async def ask() -> None:
        async for _ in chain.astream("?", config(handler)):
            pass

    await asyncio.gather(*(ask() for _ in range(20)))
    assert all(run.calls[0].num_output_tokens == 3 for run in handler.runs)
    assert handler.snapshot()[0].num_calls == 20


def test_oldest_run_leaves_when_there_are_too_many(clock):
    """Memory is bounded; the sums remember."""
    handler = TTFTHandler(max_runs=2, read_clock=clock)
    for seconds in (1.0, 2.0, 3.0):
        list(SpeakingChat(clock=clock, prefill=seconds).stream("?", config(handler)))
    assert [run.ttft_seconds for run in handler.runs] == [2.0, 3.0]
    assert handler.snapshot()[0].num_calls == 3


def test_dictionary_is_json_when_calls_were_timed(handler, clock):
    """Models and runs survive JSON."""
    list(chain_of(SpeakingChat(clock=clock), clock).stream("?", config(handler)))
    plain = handler.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["models"][0]["ttft"]["p50_seconds"] == 2.0
    assert plain["runs"][0]["calls"][0]["tpot_seconds"] == 0.5


def test_nothing_is_reported_when_nothing_ran(handler):
    """No call is said in words."""
    assert handler.report() == "no model was called"
    assert handler.last_run is None


@pytest.mark.parametrize("limits", [{"max_runs": 0}, {"max_samples": 0}])
def test_limit_is_refused_when_below_one(limits):
    """A handler that keeps nothing has nothing to report."""
    with pytest.raises(ConfigError, match="is 0; it must be at least 1"):
        TTFTHandler(**limits)
