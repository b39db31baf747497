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
from pc_rag.kv.file_format import read_header, write_entry
from pc_rag.kv.generation_file import read_or_make_generation
from pc_rag.kv.safe_files import (
    FILE_MODE,
    FOLDER_MODE,
    NO_BLOCK,
    SAFE_FLAGS,
    TEMPORARY_SUFFIX,
    check_file,
    make_folder,
    refuse_linked_folders,
    sync_folder,
)
from pc_rag.types import ModuleKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pc_rag.kv.entry import Entry

_ENTRIES, _PINS, _QUARANTINE = "entries", "pins", "quarantine"
_ORPHAN_SECONDS = 3600.0
"""A temporary file this old was left by a crash; a younger one may be another process's."""

_FAN_OUT_DIGITS = 2


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
        self._entries = self._root / _ENTRIES
        self._pins = self._root / _PINS
        self._make_folders()
        self._owner = self._root.stat().st_uid

    @property
    def root(self) -> Path:
        """The root, resolved."""
        return self._root

    @property
    def quarantine(self) -> Path:
        """Where damaged files go."""
        return self._root / _QUARANTINE

    def _make_folders(self) -> None:
        """Make what is not there: also under a running process the folder may have been deleted."""
        self._root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        for name in (_ENTRIES, _PINS, _QUARANTINE):
            make_folder(self._root / name)

    def generation(self) -> str:
        """The id of the entries that lie here; see ``read_or_make_generation``.

        Raises:
            StoreIOError: The folder of the entries is a link.
            OSError: The medium failed.
        """
        self._make_folders()
        return read_or_make_generation(self._entries, owner=self._owner)

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
                _drop_orphan(first, oldest)
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
        self._make_folders()
        make_folder(path.parent.parent)
        make_folder(path.parent)
        temporary = path.parent / f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_FLAGS
            with FileIO(os.open(temporary, flags, FILE_MODE), "w") as file:
                write_entry(file, entry)
                os.fsync(file.fileno())
            if pinned:
                self.pin(entry.address.key)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # a scan deletes what stays behind
                temporary.unlink()
            raise
        sync_folder(path.parent)

    def open(self, name: EntryName) -> FileIO:
        """Open an entry's file for reading; the caller closes it.

        Raises:
            FileNotFoundError: There is none.
            CorruptEntry: It is a link, no regular file, or another user's.
            StoreIOError: A folder on the way is a link.
            OSError: The medium failed.
        """
        path = self.path_of(name)
        refuse_linked_folders(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | NO_BLOCK | SAFE_FLAGS)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptEntry(f"{path} is a link; a store follows none") from error
            raise
        try:
            check_file(path, os.fstat(descriptor), owner=self._owner)
            return FileIO(descriptor, "r")
        except BaseException:
            os.close(descriptor)
            raise

    def size_of(self, name: EntryName) -> int | None:
        """Bytes of an entry's file; ``None`` where there is no regular file.

        Raises:
            StoreIOError: A folder on the way is a link.
            OSError: The medium failed.
        """
        path = self.path_of(name)
        refuse_linked_folders(path)
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
        refuse_linked_folders(folder / key)
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
        refuse_linked_folders(path)
        path.unlink(missing_ok=True)
        self.unpin(name.key)

    def pin(self, key: ModuleKey) -> None:
        """Mark an entry as pinned, durably.

        Raises:
            StoreIOError: The folder of the pins is a link.
            OSError: The medium failed.
        """
        make_folder(self._pins)  # it may have been deleted under a running process
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_FLAGS
            os.close(os.open(self._pins / key, flags, FILE_MODE))
            sync_folder(self._pins)

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
    except FileNotFoundError:  # another process was faster
        return None
    name = EntryName.parse(item.name)
    if name is None:
        _drop_orphan(item, oldest)
        return None
    return FoundEntry(name, status.st_size, status.st_mtime_ns, name.key in pinned)


def _drop_orphan(item: os.DirEntry[str], oldest: float) -> None:
    """Delete a temporary file that a crash left behind."""
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        is_temporary = item.name.endswith(TEMPORARY_SUFFIX)
        if is_temporary and item.stat(follow_symlinks=False).st_mtime < oldest:
            Path(item.path).unlink()


def read_starts(folder: EntryFolder, names: Iterable[EntryName]) -> tuple[int, ...]:
    """Where entries were encoded, as their files' headers say; rising, each start once.

    Damaged files and those that are gone are passed over.

    Raises:
        StoreIOError: The medium failed.
    """
    starts: set[int] = set()
    for name in names:
        try:
            with folder.open(name) as file:
                starts.add(read_header(file).start)
        except (FileNotFoundError, CorruptEntry):
            continue
        except OSError as error:
            raise io_error("read", folder.path_of(name), error) from error
    return tuple(sorted(starts))


def io_error(doing: str, path: Path, error: OSError) -> StoreIOError:
    """What a tier on disk raises where its medium failed at doing something."""
    return StoreIOError(
        f"disk tier: cannot {doing} {path}: {error.strerror or error}; the entry may be intact: "
        f"check the medium and the permissions, then try again"
    )
