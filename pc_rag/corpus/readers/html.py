"""Text of an HTML page: what a reader of the page sees, blocks on lines of their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pc_rag.corpus.readers.text import decode_text, refuse_binary
from pc_rag.errors import IngestError, require

if TYPE_CHECKING:
    from bs4 import BeautifulSoup
    from bs4.element import PageElement

_UNSEEN = frozenset(
    {"script", "style", "template", "noscript", "head", "title", "svg", "iframe", "object"}
)
_PARAGRAPHS = frozenset(
    {
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "details",
        "dialog",
        "div",
        "dl",
        "fieldset",
        "figure",
        "footer",
        "form",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "header",
        "hgroup",
        "hr",
        "html",
        "main",
        "nav",
        "ol",
        "p",
        "pre",
        "section",
        "table",
        "ul",
    }
)
_LINES = frozenset(
    {"br", "caption", "dd", "dt", "figcaption", "legend", "li", "option", "summary", "tr"}
)
_CELLS = frozenset({"td", "th"})
_SEPARATORS = ("", " ", " | ", "\n", "\n\n")
"""What may stand between two texts, weakest first."""
_WHITESPACE = re.compile(r"[ \t\n\r\f]+")


def html_to_text(data: bytes, source: str) -> tuple[str, str]:
    """The visible text of a page, and its title.

    Scripts, styles and comments are dropped; blocks are separated by an empty line, lines of a list
    or table by a line end, cells by ``|``; preformatted text keeps its whitespace.

    Args:
        data: The page's bytes: UTF-8, or the encoding it declares.
        source: Its name, for messages.

    Returns:
        Text and title; the title is empty where the page has none.

    Raises:
        IngestError: The bytes cannot be decoded.
        MissingDependencyError: beautifulsoup4 is not installed.
    """
    bs4 = require("bs4", feature="reading HTML", extra="documents")
    # html.parser builds any depth of nesting without recursion; lxml's HTML parser cuts it.
    soup: BeautifulSoup = bs4.BeautifulSoup(_decode(data, source), "html.parser")
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    return _visible_text(soup, (bs4.NavigableString, bs4.CData)), title


def _decode(data: bytes, source: str) -> str:
    dammit = require("bs4.dammit", feature="reading HTML", extra="documents")
    refuse_binary(data, source)
    declared = dammit.EncodingDetector.find_declared_encoding(data, is_html=True)
    try:
        return decode_text(data, source)
    except IngestError:
        if not declared:
            raise
    try:
        return data.decode(declared)
    except (LookupError, UnicodeDecodeError) as error:
        raise IngestError(
            f"{source}: the page declares the encoding {declared!r}, but: {error}"
        ) from error


class _Writer:
    """Collects text; of the separators between two texts the strongest stays."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._separator = ""
        self._bullet = ""

    def separate(self, separator: str) -> None:
        self._separator = max(self._separator, separator, key=_SEPARATORS.index)

    def set_bullet(self, bullet: str) -> None:
        self._bullet = bullet

    def write(self, text: str) -> None:
        if self._parts:
            self._parts.append(self._separator)
        self._parts += (self._bullet, text)
        self._separator = self._bullet = ""

    def text(self) -> str:
        return "".join(self._parts).strip()


def _visible_text(soup: BeautifulSoup, string_types: tuple[type, ...]) -> str:
    # An explicit stack: pages nest deeper than Python recurses. A string on it is a closing tag.
    writer = _Writer()
    stack: list[PageElement | str] = [soup]
    num_open_pre = 0
    while stack:
        node = stack.pop()
        if type(node) is str:
            num_open_pre -= node == "pre"
            _separate(writer, node, is_opening=False)
        elif type(node) in string_types:
            _write_string(writer, str(node), is_preformatted=num_open_pre > 0)
        else:
            # Comments and doctypes have neither a name nor contents.
            name = str(getattr(node, "name", None) or "")
            if name in _UNSEEN:
                continue
            num_open_pre += name == "pre"
            _separate(writer, name, is_opening=True)
            stack.append(name)
            stack.extend(reversed(getattr(node, "contents", [])))
    return writer.text()


def _separate(writer: _Writer, name: str, *, is_opening: bool) -> None:
    if name in _PARAGRAPHS:
        writer.separate("\n\n")
    elif name in _LINES:
        writer.separate("\n")
    elif name in _CELLS:
        writer.separate(" | ")
    if name == "li":
        writer.set_bullet("- " if is_opening else "")


def _write_string(writer: _Writer, text: str, *, is_preformatted: bool) -> None:
    if is_preformatted:
        writer.write(text)
        return
    collapsed = _WHITESPACE.sub(" ", text)
    if collapsed.startswith(" "):
        writer.separate(" ")
    if collapsed.strip(" "):
        writer.write(collapsed.strip(" "))
        if collapsed.endswith(" "):
            writer.separate(" ")
