"""From nodes to a document that reads back as the same nodes.

Names of imports and arguments become tags and attribute names, which XML cannot escape, so they are
checked before they are written. All other rules of PML are the parser's: what was written is parsed
again, and a document that it refuses, or reads as something else, is never returned.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pc_rag.errors import NO_SOURCE, PMLError, Problem, PromptError, SchemaError
from pc_rag.pml.names import is_name, is_path
from pc_rag.pml.node_types import type_problems
from pc_rag.pml.nodes import (
    Import,
    Module,
    Parameter,
    Prompt,
    RoleBlock,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
)
from pc_rag.pml.parser import parse_prompt, parse_schema
from pc_rag.pml.source import SourceText
from pc_rag.pml.tree import MAX_DEPTH, SPACE_ATTRIBUTE
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pc_rag.pml.nodes import PromptChild, SchemaChild
    from pc_rag.types import Role

_Node = TypeVar("_Node", Schema, Prompt)
_Child = TypeVar("_Child", bound="SchemaChild | PromptChild")

_TEXT_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\r": "&#13;"})
# XML reads a literal tab or line feed in an attribute as a space.
_ATTRIBUTE_ESCAPES = _TEXT_ESCAPES | str.maketrans({'"': "&quot;", "\n": "&#10;", "\t": "&#9;"})
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_REPLACEMENT = "\ufffd"


def write_schema(schema: Schema) -> str:
    """The document of a schema, on which ``parse_schema`` gives an equal schema.

    Texts side by side read back as one, and empty ones not at all: XML knows no border between
    them. Places and the name of the source are not written.

    Args:
        schema: Not modified.

    Raises:
        SchemaError: It breaks rules of PML, or holds characters that XML cannot (control
            characters, halves of surrogate pairs); holds every problem, with its place in the
            document that would have been written. Or it holds values of types that nodes do not.
    """
    return _document(schema, Schema, parse_schema, SchemaError)


def write_prompt(prompt: Prompt) -> str:
    """The document of a prompt, on which ``parse_prompt`` gives an equal prompt.

    Texts side by side read back as one, and empty ones not at all: XML knows no border between
    them. Places and the name of the source are not written. Whether it fits a schema is checked
    when it is planned.

    Args:
        prompt: Not modified.

    Raises:
        PromptError: It breaks rules of PML, or holds characters that XML cannot (control
            characters, halves of surrogate pairs); holds every problem, with its place in the
            document that would have been written. Or it holds values of types that nodes do not.
    """
    return _document(prompt, Prompt, parse_prompt, PromptError)


def first_unwritable(text: str) -> str | None:
    """The first character of a text that XML cannot hold, not even escaped, if there is one."""
    found = _UNWRITABLE.search(text)
    return found.group() if found else None


def _document(
    root: _Node,
    kind: type[_Node],
    parse: Callable[[str], _Node],
    refusal: type[SchemaError | PromptError],
) -> str:
    """A document that was read back, and is ``root``; ``refusal`` holds all that keeps it so."""
    faults = type_problems(root, kind)
    if faults:
        raise refusal(faults, getattr(root, "source", NO_SOURCE))
    document, problems = _written(root)
    try:
        read = parse(document)
        problems = problems or _differences(root, read)
    except (PMLError, PromptError) as error:
        problems += error.problems
    if problems:
        what = (
            f"prompt of schema {root.schema!r}"
            if isinstance(root, Prompt)
            else f"schema {root.name!r}"
        )
        raise refusal(tuple(sorted(problems)), f"written {what}")
    return document


def _written(root: Schema | Prompt) -> tuple[str, list[Problem]]:
    writer = _Writer()
    writer.node(root, depth=1)
    document = "".join(writer.pieces)
    text = SourceText(document)
    places = ((text.location(offset), message) for offset, message in writer.problems)
    return document, [Problem(place.line, place.column, message) for place, message in places]


class _Writer:
    """Writes a document whose markup is sound whatever the nodes hold.

    Attributes:
        pieces: What is written so far.
        problems: What was left out or replaced, and at which offset.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.problems: list[tuple[int, str]] = []
        self._num_characters = 0
        self._is_in_uncached = False

    def node(self, node: Schema | Prompt | SchemaChild | PromptChild, *, depth: int) -> None:
        match node:
            case Text(text=text):
                self._put(self._checked(text, "text").translate(_TEXT_ESCAPES))
            case Schema(name=name, children=children):
                self._element("schema", {"name": name, **_PRESERVE}, children, depth)
            case Module():
                self._module(node, depth=depth)
            case Union(members=members, scaffold=scaffold):
                attributes = {} if scaffold is None else {"scaffold": scaffold}
                self._element("union", attributes, members, depth)
            case Scaffold(name=name, members=members):
                self._element("scaffold", {"name": name}, members, depth)
            case Parameter():
                self._element("parameter", _parameter_attributes(node), (), depth)
            case RoleBlock(role=role, children=children) | Turn(role=role, children=children):
                self._element(self._role_tag(role), {}, children, depth)
            case Prompt(schema=schema, children=children):
                attributes = {"schema": schema, **_PRESERVE}
                given = self._arguments(node.arguments, taken=attributes)
                self._element("prompt", {**attributes, **given}, children, depth)
            case Import(name=name, children=children):
                given = self._arguments(node.arguments)
                self._element(self._import_tag(name), given, children, depth)

    def _module(self, module: Module, *, depth: int) -> None:
        cache = {} if module.is_cached else {"cache": "false"}
        if module.is_cached and self._is_in_uncached:
            cache = {"cache": "true"}  # which the parser refuses
        was_in_uncached = self._is_in_uncached
        self._is_in_uncached = was_in_uncached or not module.is_cached
        self._element("module", {"name": module.name, **cache}, module.children, depth)
        self._is_in_uncached = was_in_uncached

    def _element(
        self,
        tag: str,
        attributes: Mapping[str, str],
        children: Sequence[SchemaChild | PromptChild],
        depth: int,
    ) -> None:
        self._put(f"<{tag}")
        for name, value in attributes.items():
            self._put(f' {name}="')
            what = f"attribute {name!r} of <{tag}>"
            self._put(self._checked(value, what).translate(_ATTRIBUTE_ESCAPES))
            self._put('"')
        if not children:
            self._put("/>")
            return
        self._put(">")
        if depth <= MAX_DEPTH:  # the parser reports the first element beyond it
            for child in children:
                self.node(child, depth=depth + 1)
        self._put(f"</{tag}>")

    def _arguments(
        self, arguments: Mapping[str, str], *, taken: Mapping[str, str] | None = None
    ) -> Mapping[str, str]:
        sound = {}
        for name, value in arguments.items():
            if not is_name(name):
                self._report(f"argument {name!r} is not a name of a parameter, so no attribute")
            elif name in (taken or ()):
                self._report(
                    f"an argument cannot be named {name!r}, which is an attribute of its tag"
                )
            else:
                sound[name] = value
        return sound

    def _import_tag(self, name: str) -> str:
        if is_path(name) and name not in CHAT_ROLES:
            return name
        self._report(f"import {name!r} is not the name or path of a module, so no tag")
        return "_"

    def _role_tag(self, role: Role) -> str:
        if role in CHAT_ROLES:
            return str(role)
        roles = ", ".join(map(repr, map(str, sorted(CHAT_ROLES))))
        self._report(f"role {str(role)!r} has no tag; those that have: {roles}")
        return "user"

    def _checked(self, text: str, what: str) -> str:
        for found in _UNWRITABLE.finditer(text):
            self._report(
                f"{what} holds U+{ord(found.group()):04X} at offset {found.start()}, which no XML "
                "can hold; take it out"
            )
        return _UNWRITABLE.sub(_REPLACEMENT, text)

    def _put(self, piece: str) -> None:
        self.pieces.append(piece)
        self._num_characters += len(piece)

    def _report(self, message: str) -> None:
        self.problems.append((self._num_characters, message))


_PRESERVE = {SPACE_ATTRIBUTE: "preserve"}


def _parameter_attributes(parameter: Parameter) -> Mapping[str, str]:
    attributes = {"name": parameter.name, "length": str(parameter.max_tokens)}
    if parameter.scaffold is not None:
        attributes["scaffold"] = parameter.scaffold
    if parameter.default is not None:
        attributes["default"] = parameter.default
    if parameter.pads_with_space:
        attributes["pad"] = "space"
    return attributes


def _differences(given: _Node, read: _Node) -> list[Problem]:
    """That a document reads as something else, where it does; no valid node should come here."""
    expected = replace(given, children=_merged(given.children))
    if read == expected:
        return []
    return [Problem(0, 0, "it would read back as other nodes; build it of nodes of PML only")]


def _merged(children: Sequence[_Child]) -> tuple[_Child, ...]:
    """Children, at every depth, as they read back: texts side by side are one, empty ones none."""
    merged: list[_Child] = []
    for child in children:
        match child:
            case Text(text=text):
                last = merged[-1] if merged else None
                if isinstance(last, Text):
                    merged[-1] = replace(last, text=last.text + text)
                elif text:
                    merged.append(child)
            case Union(members=members) | Scaffold(members=members):
                merged.append(replace(child, members=_merged(members)))
            case Parameter():
                merged.append(child)
            case _:
                # Children are of the kind that their parent holds, which replace cannot see.
                merged.append(replace(child, children=_merged(child.children)))  # type: ignore[arg-type]
    return tuple(merged)
