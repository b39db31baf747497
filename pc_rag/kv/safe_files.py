"""Files and folders that no link leads out of, and that survive a crash."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from pc_rag.errors import CorruptEntry, StoreIOError

if TYPE_CHECKING:
    from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700
TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is being written."""

# What a platform lacks costs the protection, not the function.
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NO_BLOCK: int = getattr(os, "O_NONBLOCK", 0)  # opening a named pipe must not wait for a writer
SAFE_FLAGS: int = _NO_FOLLOW | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Of every ``os.open``: a link at the end of the path is an error."""


def check_file(path: Path, status: os.stat_result, *, owner: int) -> None:
    """Refuse what is no file of this store.

    Args:
        path: Its path, for the message.
        status: Of the file as it was opened.
        owner: The user whose folder it lies in.

    Raises:
        CorruptEntry: It is no regular file, or another user's.
    """
    if not stat.S_ISREG(status.st_mode):
        raise CorruptEntry(f"{path} is no regular file")
    if status.st_uid not in (owner, _own_user()):
        raise CorruptEntry(f"{path} belongs to user {status.st_uid}, the store to user {owner}")


def _own_user() -> int:
    get_user = getattr(os, "geteuid", None)
    return 0 if get_user is None else int(get_user())  # where there are no users, all is user 0's


def _is_linked(folder: Path) -> bool:
    try:
        return not stat.S_ISDIR(folder.lstat().st_mode)
    except FileNotFoundError:
        return False


def refuse_linked_folders(path: Path) -> None:
    """Refuse a path that leads through a link: the two folders above it are looked at.

    Raises:
        StoreIOError: One of them is a link or no folder.
    """
    for folder in (path.parent.parent, path.parent):
        if _is_linked(folder):
            raise StoreIOError(
                f"{folder} is a link or no folder; a store follows none: put a folder in its place"
            )


def make_folder(folder: Path) -> None:
    """Make a folder that survives a crash, or check that it is one.

    Raises:
        StoreIOError: It is a link or no folder.
        OSError: The medium failed.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if _is_linked(folder):
            raise StoreIOError(
                f"{folder} is a link or no folder; a store follows none: put a folder in its place"
            ) from None
        return
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, on platforms that let a folder be opened."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | SAFE_FLAGS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
