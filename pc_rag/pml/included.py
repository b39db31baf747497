"""Files that modules take their text from: under one root, by no link, of bounded size.

A schema may come from elsewhere than the files around it. So nothing is read without a root, a path
is walked folder by folder without following links, and a file's kind and size are looked at before
its bytes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from pc_rag.pml.names import shorten
from pc_rag.pml.source import location_of_byte

if TYPE_CHECKING:
    from os import PathLike

MAX_FILE_BYTES = 10_000_000
"""Bytes of a file, as many as one text of a document may have."""

_OPENS_BY_FOLDER = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


class IncludeError(Exception):
    """A file that cannot be included: why, and what to do. Becomes a problem of the document."""


class IncludedFiles:
    """The files that one schema includes, each read once.

    Args:
        root: Folder they lie in; ``None`` where a schema may include none.
    """

    def __init__(self, root: str | PathLike[str] | None) -> None:
        self._root = None if root is None else Path(root)
        self._texts: dict[str, str] = {}

    def text(self, src: str) -> str:
        """The characters of a file, exactly.

        Args:
            src: Path below the root, its parts joined by ``/``.

        Raises:
            IncludeError: There is no root, the path leads out of it or over a link, or the file is
                not a regular file of at most ``MAX_FILE_BYTES`` bytes of UTF-8.
        """
        if src not in self._texts:
            self._texts[src] = _decode(self._read(src))
        return self._texts[src]

    def _read(self, src: str) -> bytes:
        if self._root is None:
            raise IncludeError(
                "names a file, which is read under a given root only; pass src_root (--src-root on "
                "the command line)"
            )
        if not _OPENS_BY_FOLDER:
            raise IncludeError(
                "this system cannot open files without following links; put the text itself in"
            )
        parts = _parts(src)
        try:
            return _read_below(self._root, parts)
        except (OSError, UnicodeEncodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise IncludeError(
                f"cannot be read below {str(self._root)!r}: {reason}; check the path and its "
                "permissions"
            ) from error


def _parts(src: str) -> list[str]:
    parts = src.split("/")
    if "\\" in src or "" in parts or "." in parts or ".." in parts:
        raise IncludeError(
            "is not a relative path below the root: names joined by single '/', none of them '.' "
            "or '..', no '\\'"
        )
    return parts


def _read_below(root: Path, parts: list[str]) -> bytes:
    *folders, name = parts
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = _open_unlinked(part, folder, os.O_DIRECTORY)
            os.close(folder)
            folder = inner
        # A pipe without a writer is opened, and refused, at once.
        file = _open_unlinked(name, folder, os.O_NONBLOCK)
    finally:
        os.close(folder)
    try:
        return _read_file(file)
    finally:
        os.close(file)


def _open_unlinked(name: str, folder: int, flags: int) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=folder)
    except OSError as error:
        # Systems differ in the error of a link that is not followed.
        if _is_link(name, folder):
            raise IncludeError(
                f"leads over a link ({shorten(name)!r}), and links are not followed; name the file "
                "itself"
            ) from error
        raise


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _read_file(file: int) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise IncludeError("is not a regular file; name a text file")
    content = b""
    if status.st_size <= MAX_FILE_BYTES:
        with os.fdopen(file, "rb", closefd=False) as stream:
            # One byte more than allowed, so that a file that grows meanwhile is refused as well.
            content = stream.read(MAX_FILE_BYTES + 1)
    num_bytes = max(status.st_size, len(content))
    if num_bytes > MAX_FILE_BYTES:
        raise IncludeError(
            f"has {num_bytes:,} bytes; at most {MAX_FILE_BYTES:,} are allowed: split it up"
        )
    return content


def _decode(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        place = location_of_byte(content, error.start, "utf-8")
        raise IncludeError(
            f"byte 0x{content[error.start]:02x} at its line {place.line}, column {place.column} is "
            "not UTF-8; save the file as UTF-8"
        ) from error
