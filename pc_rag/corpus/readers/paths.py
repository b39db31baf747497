"""Files, folders and globs to documents, saying of every file that was left out why."""

from __future__ import annotations

import glob
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pc_rag.corpus.documents import Document
from pc_rag.corpus.readers.html import html_to_text
from pc_rag.corpus.readers.pdf import pdf_pages
from pc_rag.corpus.readers.text import decode_text
from pc_rag.errors import IngestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_HTML = frozenset({".html", ".htm", ".xhtml"})
_PDF = ".pdf"


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file, or a page of one, that gave no document.

    Attributes:
        path: The file.
        reason: Why, with the byte or page where that applies.
    """

    path: str
    reason: str


class PathReader:
    """The documents of some paths, read while iterating; made by ``read_paths``.

    Attributes:
        skipped: What gave no document in the last iteration; complete when the iteration is.
    """

    def __init__(self, files: Iterable[Path], skipped: list[SkippedFile]) -> None:
        self._files = files
        self.skipped = skipped

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        for path in self._files:
            try:
                yield from self._read(path)
            except IngestError as error:
                self.skipped.append(SkippedFile(str(path), str(error)))
            except OSError as error:
                self.skipped.append(SkippedFile(str(path), error.strerror or str(error)))

    def _read(self, path: Path) -> Iterator[Document]:
        name = str(path)
        # A pipe or a device would block for ever, so its kind is asked before it is opened.
        if not stat.S_ISREG(path.stat().st_mode):
            raise IngestError("not a regular file")
        data = path.read_bytes()
        metadata = {"file_name": path.name}
        suffix = path.suffix.lower()
        if suffix == _PDF:
            yield from self._pdf(data, name, metadata)
            return
        if suffix in _HTML:
            text, title = html_to_text(data, name)
            metadata |= {"title": title} if title else {}
        else:
            text = decode_text(data, name)
        if not text.strip():
            raise IngestError("holds no text")
        yield Document(text, id=name, source=name, metadata=metadata)

    def _pdf(self, data: bytes, name: str, metadata: dict[str, str]) -> Iterator[Document]:
        for number, text in enumerate(pdf_pages(data, name), start=1):
            if text:
                page = {**metadata, "page": str(number)}
                yield Document(text, id=f"{name}#page={number}", source=name, metadata=page)
            else:
                self.skipped.append(
                    SkippedFile(name, f"page {number} holds no text; a scan needs OCR first")
                )


def read_paths(
    paths: Iterable[str | Path],
    *,
    recursive: bool = True,
    exclude: Iterable[str | Path] = (),
) -> PathReader:
    """Read files, folders and globs in the order given, each file once.

    Of a folder: its files in sorted order; hidden files and folders are left out, and so are links
    that lead out of the folder. ``.html`` becomes the text one sees, ``.pdf`` one document a page,
    and everything else that is UTF-8 is kept as written (Markdown, reStructuredText, code). A
    file's id and source are its absolute path, so that a changed file replaces its old version
    whichever folder the next run starts in; ``file_name``, ``title`` and ``page`` are metadata.

    Args:
        paths: Files, folders, or globs (``**`` for any depth).
        recursive: Whether to go down into the folders of a folder.
        exclude: Files and folders to leave out, such as the store itself.

    Returns:
        An iterable of documents that reads as it goes and collects in ``skipped`` what it left out:
        binary files, files that are not UTF-8, damaged PDFs, unreadable files, links out.

    Raises:
        IngestError: A path does not exist, or a glob matches nothing. Raised before anything is
            read.
    """
    skipped: list[SkippedFile] = []
    roots = [root for path in paths for root in _expand(os.fspath(path))]
    left_out = frozenset(Path(path).resolve() for path in exclude)
    files = _Files(roots, recursive=recursive, exclude=left_out, skipped=skipped)
    return PathReader(files, skipped)


@dataclass(frozen=True, slots=True)
class _Root:
    """A path to read, and the folder that links may not lead out of (``None``: named outright)."""

    path: Path
    boundary: Path | None


def _expand(path: str) -> list[_Root]:
    if Path(path).exists():
        whole = _absolute(path)
        return [_Root(whole, whole if whole.is_dir() else None)]
    # glob.glob, since Path.glob takes no absolute pattern.
    matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []  # noqa: PTH207
    if not matches:
        raise IngestError(
            f"{path}: no such file or folder, and no match as a glob; check the spelling and the "
            f"current folder"
        )
    fixed = Path()
    for part in Path(path).parts:
        if glob.has_magic(part):
            break
        fixed /= part
    boundary = fixed.resolve()
    return [_Root(_absolute(match), boundary) for match in matches]


def _absolute(path: str) -> Path:
    """The path without ``..`` or linked folders; a linked file keeps the link's name."""
    given = Path(path)
    return given.resolve() if given.is_dir() else given.parent.resolve() / given.name


class _Files:
    """The files under some roots, each once, in order."""

    def __init__(
        self,
        roots: list[_Root],
        *,
        recursive: bool,
        exclude: frozenset[Path],
        skipped: list[SkippedFile],
    ) -> None:
        self._roots = roots
        self._exclude = exclude
        self._recursive = recursive
        self._skipped = skipped

    def __iter__(self) -> Iterator[Path]:
        seen: set[Path] = set()
        for root in self._roots:
            for path in self._walk(root.path, root.boundary):
                if path not in seen:
                    seen.add(path)
                    yield path

    def _walk(self, path: Path, boundary: Path | None) -> Iterator[Path]:
        try:
            resolved = path.resolve()
        except RuntimeError:  # what Python up to 3.12 raises for it
            self._skipped.append(SkippedFile(str(path), "a loop of links"))
            return
        if resolved in self._exclude:
            return
        if boundary is not None and not resolved.is_relative_to(boundary):
            self._skipped.append(SkippedFile(str(path), "a link that leads out of the folder"))
        elif not path.is_dir():
            yield path
        elif path != boundary and path.is_symlink():
            self._skipped.append(SkippedFile(str(path), "a link to a folder"))
        else:
            yield from self._walk_folder(path, boundary)

    def _walk_folder(self, folder: Path, boundary: Path | None) -> Iterator[Path]:
        try:
            paths = sorted(folder.iterdir())
        except OSError as error:
            self._skipped.append(SkippedFile(str(folder), error.strerror or str(error)))
            return
        for path in paths:
            if path.name.startswith(".") or (path.is_dir() and not self._recursive):
                continue
            yield from self._walk(path, boundary)
