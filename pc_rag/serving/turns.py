"""Who works on something when several want to: threads and coroutines, one after the other."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable, Iterable, Iterator


class Turns:
    """Gives those who want the same key a turn each, in the order in which they came.

    Threads and coroutines of any event loop wait alike, the latter without holding their loop.
    Whoever wants several keys stands in all their queues at once, so no two wait for each other.
    Not re-entrant.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[Hashable, Future[None]] = {}

    @contextmanager
    def take(self, keys: Iterable[Hashable]) -> Iterator[None]:
        """Wait for the turn of these keys, and keep it while inside.

        On the thread of a running event loop nobody is waited for: those before may need the loop.

        Args:
            keys: What is worked on.
        """
        turn = self._queue(keys)
        try:
            if not _is_on_a_loop():
                wait(turn.before)
            yield
        finally:
            self._leave(turn)

    @asynccontextmanager
    async def atake(self, keys: Iterable[Hashable]) -> AsyncIterator[None]:
        """As ``take``; waits without holding the event loop."""
        turn = self._queue(keys)
        try:
            for earlier in turn.before:
                await asyncio.wrap_future(earlier)
            yield
        finally:
            self._leave(turn)

    def _queue(self, keys: Iterable[Hashable]) -> _Turn:
        keys = frozenset(keys)
        with self._lock:
            turn = _Turn(keys, {self._last[key] for key in keys if key in self._last})
            self._last.update(dict.fromkeys(keys, turn.end))
        return turn

    def _leave(self, turn: _Turn) -> None:
        for earlier in turn.before:
            if not earlier.done():  # given up while waiting: it ends when those before it have
                earlier.add_done_callback(lambda _: self._leave(turn))
                return
        with self._lock:
            for key in turn.keys:
                if self._last[key] is turn.end:
                    del self._last[key]
        turn.end.set_result(None)


def _running_future() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # a coroutine that stops waiting cannot cancel it
    return future


@dataclass(frozen=True, slots=True)
class _Turn:
    """A place in the queues of some keys.

    Attributes:
        keys: Whose queues.
        before: The ends of the turns before it.
        end: Resolves when it is over.
    """

    keys: frozenset[Hashable]
    before: set[Future[None]]
    end: Future[None] = field(default_factory=_running_future)


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
