"""Which entries go first when room is needed. Policies see keys and sizes, never tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.types import ModuleKey


class EvictionPolicy(Protocol):
    """Orders what may be evicted.

    A tier tells its policy what comes, is used and goes, under the tier's own lock. Pinned entries
    are not told; leased ones are, and the tier skips them.
    """

    def added(self, key: ModuleKey, num_bytes: int) -> None:
        """An entry of ``num_bytes`` may be evicted from now on; it counts as just used."""
        ...

    def used(self, key: ModuleKey) -> None:
        """An entry was served. Keys that were never added are ignored."""
        ...

    def removed(self, key: ModuleKey) -> None:
        """An entry is gone or pinned. Keys that were never added are ignored."""
        ...

    def candidates(self) -> Iterator[ModuleKey]:
        """Every key that was added, the first to go first. The order is not changed by asking."""
        ...


class LruPolicy:
    """Least recently used goes first."""

    def __init__(self) -> None:
        self._num_bytes: OrderedDict[ModuleKey, int] = OrderedDict()

    def added(self, key: ModuleKey, num_bytes: int) -> None:
        """See ``EvictionPolicy.added``."""
        self._num_bytes[key] = num_bytes
        self._num_bytes.move_to_end(key)

    def used(self, key: ModuleKey) -> None:
        """See ``EvictionPolicy.used``."""
        if key in self._num_bytes:
            self._num_bytes.move_to_end(key)

    def removed(self, key: ModuleKey) -> None:
        """See ``EvictionPolicy.removed``."""
        self._num_bytes.pop(key, None)

    def candidates(self) -> Iterator[ModuleKey]:
        """See ``EvictionPolicy.candidates``."""
        return iter(self._num_bytes)
