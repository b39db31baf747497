"""Calls from an event loop: the same answers, and the loop goes on."""

from __future__ import annotations

import asyncio
import threading

import pytest
from langchain_pc_rag import ChatPcRag

from tests.support.engines import scripted
from tests.support.langchain_calls import QUESTION


@pytest.fixture
def llm(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=8)


async def test_async_answers_equal_sync_ones_when_the_prompt_is_the_same(llm):
    """Four ways to ask, one answer."""
    expected = llm.invoke(QUESTION).content
    assert (await llm.ainvoke(QUESTION)).content == expected
    assert "".join([chunk.content async for chunk in llm.astream(QUESTION)]) == expected
    assert [m.content for m in await llm.abatch([QUESTION, QUESTION])] == [expected] * 2


async def test_loop_goes_on_when_two_answers_are_computed(llm):
    """Pitfall 28: a ticker ticks while the model computes."""
    ticks = 0
    done = asyncio.Event()

    async def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await asyncio.gather(*(llm.ainvoke(QUESTION, max_tokens=30) for _ in range(2)))
    done.set()
    await ticker
    assert ticks > 30


async def test_generation_stops_when_a_task_is_cancelled(corpus, llm):
    """A cancelled ``ainvoke`` does not go on computing in its thread."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(_module, _args, output):
        entered.set()
        go_on.wait(10)
        return output

    handle = corpus.engine.loaded.model.register_forward_hook(slow)
    try:
        task = asyncio.create_task(llm.ainvoke("Hi", max_tokens=500))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
    finally:
        handle.remove()
    async with asyncio.timeout(10):
        while corpus.engine.stats.snapshot().total.num_requests == 0:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    assert corpus.engine.stats.snapshot().total.num_generated_tokens <= 2


async def test_generation_stops_when_an_async_consumer_leaves(corpus, llm):
    """Breaking out of ``astream`` ends the request as one that was cancelled."""
    with scripted(corpus.engine, "a" * 100):
        stream = llm.astream("Hi", max_tokens=100)
        async for _ in stream:
            break
        await stream.aclose()
    assert corpus.engine.stats.snapshot().total.requests["cancelled"] == 1
