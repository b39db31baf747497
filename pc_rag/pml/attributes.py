"""Which attributes every tag has, and which values they may have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.errors import Problem
from pc_rag.pml.names import NAME_RULE, PARAMETER_TAGS, is_name, shorten
from pc_rag.pml.tree import SPACE_ATTRIBUTE
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.pml.nodes import Location
    from pc_rag.pml.tree import Element

MAX_PARAMETER_LENGTH = 1_000_000
"""Tokens that a parameter may reserve."""

_LENGTH_OF = {"param": "len", "parameter": "length"}
"""The usual spelling of a parameter's length; each tag takes both."""

_LENGTH = re.compile(r"[1-9][0-9]{0,6}")
_CHOICES = {
    SPACE_ATTRIBUTE: ("preserve", "default"),
    "cache": ("true", "false"),
    "pad": ("none", "space"),
}


@dataclass(frozen=True, slots=True)
class TagAttributes:
    """Attributes of one tag, besides ``xml:space``, which each has."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_PARAMETER = TagAttributes(("name",), ("len", "length", "scaffold", "default", "pad"))
TAG_ATTRIBUTES: dict[str, TagAttributes] = {
    "schema": TagAttributes(("name",)),
    "module": TagAttributes(("name",), ("cache", "src")),
    "union": TagAttributes(optional=("scaffold",)),
    "scaffold": TagAttributes(("name",)),
    **dict.fromkeys(PARAMETER_TAGS, _PARAMETER),
    **dict.fromkeys(CHAT_ROLES, TagAttributes()),
}


def problem_at(location: Location, message: str) -> Problem:
    """A problem at a place of the document."""
    return Problem(location.line, location.column, message)


def attribute_problems(element: Element) -> Iterator[Problem]:
    """Everything wrong with the attributes of a schema's tag, or of a turn."""
    known = TAG_ATTRIBUTES[element.tag]
    yield from _missing(element, known.required)
    allowed = (*known.required, *known.optional, SPACE_ATTRIBUTE)
    for attribute, value in element.attributes.items():
        if attribute not in allowed:
            message = f"is unknown; allowed: {', '.join(allowed)}"
            yield _attribute_problem(element, attribute, message)
        elif attribute in element.broken_values:
            yield _broken_value(element, attribute)
        elif attribute == "name":
            yield from _name_problems(element, attribute)
        elif attribute in _CHOICES:
            yield from _choice_problems(element, attribute, value)
    if element.tag in PARAMETER_TAGS:
        yield from _length_problems(element)


def argument_problems(element: Element) -> Iterator[Problem]:
    """Everything wrong with the attributes of a prompt or an import, which are arguments."""
    if element.tag == "prompt":
        yield from _missing(element, ("schema",))
    for attribute, value in element.attributes.items():
        if attribute in element.broken_values:
            yield _broken_value(element, attribute)
        elif attribute == SPACE_ATTRIBUTE:
            yield from _choice_problems(element, attribute, value)
        elif attribute == "schema" and element.tag == "prompt":
            yield from _name_problems(element, attribute)
        elif not is_name(attribute):
            message = f"is not the name of a parameter; {NAME_RULE}"
            yield _attribute_problem(element, attribute, message)


def parameter_length(element: Element) -> int:
    """The tokens that a parameter reserves, whichever way it is spelt; it has no problems."""
    attributes = element.attributes
    return int(attributes["len"] if "len" in attributes else attributes["length"])


def arguments_of(element: Element) -> dict[str, str]:
    """The arguments among the attributes of a prompt or an import."""
    own = {SPACE_ATTRIBUTE, "schema"} if element.tag == "prompt" else {SPACE_ATTRIBUTE}
    return {name: value for name, value in element.attributes.items() if name not in own}


def _missing(element: Element, required: tuple[str, ...]) -> Iterator[Problem]:
    for attribute in required:
        if attribute not in element.attributes:
            yield problem_at(
                element.location,
                f'<{element.tag}> has no {attribute}; write <{element.tag} {attribute}="...">',
            )


def _name_problems(element: Element, attribute: str) -> Iterator[Problem]:
    name = element.attributes[attribute]
    if not is_name(name):
        yield problem_at(
            element.location,
            f"{attribute}={shorten(name)!r} of <{element.tag}> is not a name; {NAME_RULE}",
        )


def _choice_problems(element: Element, attribute: str, value: str) -> Iterator[Problem]:
    choices = _CHOICES[attribute]
    if value not in choices:
        allowed = ", ".join(map(repr, choices))
        yield _attribute_problem(
            element, attribute, f"has value {shorten(value)!r}; allowed: {allowed}"
        )


def _length_problems(element: Element) -> Iterator[Problem]:
    given = [name for name in ("len", "length") if name in element.attributes]
    if not given:
        yield from _missing(element, (_LENGTH_OF[element.tag],))
    elif len(given) > 1:
        message = f"<{element.tag}> has both len and length, which mean the same; remove one"
        yield problem_at(element.location, message)
    for attribute in given:
        value = element.attributes[attribute]
        if attribute not in element.broken_values and not (
            _LENGTH.fullmatch(value) and int(value) <= MAX_PARAMETER_LENGTH
        ):
            yield _attribute_problem(
                element,
                attribute,
                f"has value {shorten(value)!r}; allowed: a whole number of tokens from 1 to "
                f"{MAX_PARAMETER_LENGTH:,}, written in digits alone",
            )


def _broken_value(element: Element, attribute: str) -> Problem:
    broken = element.broken_values[attribute]
    what, reference = ("a tab", "&#9;") if broken.is_tab else ("a line break", "&#10;")
    message = (
        f"attribute {shorten(attribute)!r} of <{shorten(element.tag)}> holds {what}, which XML "
        f"reads as a space; write {reference}, or a space"
    )
    return problem_at(broken.location, message)


def _attribute_problem(element: Element, attribute: str, message: str) -> Problem:
    return problem_at(
        element.location,
        f"attribute {shorten(attribute)!r} of <{shorten(element.tag)}> {message}",
    )
