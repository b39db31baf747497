"""What belongs to one question is one run: in chat engines, in agents, and in nested streams."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.pc_rag import CacheHitEventHandler, CallOutcome, TTFTEventHandler
from llama_index.llms.pc_rag.callbacks.calls import OpenCalls
from llama_index.llms.pc_rag.callbacks.streams import OpenStreams

from tests.support.llama_index_queries import SpeakingLLM, engine_of, nodes_of
from tests.support.uses import TEXTS, metrics_of, use_of

METRICS = metrics_of(use_of(TEXTS[0]))


@pytest.fixture
def handlers():
    with CacheHitEventHandler() as hits, TTFTEventHandler() as times:
        yield hits, times


async def _say(engine, way):
    if way == "chat":
        return str(await asyncio.to_thread(engine.chat, "hi"))
    if way == "achat":
        return str(await engine.achat("hi"))
    if way == "stream_chat":
        response = await asyncio.to_thread(engine.stream_chat, "hi")
        return "".join(await asyncio.to_thread(list, response.response_gen))
    response = await engine.astream_chat("hi")
    return "".join([piece async for piece in response.async_response_gen()])


@pytest.mark.parametrize("mode", ["context", "condense_plus_context", "condense_question"])
@pytest.mark.parametrize("way", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_turn_is_one_run_when_a_chat_engine_answers(handlers, mode, way):
    """A turn with its condensed question, its retrieval and its answer is one run (pitfall 29)."""
    hits, times = handlers
    index = VectorStoreIndex(nodes_of(*TEXTS), embed_model=MockEmbedding(embed_dim=4))
    llm = SpeakingLLM(reported=METRICS, is_chat=True)
    engine = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=3)
    for _ in range(2):
        assert await _say(engine, way) == "Norway."
    num_calls = [1, 1 if mode == "context" else 2]  # the first question needs no condensing
    assert [run.calls[CallOutcome.REPORTED] for run in hits.runs] == num_calls
    assert [len(run.calls) for run in times.runs] == num_calls
    assert [(run.num_documents, run.num_documents_hit) for run in hits.runs] == [(3, 1)] * 2
    assert all(f".{way}-" in run.run_id for run in hits.runs)


async def test_calls_are_one_run_when_an_agent_uses_a_tool(handlers):
    """Steps of an agent are tasks of their own, and still one run."""
    hits, times = handlers
    tool = QueryEngineTool.from_defaults(
        engine_of(SpeakingLLM(reported=METRICS)), name="cities", description="Knows cities."
    )
    agent = FunctionAgent(tools=[tool], llm=MockFunctionCallingLLM(is_chat_model=True))
    await agent.run("hi")
    (run,), (timed,) = hits.runs, times.runs
    assert run.run_id.startswith("FunctionAgent.run-")
    assert (run.calls[CallOutcome.REPORTED], run.calls[CallOutcome.UNREPORTED]) == (1, 2)
    assert len(timed.calls) == 3
    assert run.num_documents_hit == 1


def test_innermost_stream_is_found_when_streams_are_pulled_inside_each_other():
    """What stands on the stack decides, and only while it stands there."""
    streams, seen = OpenStreams(), []

    def inner():
        while True:
            seen.append(streams.pulled())
            yield

    def outer(source):
        while True:
            seen.append(streams.pulled())
            next(source)
            seen.append(streams.pulled())
            yield

    source = inner()
    stream = outer(source)
    assert streams.add("inner", source)
    assert streams.add("outer", stream)
    next(stream)
    assert seen == ["outer", "inner", "outer"]
    assert streams.pulled() is None
    assert streams.take_ended() == []
    stream.close()
    assert streams.take_ended() == ["outer"]
    assert streams.take_ended() == []
    assert not streams.add("late", stream)
    del source, stream
    assert streams.take_ended() == ["inner"]


def test_runs_end_when_another_stream_takes_the_place_of_theirs_in_memory():
    """Streams are known by the address of their frame, which Python uses again."""
    streams, num_streams = OpenStreams(), 50
    for index in range(num_streams):
        assert streams.add(str(index), (letter for letter in "ab"))  # collected at once
    assert sorted(streams.take_ended(), key=int) == [str(index) for index in range(num_streams)]
    assert streams.take_ended() == []


def test_open_streams_are_looked_at_seldom_when_there_are_very_many():
    """A handler that keeps every response costs a query no more for it."""
    streams = OpenStreams()
    kept = [(letter for letter in "ab") for _ in range(800)]
    for index, stream in enumerate(kept):
        streams.add(str(index), stream)
    assert sum(streams.is_due() for _ in range(1000)) == 10
    del stream
    kept.clear()
    assert len(streams.take_ended()) == 800
    assert all(streams.is_due() for _ in range(10))


def test_inner_call_stands_for_the_outer_when_three_nest():
    """A call that asks a call that asks a call is one, until it ends."""
    calls = OpenCalls()
    assert not calls.join("a", None)
    calls.start("a", "state")
    assert calls.join("b", "a")
    assert calls.join("c", "b")
    assert calls.of("c") == "state"
    assert not calls.is_own("c")
    assert calls.end("c") is None
    assert calls.end("b") is None
    assert calls.end("a", is_left=True) == "state"
    assert not calls.join("d", "a")
    assert calls.left("a") == "state"
    assert calls.left("a") is None


def test_open_calls_are_forgotten_when_their_ends_never_come():
    """Memory is bounded: the oldest of very many goes."""
    calls = OpenCalls()
    for index in range(5000):
        calls.start(str(index), index)
        calls.join(f"inner {index}", str(index))
    assert calls.of("0") is None
    assert calls.of("inner 0") is None
    assert calls.of("inner 4999") == 4999
