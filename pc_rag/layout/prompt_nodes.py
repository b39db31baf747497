"""Whether a prompt that was built in Python is made of what prompts are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.errors import Problem
from pc_rag.pml.nodes import Import, Text, Turn
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pc_rag.pml.nodes import Location, Prompt


def node_problems(prompt: Prompt) -> Iterator[Problem]:
    """What would be lost, or fail without a place: children, texts and roles of other types."""
    yield from _argument_problems(prompt.arguments, prompt.location)
    for child in prompt.children:
        yield from _child_problems(child, prompt.location)


def _child_problems(child: object, around: Location) -> Iterator[Problem]:
    match child:
        case Text(text=str()):
            return
        case Text(text=text):
            yield _problem(child.location, f"a Text holds {_type(text)}; give it a str")
            return
        case Import():
            yield from _argument_problems(child.arguments, child.location)
        case Turn(role=role):
            if role not in CHAT_ROLES:
                allowed = ", ".join(sorted(CHAT_ROLES))
                yield _problem(child.location, f"a turn has role {str(role)!r}; allowed: {allowed}")
        case _:
            what = _type(child)
            yield _problem(around, f"{what} is no child of a prompt; use Text, Import or Turn")
            return
    for grandchild in child.children:
        yield from _child_problems(grandchild, child.location)


def _argument_problems(arguments: Mapping[str, str], location: Location) -> Iterator[Problem]:
    for name, value in arguments.items():
        if not isinstance(value, str):
            yield _problem(location, f"argument {name!r} is {_type(value)}; give it a str")


def _type(value: object) -> str:
    return f"a value of type {type(value).__name__!r}"


def _problem(location: Location, message: str) -> Problem:
    return Problem(location.line, location.column, message)
