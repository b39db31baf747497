"""Calls from an event loop: computed in threads, and given back whoever leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pc_rag.errors import PromptError
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.sampling import GenerationConfig
from pc_rag.serving import Call, begun, open_host, texts
from pc_rag.types import Role
from tests.support.engines import scripted

CALL = Call(prompt=[ChatMessage(Role.USER, "Hi")], config=GenerationConfig(max_new_tokens=100))
WAIT_SECONDS = 10
"""Longest wait for something that happens at once, unless it is broken."""


@pytest.fixture
def host(corpus):
    return open_host(corpus)


def cancelled(corpus):
    return corpus.engine.stats.snapshot().total.requests["cancelled"]


class LateHost:
    """Begins calls only when it is told to, and tells when all their streams were closed."""

    def __init__(self, host, num_calls):
        self._host = host
        self._num_open = num_calls
        self.has_entered = threading.Barrier(num_calls + 1)
        self.go_on = threading.Event()
        self.is_closed = asyncio.Event()

    def begin(self):
        self.has_entered.wait(WAIT_SECONDS)
        self.go_on.wait(WAIT_SECONDS)
        stream = self._host.stream(CALL)
        close = stream.close

        def closing():
            close()
            self._num_open -= 1
            if not self._num_open:
                self.is_closed.set()

        stream.close = closing
        return stream


async def test_late_streams_are_closed_when_their_tasks_were_cancelled(host, corpus):
    """Of three calls that were begun for nobody, three are counted as cancelled."""
    late = LateHost(host, 3)
    tasks = [asyncio.create_task(begun(late.begin)) for _ in range(3)]
    await asyncio.to_thread(late.has_entered.wait, WAIT_SECONDS)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended)
    assert cancelled(corpus) == 0
    late.go_on.set()
    await asyncio.wait_for(late.is_closed.wait(), WAIT_SECONDS)
    assert cancelled(corpus) == 3
    assert corpus.engine.stats.snapshot().total.num_requests == 3


async def test_error_arrives_when_a_call_cannot_begin(host):
    """Whoever waits for the stream gets it."""
    with pytest.raises(PromptError):
        await begun(lambda: host.stream(Call(prompt=[])))


async def test_loop_is_left_alone_when_a_call_begins(host):
    """Beginning waits for something that only the loop can do."""
    loop, has_run = asyncio.get_running_loop(), threading.Event()

    def begin():
        loop.call_soon_threadsafe(has_run.set)
        assert has_run.wait(WAIT_SECONDS)
        return host.stream(CALL)

    (await begun(begin)).close()


async def test_stream_is_closed_when_the_consumer_leaves_its_texts(host, corpus):
    """Also where somebody still holds the stream, so that nothing else would close it."""
    stream = host.stream(CALL)
    with scripted(corpus.engine, "a" * 100):
        pieces = texts(stream)
        assert await anext(pieces) == "a"
        await pieces.aclose()
    assert stream.reply.completion.metrics.is_cancelled
    assert cancelled(corpus) == 1


async def test_stream_is_closed_when_a_task_is_cancelled_between_tokens(host, corpus):
    """The token that is being computed is the last one."""
    stream = host.stream(CALL)
    entered, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def slow(_module, _args, output):
        entered.set()
        go_on.wait(WAIT_SECONDS)
        return output

    async def read():
        async for _ in texts(stream):
            pass

    record = corpus.engine.stats.record

    def recording(metrics):
        record(metrics)
        done.set()

    corpus.engine.stats.record = recording
    handle = corpus.engine.loaded.model.register_forward_hook(slow)
    try:
        task = asyncio.create_task(read())
        await asyncio.to_thread(entered.wait, WAIT_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await asyncio.to_thread(done.wait, WAIT_SECONDS)
    finally:
        handle.remove()
    assert stream.reply.completion.metrics.is_cancelled
    assert stream.reply.completion.metrics.num_generated_tokens <= 1


async def test_consumer_is_told_once_when_its_task_is_cancelled_within_a_token(host, corpus):
    """When the thread is done, not before: then the reply says what the request cost."""
    stream, told = host.stream(CALL), threading.Event()
    entered, go_on, replies = threading.Event(), threading.Event(), []

    def slow(_module, _args, output):
        entered.set()
        go_on.wait(WAIT_SECONDS)
        return output

    def tell():
        replies.append(stream.reply)
        told.set()

    async def read():
        async for _ in texts(stream):
            pass

    handle = corpus.engine.loaded.model.register_forward_hook(slow)
    try:
        task = asyncio.create_task(read())
        await asyncio.to_thread(entered.wait, WAIT_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream.when_completed(tell)
        assert replies == []
        go_on.set()
        assert await asyncio.to_thread(told.wait, WAIT_SECONDS)
    finally:
        handle.remove()
    (reply,) = replies
    assert reply.finish_reason == "cancelled"


async def test_consumer_is_told_at_once_when_nothing_is_computed_as_it_leaves(host, corpus):
    """Between tokens the stream ends where it is closed."""
    stream, told = host.stream(CALL), []
    with scripted(corpus.engine, "abc"):
        pieces = texts(stream)
        await anext(pieces)
        await pieces.aclose()
    stream.when_completed(lambda: told.append(stream.reply.finish_reason))
    assert told == ["cancelled"]
