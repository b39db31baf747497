"""Work that nobody waits for: one thread, which begins when it is first needed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

from pc_rag.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

T = TypeVar("T")

MAX_PENDING = 32
"""Pieces of work that may wait. What came longest ago is least likely to be of use still."""


@dataclass(slots=True)
class _Pending(Generic[T]):
    """Work that waits, and those who want its result."""

    work: Callable[[], T]
    futures: list[Future[T]] = field(default_factory=list)


class BackgroundWork(Generic[T]):
    """Does one piece of work after the other on a thread of its own. Thread-safe.

    Whoever asks for work that waits already, by its key, shares it; once it has begun, it is done
    again. Each has a future of its own, and takes nothing from the others by cancelling it.

    Args:
        thread_name: Of the thread.
        when_closed: What ``submit`` says once this was closed.
    """

    def __init__(self, thread_name: str, *, when_closed: str) -> None:
        self._when_closed = when_closed
        # Futures are cancelled and resolved without it: what waits for them may call in here.
        self._lock = Lock()
        self._pending: dict[Hashable, _Pending[T]] = {}
        self._is_draining = False
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)

    def submit(self, key: Hashable, work: Callable[[], T]) -> Future[T]:
        """Have work done behind all that waits.

        At most ``MAX_PENDING`` pieces wait; of more, the futures of the oldest are cancelled.

        Args:
            key: Names the work: of what waits with one key, the first is done for all.
            work: Long work asks ``is_ending`` between its steps. What it raises is in the futures.

        Raises:
            StoreError: This was closed, or the process is ending.
        """
        own = Future[T]()
        with self._lock:
            if self._is_closed:
                raise StoreError(self._when_closed)
            self._start_draining()
            self._pending = _without_cancelled(self._pending)
            self._pending.setdefault(key, _Pending(work)).futures.append(own)
            crowded_out = []
            while len(self._pending) > MAX_PENDING:
                crowded_out += self._pending.pop(next(iter(self._pending))).futures
        _cancel(crowded_out)
        return own

    def close(self) -> None:
        """Cancel what waits, and wait for what runs. Idempotent."""
        self._refuse_all()
        self._thread.shutdown()

    @property
    def is_ending(self) -> bool:
        """Whether this or the process ends: a process waits for its pools, which take nothing new.

        The pool is asked because nothing else tells: the main thread counts as alive meanwhile.
        """
        try:
            self._thread.submit(int).cancel()
        except RuntimeError:
            return True
        return self._is_closed

    def _start_draining(self) -> None:
        """Have the thread come for what waits; the lock is held, so it comes after that."""
        if self._is_draining:
            return
        try:
            self._thread.submit(self._drain)
        except RuntimeError as error:
            raise StoreError(
                "the process is ending; nothing is done in the background any more"
            ) from error
        self._is_draining = True

    def _drain(self) -> None:
        """Do what waits, oldest first, until nothing does, or the process ends."""
        while (taken := self._take_oldest()) is not None:
            if self.is_ending:
                self._refuse_all()
                _cancel(taken.futures)
                continue
            running = [each for each in taken.futures if each.set_running_or_notify_cancel()]
            if not running:
                continue
            try:
                result = taken.work()
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks the futures
                for future in running:
                    future.set_exception(error)
            else:
                for future in running:
                    future.set_result(result)

    def _take_oldest(self) -> _Pending[T] | None:
        with self._lock:
            if not self._pending:
                self._is_draining = False
                return None
            return self._pending.pop(next(iter(self._pending)))

    def _refuse_all(self) -> None:
        """Cancel what waits; from here on nothing is taken."""
        with self._lock:
            self._is_closed = True
            waiting = [future for each in self._pending.values() for future in each.futures]
            self._pending = {}
        _cancel(waiting)


def _without_cancelled(pending: dict[Hashable, _Pending[T]]) -> dict[Hashable, _Pending[T]]:
    """What still waits for somebody."""
    left = {
        key: _Pending(each.work, [future for future in each.futures if not future.cancelled()])
        for key, each in pending.items()
    }
    return {key: each for key, each in left.items() if each.futures}


def _cancel(futures: Iterable[Future[T]]) -> None:
    for future in futures:
        future.cancel()
