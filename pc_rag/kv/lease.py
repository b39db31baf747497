"""The lease that every tier hands out."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pc_rag.kv.entry import Entry
    from pc_rag.types import Tier


class EntryLease:
    """A claim on one entry; see ``pc_rag.kv.base.Lease``.

    Args:
        entry: The entry, its tensors on the device that was asked for.
        tier: The tier that the bytes came from.
        load_seconds: Time spent bringing them to the device.
        on_release: Called once, when the claim is given back.
    """

    __slots__ = ("_entry", "_load_seconds", "_lock", "_on_release", "_tier")

    def __init__(
        self, entry: Entry, *, tier: Tier, load_seconds: float, on_release: Callable[[], None]
    ) -> None:
        self._entry = entry
        self._tier = tier
        self._load_seconds = load_seconds
        self._on_release: Callable[[], None] | None = on_release
        self._lock = Lock()

    @property
    def entry(self) -> Entry:
        """The entry, its tensors on the device that was asked for. Not to be modified."""
        return self._entry

    @property
    def tier(self) -> Tier:
        """The tier that the bytes came from."""
        return self._tier

    @property
    def load_seconds(self) -> float:
        """Time spent bringing the bytes to the device."""
        return self._load_seconds

    def release(self) -> None:
        """Give the claim back. Harmless when it was given back before."""
        with self._lock:
            on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
