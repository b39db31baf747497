from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pc_rag.serving.finishing import ended, tidied
from pc_rag.serving.turns import Turns

TIMEOUT = 60


@pytest.fixture
def turns():
    turns = Turns()
    yield turns
    assert turns._last == {}  # nothing is kept of those who are done


def _queued(turns, key, end):
    """Wait until somebody has come behind the turn of a key that ends with ``end``."""
    while turns._last[key] is end:
        threading.Event().wait(0.001)


def test_threads_take_turns_when_they_share_one_of_their_keys(turns):
    """The second begins when the first is done, and others are not held up."""
    order = []

    def work():
        with turns.take(["b", "c"]):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with turns.take(["a", "b"]):
            end = turns._last["b"]
            other = pool.submit(work)
            _queued(turns, "b", end)
            with turns.take(["d"]):
                order.append("other")
            order.append("first")
        other.result(TIMEOUT)
    assert order == ["other", "first", "second"]


def test_nobody_waits_for_each_other_when_keys_come_in_any_order(turns):
    """Queues for several keys are joined at once: no deadlock."""
    counts = []

    def work(keys):
        for _ in range(200):
            with turns.take(keys):
                counts.append(keys)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work, keys) for keys in ("ab", "ba", "bc", "ca")]
        for job in jobs:
            job.result(TIMEOUT)
    assert len(counts) == 800


async def test_loop_is_free_when_a_coroutine_waits_for_a_thread(turns):
    """A coroutine waits for a thread's turn, and a thread for a coroutine's."""
    order = []

    async def work():
        async with turns.atake(["a"]):
            order.append("coroutine")
            end = turns._last["a"]
            last = loop.run_in_executor(None, thread)
            await loop.run_in_executor(None, _queued, turns, "a", end)
            order.append("still the coroutine")
        return last

    def thread():
        with turns.take(["a"]):
            order.append("thread")

    loop = asyncio.get_running_loop()
    with turns.take(["a"]):
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        order.append("first")
    await (await task)
    assert order == ["first", "coroutine", "still the coroutine", "thread"]


async def test_third_waits_for_the_first_when_the_second_gave_up(turns):
    """A cancelled wait does not let those behind it pass the ones before it."""
    order = []

    async def work(name):
        async with turns.atake(["a"]):
            order.append(name)

    with turns.take(["a"]):
        second = asyncio.create_task(work("second"))
        await asyncio.sleep(0)
        third = asyncio.create_task(work("third"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        for _ in range(9):
            await asyncio.sleep(0)
        order.append("first")
    await third
    assert second.cancelled()
    assert order == ["first", "third"]


async def test_loop_does_not_hang_when_a_plain_call_comes_between(turns):
    """On the loop's own thread nobody waits for a turn that needs the loop."""
    async with turns.atake(["a"]):
        with turns.take(["a"]):
            pass


async def test_next_one_gets_its_turn_when_work_fails(turns):
    """An error gives the turn back."""
    with pytest.raises(ZeroDivisionError):
        async with turns.atake(["a"]):
            _ = 1 / 0
    async with turns.atake(["a"]):
        pass


async def test_work_tidies_up_undisturbed_when_cancelled_twice():
    """The caller leaves at the second cancellation; the work ends all the same."""
    begun, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            begun.set()
            await go.wait()
            done.set()

    task = asyncio.create_task(tidied(work()))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await begun.wait()
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await done.wait()


async def test_thread_is_waited_for_when_its_task_is_cancelled():
    """The cancellation surfaces behind the thread, whatever became of it."""
    begun, go, seen = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        go.wait(TIMEOUT)
        seen.append("thread")
        raise ZeroDivisionError

    task = asyncio.create_task(ended(asyncio.to_thread(work)))
    await asyncio.to_thread(begun.wait, TIMEOUT)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["thread"]
