"""The file that names the generation of a folder of entries. ``docs/disk-format.md`` shows it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from io import FileIO
from typing import TYPE_CHECKING

from pc_rag.errors import CorruptEntry, StoreIOError
from pc_rag.kv.safe_files import (
    FILE_MODE,
    NO_BLOCK,
    SAFE_FLAGS,
    TEMPORARY_SUFFIX,
    check_file,
    sync_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "generation"

_NUM_BYTES = 33
_FORM = re.compile(rb"([0-9a-f]{32})\n")

_NUM_TRIES = 8
"""A file that something goes on deleting is a failure, not a reason to try for ever."""


def read_or_make_generation(folder: Path, *, owner: int) -> str:
    """The generation of the entries in a folder: 32 hex digits, made where there is none.

    The file lies among the entries, so who deletes them deletes it. Of processes that make one at
    once one wins, and all return the same.

    Args:
        folder: Holds the entries; exists.
        owner: The user it belongs to. Another user's file is damaged, and so is a link.

    Raises:
        StoreIOError: The file does not stay.
        OSError: The medium failed.
    """
    path = folder / FILE_NAME
    for _ in range(_NUM_TRIES):
        found = _read(path, owner)
        if found is not None:
            return found
        _make(path)
    raise StoreIOError(f"{path} does not stay: something deletes or damages it; find out what")


def _read(path: Path, owner: int) -> str | None:
    """What the file says; ``None`` where there is none. One that is damaged is deleted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_BLOCK | SAFE_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        path.unlink(missing_ok=True)  # the link, not what it points to
        return None
    try:
        check_file(path, os.fstat(descriptor), owner=owner)
        found = _FORM.fullmatch(os.read(descriptor, _NUM_BYTES + 1))
    except CorruptEntry:
        found = None
    finally:
        os.close(descriptor)
    if found is None:
        path.unlink(missing_ok=True)
        return None
    return found[1].decode()


def _make(path: Path) -> None:
    """Write a new one, complete when it is visible, unless another process was faster."""
    temporary = path.parent / f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE_FLAGS
        with FileIO(os.open(temporary, flags, FILE_MODE), "w") as file:
            file.write(f"{secrets.token_hex(_NUM_BYTES // 2)}\n".encode())
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename it never takes another's place
        except FileExistsError:
            return
        except (OSError, NotImplementedError):  # a file system without hard links
            temporary.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # a scan deletes what stays behind
            temporary.unlink()
