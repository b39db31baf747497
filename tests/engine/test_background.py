"""Background work is done in turn, once for all who wait for it, and leaves nobody waiting."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from pc_rag.engine.background import MAX_PENDING, BackgroundWork
from pc_rag.errors import StoreError

WAIT_SECONDS = 60


@pytest.fixture
def background():
    background = BackgroundWork("pc-rag-test", when_closed="it is closed; open it again")
    yield background
    background.close()


@pytest.fixture
def held(background):
    """The thread is busy until this is set."""
    begun, opens = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert opens.wait(WAIT_SECONDS)

    background.submit("first", wait)
    assert begun.wait(WAIT_SECONDS)
    yield opens
    opens.set()


def is_running():
    return any(thread.name.startswith("pc-rag-test") for thread in threading.enumerate())


def test_thread_begins_when_there_is_work(background):
    """Whoever has none pays for none."""
    assert not is_running()
    assert (
        background.submit("key", threading.current_thread)
        .result(WAIT_SECONDS)
        .name.startswith("pc-rag-test")
    )
    assert is_running()


def test_work_is_done_in_turn_and_once_when_keys_are_equal(background, held):
    """The first of a key is done for all who wait with it."""
    done = []
    futures = [
        background.submit(key, lambda number=number: done.append(number) or number)
        for number, key in enumerate("abacb")
    ]
    held.set()
    assert [future.result(WAIT_SECONDS) for future in futures] == [0, 1, 0, 3, 1]
    assert done == [0, 1, 3]


def test_error_reaches_everyone_who_waits_when_work_fails(background, held):
    """And what waits behind it is done."""
    failing = [background.submit("a", lambda: 1 // 0) for _ in range(2)]
    behind = background.submit("b", lambda: 7)
    held.set()
    for future in failing:
        with pytest.raises(ZeroDivisionError):
            future.result(WAIT_SECONDS)
    assert behind.result(WAIT_SECONDS) == 7


def test_oldest_work_is_cancelled_when_too_much_waits(background, held):
    """The queue is bounded; what runs is not in it."""
    futures = [background.submit(number, int) for number in range(MAX_PENDING + 2)]
    assert [future.cancelled() for future in futures] == [True] * 2 + [False] * MAX_PENDING
    held.set()
    assert futures[-1].result(WAIT_SECONDS) == 0


def test_nothing_is_taken_when_it_is_closed(background):
    """Work asks whether it should end; closing twice is harmless."""
    assert background.submit("a", lambda: background.is_ending).result(WAIT_SECONDS) is False
    background.close()
    background.close()
    assert background.is_ending
    with pytest.raises(StoreError, match="it is closed; open it again"):
        background.submit("late", int)


def test_future_is_cancelled_when_it_waits_at_the_close(background, held):
    """Whoever waits for it goes on at once."""
    waiting = background.submit("waiting", int)
    waiting.add_done_callback(lambda _: held.set())  # closing waits for what runs
    background.close()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_SECONDS)
