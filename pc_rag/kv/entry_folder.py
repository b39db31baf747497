"""The folder of a disk tier: names, atomic publish, pins. ``docs/disk-format.md`` shows it.

The folder is the truth. There is no index file that could disagree with it after a crash: all that
a scan needs stands in the file names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from pc_rag.errors import CorruptEntry, StoreError, StoreIOError
from pc_rag.kv.entry_name import EntryName
from pc_rag.kv.file_format import write_entry
from pc_rag.types import ModuleKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.kv.entry import Entry

_ENTRIES, _PINS, _QUARANTINE = "entries", "pins", "quarantine"
_TEMPORARY_SUFFIX = ".tmp"
_ORPHAN_SECONDS = 3600.0
"""A temporary file this old was left by a crash; a younger one may be another process's."""

_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_FAN_OUT_DIGITS = 2

# What a platform lacks costs the protection, not the function.
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_NO_BLOCK: int = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe must not wait for a writer
_COMMON: int = _NO_FOLLOW | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """An entry's file met by a scan.

    Attributes:
        name: What it says it holds.
        num_bytes: Its size.
        used_ns: Its modification time, which a tier sets at every use.
        is_pinned: Whether it has a pin.
    """

    name: EntryName
    num_bytes: int
    used_ns: int
    is_pinned: bool


class EntryFolder:
    """Files of entries below one root folder, which is made where it does not exist.

    Args:
        root: The folder. It may itself be a link; nothing below it may.

    Raises:
        StoreError: This machine is big-endian.
        StoreIOError: A folder below the root is a link.
        OSError: The folders cannot be made.
    """

    def __init__(self, root: Path) -> None:
        if sys.byteorder != "little":
            raise StoreError("disk tier: the file format is little-endian, this machine is not")
        self._root = root.expanduser().resolve()
        self._root.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        for name in (_ENTRIES, _PINS, _QUARANTINE):
            _make_folder(self._root / name)
        self._entries = self._root / _ENTRIES
        self._pins = self._root / _PINS
        self._owner = self._root.stat().st_uid

    @property
    def root(self) -> Path:
        """The root, resolved."""
        return self._root

    @property
    def quarantine(self) -> Path:
        """Where damaged files go."""
        return self._root / _QUARANTINE

    def path_of(self, name: EntryName) -> Path:
        """Where the file of an entry lies: ``entries/ab/cd/abcd….safetensors``."""
        first, second = _fan_out(name.key)
        return self._entries / first / second / name.file_name

    def scan(self) -> Iterator[FoundEntry]:
        """Every entry's file, in no order. Temporary files of crashed runs are deleted on the way.

        Raises:
            OSError: A folder cannot be read.
        """
        pinned = {item.name for item in _scan(self._pins)}
        oldest = time.time() - _ORPHAN_SECONDS
        for first in _scan(self._entries):
            if not first.is_dir(follow_symlinks=False):
                continue
            for second in _scan(first.path):
                if not second.is_dir(follow_symlinks=False):
                    continue
                for item in _scan(second.path):
                    found = _found_entry(item, pinned, oldest)
                    if found is not None and _fan_out(found.name.key) == (first.name, second.name):
                        yield found

    def publish(self, entry: Entry, *, pinned: bool) -> None:
        """Write an entry so that it is there completely or not at all, and survives a crash.

        Raises:
            OSError: The medium failed; nothing is visible.
            StoreError: The entry cannot be written.
            StoreIOError: A folder on the way is a link.
        """
        path = self.path_of(EntryName.of(entry.address))
        _make_folder(path.parent.parent)
        _make_folder(path.parent)
        temporary = path.parent / f".{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON
            with FileIO(os.open(temporary, flags, _FILE_MODE), "w") as file:
                write_entry(file, entry)
                os.fsync(file.fileno())
            if pinned:
                self.pin(entry.address.key)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # a scan deletes what stays behind
                temporary.unlink()
            raise
        _sync_folder(path.parent)

    def open(self, name: EntryName) -> FileIO:
        """Open an entry's file for reading; the caller closes it.

        Raises:
            FileNotFoundError: There is none.
            CorruptEntry: It is a link, no regular file, or another user's.
            StoreIOError: A folder on the way is a link.
            OSError: The medium failed.
        """
        path = self.path_of(name)
        _refuse_linked_folders(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | _NO_BLOCK | _COMMON)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptEntry(f"{path} is a link; a store follows none") from error
            raise
        try:
            self._check_file(path, os.fstat(descriptor))
            return FileIO(descriptor, "r")
        except BaseException:
            os.close(descriptor)
            raise

    def _check_file(self, path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise CorruptEntry(f"{path} is no regular file")
        if status.st_uid not in (self._owner, _own_user()):
            raise CorruptEntry(
                f"{path} belongs to user {status.st_uid}, the store to user {self._owner}"
            )

    def size_of(self, name: EntryName) -> int | None:
        """Bytes of an entry's file; ``None`` where there is no regular file.

        Raises:
            StoreIOError: A folder on the way is a link.
            OSError: The medium failed.
        """
        path = self.path_of(name)
        _refuse_linked_folders(path)
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def find(self, key: ModuleKey) -> EntryName | None:
        """The full name of an entry of which only the key is known.

        Raises:
            StoreIOError: A folder on the way is a link.
            OSError: The medium failed.
        """
        first, second = _fan_out(key)
        folder = self._entries / first / second
        _refuse_linked_folders(folder / key)
        names = (EntryName.parse(item.name) for item in _scan(folder))
        return next((name for name in names if name is not None and name.key == key), None)

    def touch(self, name: EntryName) -> None:
        """Note a use, so that the order of eviction outlives the process. A courtesy: may fail."""
        with contextlib.suppress(OSError, NotImplementedError):
            os.utime(self.path_of(name), follow_symlinks=False)

    def delete(self, name: EntryName) -> None:
        """Delete an entry's file and its pin; harmless where they are gone.

        Raises:
            StoreIOError: A folder on the way is a link.
            OSError: The medium failed.
        """
        path = self.path_of(name)
        _refuse_linked_folders(path)
        path.unlink(missing_ok=True)
        self.unpin(name.key)

    def pin(self, key: ModuleKey) -> None:
        """Mark an entry as pinned, durably.

        Raises:
            OSError: The medium failed.
        """
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON
            os.close(os.open(self._pins / key, flags, _FILE_MODE))
            _sync_folder(self._pins)

    def unpin(self, key: ModuleKey) -> None:
        """Take the mark away; harmless where there is none.

        Raises:
            OSError: The medium failed.
        """
        (self._pins / key).unlink(missing_ok=True)

    def is_pinned(self, key: ModuleKey) -> bool:
        """Whether an entry is marked, by whatever process."""
        return (self._pins / key).exists()

    def drop_stray_pins(self, keys: frozenset[ModuleKey]) -> None:
        """Delete old pins of entries that are not among ``keys``: left by a crash between the two.

        Raises:
            OSError: The folder cannot be read.
        """
        oldest = time.time() - _ORPHAN_SECONDS
        for item in _scan(self._pins):
            with contextlib.suppress(FileNotFoundError):
                if item.name not in keys and item.stat(follow_symlinks=False).st_mtime < oldest:
                    self.unpin(ModuleKey(item.name))


def _fan_out(key: ModuleKey) -> tuple[str, str]:
    return key[:_FAN_OUT_DIGITS], key[_FAN_OUT_DIGITS : 2 * _FAN_OUT_DIGITS]


def _own_user() -> int:
    get_user = getattr(os, "geteuid", None)
    return 0 if get_user is None else int(get_user())  # where there are no users, all is user 0's


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing where another process has just deleted it."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def _found_entry(item: os.DirEntry[str], pinned: set[str], oldest: float) -> FoundEntry | None:
    try:
        if not item.is_file(follow_symlinks=False):
            return None
        status = item.stat(follow_symlinks=False)
        if item.name.endswith(_TEMPORARY_SUFFIX) and status.st_mtime < oldest:
            Path(item.path).unlink()
    except FileNotFoundError:  # another process was faster
        return None
    name = EntryName.parse(item.name)
    if name is None:
        return None
    return FoundEntry(name, status.st_size, status.st_mtime_ns, name.key in pinned)


def _is_linked(folder: Path) -> bool:
    try:
        return not stat.S_ISDIR(folder.lstat().st_mode)
    except FileNotFoundError:
        return False


def _refuse_linked_folders(path: Path) -> None:
    for folder in (path.parent.parent, path.parent):
        if _is_linked(folder):
            raise StoreIOError(
                f"{folder} is a link or no folder; a store follows none: put a folder in its place"
            )


def _make_folder(folder: Path) -> None:
    """Make a folder that survives a crash, or check that it is one."""
    try:
        folder.mkdir(mode=_FOLDER_MODE)
    except FileExistsError:
        if _is_linked(folder):
            raise StoreIOError(
                f"{folder} is a link or no folder; a store follows none: put a folder in its place"
            ) from None
        return
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, on platforms that let a folder be opened."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _COMMON)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
