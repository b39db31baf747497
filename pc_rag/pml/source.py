"""The characters of a document, and where its tags stand in them.

lxml knows the line of an element but no column, and no place at all for text. The places come from
one more pass over the characters of a document that lxml has found well-formed, in which every
piece of markup can be told by its first characters.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.errors import PMLSyntaxError, Problem
from pc_rag.pml.nodes import Location
from pc_rag.pml.whitespace import indentation

if TYPE_CHECKING:
    from collections.abc import Iterator

ENCODINGS = ("utf-8", "utf-16", "us-ascii", "iso-8859-1")
"""Encodings that a document of bytes may declare; without a declaration it is UTF-8."""

_DECLARED_ENCODING = re.compile(rb"""\A<\?xml\s[^>]*?encoding\s*=\s*["']([A-Za-z0-9._-]+)["']""")
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MARKUP = re.compile(
    r"""<!--.*?-->|<!\[CDATA\[.*?\]\]>|<\?.*?\?>|<[^!?>"'](?:[^>"']++|"[^"]*+"|'[^']*+')*+>""",
    re.DOTALL,
)
_TAG_NAME = re.compile(r"<[^\s/>]++")
_ATTRIBUTE = re.compile(r"""\s*+([^\s=/>]++)\s*+=\s*+("[^"]*+"|'[^']*+')""")
_PROLOG = re.compile(r"(?:\s|<\?.*?\?>|<!--.*?-->)*+", re.DOTALL)
_DOCTYPE = "<!DOCTYPE"


@dataclass(frozen=True, slots=True)
class Markup:
    """One tag, comment or processing instruction.

    Attributes:
        start: Offset of its ``<``.
        end: Offset behind its ``>``.
        is_empty_element: It is a start tag that ends in ``/>``.
    """

    start: int
    end: int
    is_empty_element: bool


@dataclass(frozen=True, slots=True)
class BrokenValue:
    """An attribute's value that holds a line break or a tab, which XML reads as a space.

    Attributes:
        location: Of the first of them.
        is_tab: It is a tab.
    """

    location: Location
    is_tab: bool


class SourceText:
    """A document as characters, with line feeds as its only line breaks.

    Args:
        text: The characters.
    """

    def __init__(self, text: str) -> None:
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", self.text))]

    def location(self, offset: int) -> Location:
        """Line and column of an offset."""
        line = bisect_right(self._line_starts, offset)
        return Location(line, offset - self._line_starts[line - 1] + 1)

    def text_location(self, offset: int) -> Location:
        """Line and column of the first visible character at or behind an offset."""
        rest = re.compile(r"[ \t\n]*").match(self.text, offset)
        return self.location(rest.end() if rest else offset)

    def line_indentation(self, offset: int) -> str:
        """The whitespace that begins the line of an offset."""
        line = bisect_right(self._line_starts, offset)
        return indentation(self.text, self._line_starts[line - 1])

    def markup(self) -> Iterator[Markup]:
        """Tags, comments and processing instructions in order, of a well-formed document."""
        for match in _MARKUP.finditer(self.text):
            piece = match.group()
            if not piece.startswith("<![CDATA["):
                is_empty = piece.endswith("/>") and not piece.startswith(("<!", "<?"))
                yield Markup(match.start(), match.end(), is_empty)

    def broken_values(self, tag: Markup) -> dict[str, BrokenValue]:
        """The values of a start tag that are not read as they are written, by attribute."""
        name = _TAG_NAME.match(self.text, tag.start)
        if name is None or _first_break(self.text, name.end(), tag.end) < 0:
            return {}
        broken: dict[str, BrokenValue] = {}
        attribute = _ATTRIBUTE.match(self.text, name.end(), tag.end)
        while attribute is not None:
            offset = _first_break(self.text, *attribute.span(2))
            if offset >= 0:
                place = self.location(offset)
                broken[attribute.group(1)] = BrokenValue(place, is_tab=self.text[offset] == "\t")
            attribute = _ATTRIBUTE.match(self.text, attribute.end(), tag.end)
        return broken

    def doctype_location(self) -> Location | None:
        """Where the document declares a DTD; ``None`` where it does not."""
        prolog = _PROLOG.match(self.text)
        offset = prolog.end() if prolog else 0
        return self.location(offset) if self.text.startswith(_DOCTYPE, offset) else None


def location_of_byte(document: bytes, offset: int, encoding: str) -> Location:
    """Line and column of a byte that cannot be decoded; all before it can."""
    before = SourceText(document[:offset].decode(encoding, errors="replace"))
    return before.location(len(before.text))


def decode(document: str | bytes, source: str) -> SourceText:
    """The characters of a document.

    Args:
        document: Characters, or bytes in one of ``ENCODINGS``.
        source: Name of the document, for errors.

    Raises:
        PMLSyntaxError: The bytes are not in the encoding they declare, or declare another one, or
            the characters cannot be written as UTF-8. Or it is neither characters nor bytes.
    """
    if isinstance(document, bytes):
        document = _decode_bytes(document, source)
    if not isinstance(document, str):
        problem = f"a document is str or bytes; got {type(document).__name__}"
        raise PMLSyntaxError(problem, source)
    text = SourceText(document)
    try:
        text.text.encode()
    except UnicodeEncodeError as error:
        place = text.location(error.start)
        problem = f"{text.text[error.start]!r} is half of a surrogate pair and no character of XML"
        raise PMLSyntaxError((Problem(place.line, place.column, problem),), source) from error
    return text


def _decode_bytes(document: bytes, source: str) -> str:
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if document.startswith(mark)), None)
    if encoding is None:
        declared = _DECLARED_ENCODING.match(document)
        encoding = declared.group(1).decode().lower() if declared else "utf-8"
        if encoding not in (*ENCODINGS, "ascii", "latin-1"):
            problem = (
                f"encoding {encoding!r} is not one of {', '.join(ENCODINGS)}; save it as UTF-8"
            )
            raise PMLSyntaxError((Problem(1, 1, problem),), source)
    try:
        return document.decode(encoding)
    except UnicodeDecodeError as error:
        place = location_of_byte(document, error.start, encoding)
        problem = (
            f"byte 0x{document[error.start]:02x} is not {encoding.removesuffix('-sig')}; save the "
            "document as UTF-8, or declare its encoding in the first line"
        )
        raise PMLSyntaxError((Problem(place.line, place.column, problem),), source) from error


def _first_break(text: str, start: int, end: int) -> int:
    """Offset of the first line feed or tab in a part of a text; -1 where there is none."""
    found = [offset for mark in "\n\t" if (offset := text.find(mark, start, end)) >= 0]
    return min(found, default=-1)
