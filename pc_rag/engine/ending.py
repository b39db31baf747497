"""Ending generations: at once, or a little later where the garbage collector is at work.

The end of a generation takes locks: of the store, of the exact prefix cache, of the buffers. Python
ends a forgotten stream wherever it likes to collect cycles, also in the middle of code that holds
one of those locks, which are not reentrant: the thread would wait for itself. So what the collector
ends is only noted, and done by the next call of the engine that comes by without a lock.
"""

from __future__ import annotations

import gc
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_thread = threading.local()


def _note_collection(phase: str, _info: dict[str, Any]) -> None:
    _thread.is_collecting = phase == "start"


gc.callbacks.append(_note_collection)  # the only way to learn it; called on the collecting thread


def is_collecting() -> bool:
    """Whether the garbage collector runs on this very thread, below the caller."""
    return getattr(_thread, "is_collecting", False)


class Endings:
    """What remains to be done at the ends of one engine's generations. Thread-safe."""

    def __init__(self) -> None:
        # Its ``put`` may interrupt any other call of it, which no lock around a list would allow.
        self._deferred: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def do(self, ending: Callable[[], None]) -> None:
        """Do it, and what was deferred before; or defer it where the collector runs.

        Args:
            ending: May take locks. Called once, by this thread or another.
        """
        if is_collecting():
            self._deferred.put(ending)
            return
        ending()
        self.do_deferred()

    def do_deferred(self) -> None:
        """Do what was deferred. Not to be called by who holds a lock."""
        while not is_collecting():
            try:
                ending = self._deferred.get_nowait()
            except Empty:
                return
            ending()
