"""One lock per key, so that work on one entry never waits for work on another."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.types import ModuleKey


class _CountedLock:
    """A lock and the number of threads that hold it or wait for it."""

    __slots__ = ("lock", "num_users")

    def __init__(self) -> None:
        self.lock = Lock()
        self.num_users = 0


class KeyedLocks:
    """Locks made when a key is first asked for, and dropped when its last user is done."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_key: dict[ModuleKey, _CountedLock] = {}

    @contextmanager
    def hold(self, key: ModuleKey) -> Iterator[None]:
        """Exclude every other holder of the same key. Not reentrant."""
        with self._lock:
            counted = self._by_key.setdefault(key, _CountedLock())
            counted.num_users += 1
        try:
            with counted.lock:
                yield
        finally:
            with self._lock:
                counted.num_users -= 1
                if not counted.num_users:
                    del self._by_key[key]
