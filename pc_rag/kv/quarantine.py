"""Damaged files, set aside with the reason, so that they are never served and can be looked at."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from pc_rag.kv.safe_files import make_folder

if TYPE_CHECKING:
    from pathlib import Path

_REASON_SUFFIX = ".reason.txt"
_MAX_FILES = 32


class Quarantine:
    """A folder of damaged files; the newest 32 are kept.

    Not thread-safe: the tier calls it under its lock.

    Args:
        folder: Where they go; exists.

    Raises:
        OSError: The folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with os.scandir(folder) as found:
            names = sorted(item.name for item in found if not item.name.endswith(_REASON_SUFFIX))
        self._files: deque[tuple[str, int]] = deque((name, self._size(name)) for name in names)

    @property
    def num_bytes(self) -> int:
        """Bytes that the set-aside files occupy."""
        return sum(size for _, size in self._files)

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names the set-aside files had, oldest first."""
        return tuple(name.partition("-")[2] for name, _ in self._files)

    def take(self, path: Path, reason: str) -> None:
        """Move a file here and write down why. A link is moved, not what it points to.

        Raises:
            StoreIOError: The quarantine is a link.
            OSError: The file cannot be moved.
        """
        # Names sort by time; twenty digits are enough for nanoseconds.
        name = f"{time.time_ns():020d}-{path.name}"
        make_folder(self._folder)  # it may have been deleted under a running process
        path.rename(self._folder / name)
        with contextlib.suppress(OSError):  # the file is out of the way; the note is a courtesy
            (self._folder / (name + _REASON_SUFFIX)).write_text(reason + "\n", encoding="utf-8")
        self._files.append((name, self._size(name)))
        while len(self._files) > _MAX_FILES:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Delete the file that was set aside first. Whether there was one."""
        if not self._files:
            return False
        name, _ = self._files.popleft()
        for leftover in (name, name + _REASON_SUFFIX):
            with contextlib.suppress(OSError):  # deleted by hand, or a folder: not worth a failure
                (self._folder / leftover).unlink()
        return True

    def _size(self, name: str) -> int:
        size = 0
        for part in (name, name + _REASON_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                size += (self._folder / part).lstat().st_size
        return size
