"""Reading XML: lxml parses, and every element and text gets its line and column.

No rule of PML is known here but one, the whitespace rule, because only this pass sees comments and
the ends of tags. DTDs are refused before lxml sees them, so there are no entities to expand and no
files or hosts to fetch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lxml import etree

from pc_rag.errors import PMLSyntaxError, Problem
from pc_rag.pml.names import PARAMETER_TAGS, shorten
from pc_rag.pml.nodes import Text
from pc_rag.pml.source import decode
from pc_rag.pml.whitespace import clean_text, is_blank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pc_rag.pml.nodes import Location
    from pc_rag.pml.source import BrokenValue, Markup, SourceText

MAX_DEPTH = 64
"""Elements that may lie in each other, the root included."""

NESTED_TOO_DEEP = f"elements are nested deeper than the {MAX_DEPTH} levels that are allowed"

MAX_ATTRIBUTES = 1_000
"""Attributes of one element; lxml's time to read them grows with their square."""

SPACE_ATTRIBUTE = "xml:space"
"""``preserve`` keeps all whitespace of an element; ``default`` returns to the whitespace rule."""

_PRESERVE = {"preserve": True, "default": False}
_XML_NAMESPACE = "{http://www.w3.org/XML/1998/namespace}"
_BLOCK_TAGS = frozenset({"schema", "prompt", "system", "user", "assistant"})
_TAG_HINT = 'write each attribute as name="value"; where this is text and no tag, write < as &lt;'
_HINTS = {
    "ERR_ENTITYREF_SEMICOL_MISSING": "write & as &amp;",
    "ERR_NAME_REQUIRED": "write & as &amp; and < as &lt;, or use <![CDATA[...]]>",
    "ERR_LT_IN_ATTRIBUTE": "write < as &lt;",
    "ERR_ATTRIBUTE_WITHOUT_VALUE": _TAG_HINT,
    "ERR_ATTRIBUTE_NOT_STARTED": _TAG_HINT,
    "ERR_GT_REQUIRED": _TAG_HINT,
    "ERR_ATTRIBUTE_REDEFINED": "remove one",
    "ERR_MISPLACED_CDATA_END": "write > as &gt;",
    "ERR_UNDECLARED_ENTITY": "only &amp; &lt; &gt; &quot; &apos; and character references exist",
    "ERR_TAG_NAME_MISMATCH": "close every tag in the element that opened it",
    "ERR_TAG_NOT_FINISHED": "close every tag",
    "ERR_DOCUMENT_END": "a document has one root element and no text outside of it",
    "ERR_DOCUMENT_EMPTY": "a document is one element: <schema> or <prompt>",
    "NS_ERR_UNDEFINED_NAMESPACE": "PML has no namespaces; a name cannot hold ':'",
    "NS_ERR_QNAME": "PML has no namespaces; a name cannot hold ':'",
}
_FALLBACK_HINT = "the document must be well-formed XML"


@dataclass(frozen=True, slots=True)
class Element:
    """One element as it stands in the document.

    Attributes:
        tag: Its name; one that is in a namespace has the form ``{uri}name``.
        attributes: Values by name, ``xml:space`` among them.
        children: Elements and text, in document order.
        location: Of its ``<``.
        broken_values: Attributes whose values are not read as they are written.
    """

    tag: str
    attributes: Mapping[str, str]
    children: tuple[TreeChild, ...]
    location: Location
    broken_values: Mapping[str, BrokenValue]


TreeChild: TypeAlias = Element | Text


def read_tree(document: str | bytes, source: str) -> Element:
    """Parse a document into elements and text.

    Args:
        document: Characters or bytes.
        source: Name of the document, for errors.

    Raises:
        PMLSyntaxError: The document is not well-formed XML, nests too deep, has too many attributes
            on one element, or uses a DTD, entities or namespaces.
    """
    text = decode(document, source)
    doctype = text.doctype_location()
    if doctype is not None:
        problem = "a DTD is not allowed in PML: there are no entities to declare; remove <!DOCTYPE>"
        raise PMLSyntaxError((Problem(doctype.line, doctype.column, problem),), source)
    return _TreeReader(text, source).read(_parse(text, source))


def _parse(text: SourceText, source: str) -> etree._Element:
    parser = etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=False,
        strip_cdata=True,
        collect_ids=False,
    )
    try:
        return etree.fromstring(text.text.encode(), parser)
    except etree.XMLSyntaxError as error:
        problems = tuple(
            dict.fromkeys(
                Problem(entry.line, entry.column, _explain(entry.type_name, entry.message))
                for entry in parser.error_log
            )
        )
        if not problems:
            line, column = error.position
            problems = (Problem(line or 0, column or 0, _explain("", str(error.msg))),)
        raise PMLSyntaxError(problems, source) from error


def _explain(kind: str, message: str) -> str:
    if "depth" in message.lower():
        return NESTED_TOO_DEEP
    if "huge" in message.lower():
        return "a text, attribute or comment of more than 10,000,000 bytes; split it up"
    return f"{message.strip()}; {_HINTS.get(kind, _FALLBACK_HINT)}"


class _TreeReader:
    """Walks lxml's tree in step with the markup of the source, which gives the places."""

    def __init__(self, text: SourceText, source: str) -> None:
        self._text = text
        self._source = source
        self._markup = text.markup()
        self._offset = 0
        self._problems: list[Problem] = []

    def read(self, root: etree._Element) -> Element:
        start = next(self._markup)
        while self._text.text.startswith(("<?", "<!"), start.start):
            start = next(self._markup)
        element = self._element(root, start, depth=1, preserve=False)
        if self._problems:
            raise PMLSyntaxError(tuple(self._problems), self._source)
        return element

    def _element(
        self, node: etree._Element, start: Markup, *, depth: int, preserve: bool
    ) -> Element:
        location = self._text.location(start.start)
        if depth > MAX_DEPTH:
            problem = Problem(location.line, location.column, NESTED_TOO_DEEP)
            raise PMLSyntaxError((*self._problems, problem), self._source)
        self._check_namespaces(node, location)
        attributes = self._attributes(node, location)
        preserve = _PRESERVE.get(attributes.get(SPACE_ATTRIBUTE, ""), preserve)
        children: list[TreeChild] = []
        self._offset = start.end
        run = _TextRun(start.end, node.text or "", behind="")
        for child in node:
            markup = next(self._markup)
            if isinstance(child.tag, str):
                children += self._text_of(run, preserve=preserve, before=child.tag)
                children.append(self._element(child, markup, depth=depth + 1, preserve=preserve))
                run = _TextRun(self._offset, child.tail or "", behind=child.tag)
            else:
                run.go_on(markup.end, child.tail or "")
        children += self._text_of(run, preserve=preserve, closes=str(node.tag))
        if not start.is_empty_element:
            self._offset = next(self._markup).end
        return Element(
            str(node.tag), attributes, tuple(children), location, self._text.broken_values(start)
        )

    def _attributes(self, node: etree._Element, location: Location) -> dict[str, str]:
        if len(node.attrib) > MAX_ATTRIBUTES:
            problem = (
                f"<{shorten(str(node.tag))}> has {len(node.attrib):,} attributes; at most "
                f"{MAX_ATTRIBUTES:,} are allowed"
            )
            self._problems.append(Problem(location.line, location.column, problem))
            return {}
        return {
            str(name).replace(_XML_NAMESPACE, "xml:"): str(value)
            for name, value in node.attrib.items()
        }

    def _check_namespaces(self, node: etree._Element, location: Location) -> None:
        parent = node.getparent()
        if node.nsmap and (parent is None or node.nsmap != parent.nsmap):
            problem = f"<{shorten(str(node.tag))}> declares a namespace; PML has none: remove xmlns"
            self._problems.append(Problem(location.line, location.column, problem))

    def _text_of(
        self, run: _TextRun, *, preserve: bool, before: str = "", closes: str = ""
    ) -> tuple[Text, ...]:
        """The text in front of a tag: of the one that opens ``before``, or closes ``closes``."""
        text = run.text
        if not preserve:
            text = clean_text(
                text,
                first_indent=self._text.line_indentation(run.start),
                ends_block=closes in _BLOCK_TAGS,
                follows_parameter=run.behind in PARAMETER_TAGS,
                precedes_parameter=before in PARAMETER_TAGS,
            )
        location = self._text.text_location(run.visible_from)
        return (Text(text, location),) if text else ()


class _TextRun:
    """The text between two tags, gathered across comments and processing instructions.

    Args:
        start: Offset of its first character.
        text: Up to the first comment.
        behind: Tag of the sibling before it; empty where it is the first in its element.
    """

    def __init__(self, start: int, text: str, *, behind: str) -> None:
        self.start = start
        self.behind = behind
        self.visible_from = start
        self._pieces = [text]
        self._is_blank = is_blank(text)

    @property
    def text(self) -> str:
        """Everything gathered so far."""
        return "".join(self._pieces)

    def go_on(self, offset: int, text: str) -> None:
        """Add the text behind a comment that ends at ``offset``."""
        if self._is_blank:
            self.visible_from = offset
            self._is_blank = is_blank(text)
        self._pieces.append(text)
