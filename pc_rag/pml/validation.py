"""The rules of PML over elements; every problem of a document is found, not the first one."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pc_rag.errors import Problem
from pc_rag.pml.nodes import Text
from pc_rag.pml.tree import SPACE_ATTRIBUTE
from pc_rag.pml.whitespace import is_blank
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.pml.nodes import Location
    from pc_rag.pml.tree import Element

_SCHEMA_TAGS = ("module", "union", *sorted(CHAT_ROLES))
_LATER_TAGS = frozenset({"param", "parameter", "scaffold"})
_LATER_ATTRIBUTES = {
    "schema": frozenset[str](),
    "module": frozenset({"cache", "src"}),
    "union": frozenset({"scaffold"}),
}
RESERVED_NAMES = frozenset({"schema", "prompt", *_SCHEMA_TAGS, *_LATER_TAGS})
"""Names that no module may have, because prompts name modules by tags."""

# XML's name characters without the colon: every module name is a tag in prompts.
_NAME_START = (
    "A-Z_a-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02ff\u0370-\u037d\u037f-\u1fff\u200c-\u200d"
    "\u2070-\u218f\u2c00-\u2fef\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufffd\U00010000-\U000effff"
)
_NAME = re.compile(rf"[{_NAME_START}][{_NAME_START}\-.0-9\u00b7\u0300-\u036f\u203f-\u2040]*")


def is_name(name: str) -> bool:
    """Whether a name begins with a letter or underscore, then has letters, digits, ``_-.``."""
    return _NAME.fullmatch(name) is not None


def schema_problems(root: Element) -> tuple[Problem, ...]:
    """Everything that keeps an element from being a schema, in document order."""
    if root.tag != "schema":
        return (_problem(root.location, _wrong_root(root.tag, "schema")),)
    checker = _SchemaChecker()
    return tuple(sorted((*checker.named(root), *checker.content(root, "", ()))))


def prompt_problems(root: Element) -> tuple[Problem, ...]:
    """Everything that keeps an element from being a prompt, in document order."""
    if root.tag != "prompt":
        return (_problem(root.location, _wrong_root(root.tag, "prompt")),)
    problems = [
        *_attribute_problems(root, required=("schema",)),
        *_name_problems(root, "schema"),
    ]
    for child in root.children:
        problems += _import_problems(child)
    return tuple(sorted(problems))


class _SchemaChecker:
    """Carries what siblings must agree on: the paths of modules."""

    def __init__(self) -> None:
        self._paths: dict[str, Location] = {}

    def named(self, element: Element) -> Iterator[Problem]:
        """Problems of the attributes of a schema or module."""
        later = _LATER_ATTRIBUTES[element.tag]
        yield from _attribute_problems(element, required=("name",), later=later)
        yield from _name_problems(element, "name")

    def content(self, element: Element, path: str, ancestors: tuple[str, ...]) -> Iterator[Problem]:
        """Problems of the children of an element and of all below.

        Args:
            element: Its own attributes have been checked.
            path: Dotted path of the nearest enclosing module; empty in none.
            ancestors: Tags of the elements around ``element``, the outermost first.
        """
        for child in element.children:
            if not isinstance(child, Text):
                yield from self._element(child, path, (*ancestors, element.tag))

    def _element(
        self, element: Element, path: str, ancestors: tuple[str, ...]
    ) -> Iterator[Problem]:
        if ancestors[-1] == "union" and element.tag != "module":
            yield _problem(
                element.location,
                f"<{element.tag}> in a <union>, whose members must be modules; put it into a "
                "<module>, or out of the union",
            )
        if element.tag == "module":
            yield from self.named(element)
            name = element.attributes.get("name", "")
            if is_name(name):
                path = f"{path}.{name}" if path else name
                yield from self._path_problems(element, path)
        elif element.tag == "union":
            yield from _attribute_problems(element, later=_LATER_ATTRIBUTES["union"])
            yield from _union_problems(element)
        elif element.tag in CHAT_ROLES:
            yield from _attribute_problems(element)
            yield from _role_problems(element, ancestors)
        else:
            yield _problem(element.location, _unknown_tag(element.tag))
        yield from self.content(element, path, ancestors)

    def _path_problems(self, element: Element, path: str) -> Iterator[Problem]:
        name = element.attributes["name"]
        if name in RESERVED_NAMES:
            yield _problem(
                element.location,
                f"a module cannot be named {name!r}, which is a tag of PML; choose another name",
            )
        first = self._paths.setdefault(path, element.location)
        if first is not element.location:
            yield _problem(
                element.location,
                f"module {path!r} is already declared at line {first.line}, column {first.column}; "
                "names must differ within one enclosing module, unions and roles included",
            )


def _union_problems(element: Element) -> Iterator[Problem]:
    for child in element.children:
        if isinstance(child, Text) and not is_blank(child.text):
            yield _problem(
                child.location,
                f"text {_shorten(child.text)!r} in a <union>, whose members must be modules; put "
                "it into a <module>",
            )
    if not any(not isinstance(child, Text) for child in element.children):
        yield _problem(element.location, "a <union> has no member; give it at least one <module>")


def _role_problems(element: Element, ancestors: tuple[str, ...]) -> Iterator[Problem]:
    outer = next((tag for tag in ancestors if tag in CHAT_ROLES), None)
    if outer is not None:
        yield _problem(
            element.location,
            f"<{element.tag}> inside <{outer}>; a turn cannot hold another turn: close </{outer}> "
            "first",
        )


def _import_problems(child: Element | Text) -> Iterator[Problem]:
    if isinstance(child, Text):
        return
    yield from _attribute_problems(child)
    if not is_name(child.tag):
        yield _problem(child.location, f"<{child.tag}> is not a module name; {_NAME_RULE}")
    for grandchild in child.children:
        yield from _import_problems(grandchild)


_NAME_RULE = (
    "a name begins with a letter or underscore and goes on with letters, digits, '_', '-' and '.'"
)


def _name_problems(element: Element, attribute: str) -> Iterator[Problem]:
    name = element.attributes.get(attribute)
    if name is not None and not is_name(name):
        yield _problem(
            element.location,
            f"{attribute}={name!r} of <{element.tag}> is not a name; {_NAME_RULE}",
        )


def _attribute_problems(
    element: Element, *, required: tuple[str, ...] = (), later: frozenset[str] = frozenset()
) -> Iterator[Problem]:
    for attribute in required:
        if attribute not in element.attributes:
            yield _problem(
                element.location,
                f'<{element.tag}> has no {attribute}; write <{element.tag} {attribute}="...">',
            )
    allowed = (*required, SPACE_ATTRIBUTE)
    for attribute, value in element.attributes.items():
        if attribute in later:
            message = "is not supported by this version of pc-rag; remove it"
        elif attribute not in allowed:
            message = f"is unknown; allowed: {', '.join(allowed)}"
        elif attribute == SPACE_ATTRIBUTE and value not in ("preserve", "default"):
            message = f"has value {value!r}; allowed: 'preserve', 'default'"
        else:
            continue
        yield _problem(element.location, f"attribute {attribute!r} of <{element.tag}> {message}")


def _wrong_root(tag: str, expected: str) -> str:
    return f"the root element is <{tag}>; expected <{expected}>"


def _unknown_tag(tag: str) -> str:
    if tag in _LATER_TAGS:
        return f"<{tag}> is not supported by this version of pc-rag; remove it"
    close = get_close_matches(tag, _SCHEMA_TAGS, n=1)
    hint = f"; did you mean <{close[0]}>?" if close else ""
    return f"unknown tag <{tag}>; allowed: {', '.join(f'<{t}>' for t in _SCHEMA_TAGS)}{hint}"


def _shorten(text: str, limit: int = 30) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _problem(location: Location, message: str) -> Problem:
    return Problem(location.line, location.column, message)
