"""Whether nodes that were built in Python are made of what their annotations say.

The parser gives nothing else, so this is for hands: a number as an argument, a bare string among
the children, a list of names. Without a look such a value fails deep inside, or is passed over in
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from pc_rag.errors import Problem
from pc_rag.pml.names import shorten
from pc_rag.pml.nodes import (
    NOWHERE,
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
from pc_rag.pml.tree import MAX_DEPTH, NESTED_TOO_DEEP
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCHEMA_CHILDREN = (Text, Parameter, Module, Union, Scaffold, RoleBlock)
_PROMPT_CHILDREN = (Text, Import, Turn)

_KINDS = (*_SCHEMA_CHILDREN, *_PROMPT_CHILDREN[1:], Schema, Prompt)

_CHILDREN: Mapping[type, tuple[str, tuple[type, ...]]] = {
    Schema: ("children", _SCHEMA_CHILDREN),
    Module: ("children", _SCHEMA_CHILDREN),
    RoleBlock: ("children", _SCHEMA_CHILDREN),
    Union: ("members", (Module,)),
    Scaffold: ("members", (Module,)),
    Prompt: ("children", _PROMPT_CHILDREN),
    Import: ("children", _PROMPT_CHILDREN),
    Turn: ("children", _PROMPT_CHILDREN),
}
_TEXTS: Mapping[type, tuple[str, ...]] = {
    Text: ("text",),
    Parameter: ("name",),
    Schema: ("name",),
    Module: ("name",),
    Scaffold: ("name",),
    RoleBlock: ("role",),
    Prompt: ("schema",),
    Import: ("name",),
}
_OPTIONAL_TEXTS: Mapping[type, tuple[str, ...]] = {
    Parameter: ("scaffold", "default"),
    Union: ("scaffold",),
}
_FLAGS: Mapping[type, str] = {Module: "is_cached", Parameter: "pads_with_space"}


def type_problems(root: object, kind: type[Schema | Prompt]) -> tuple[Problem, ...]:
    """What in a tree of nodes is of another type than its place allows.

    Args:
        root: Should be a ``kind``. Not modified.
        kind: ``Schema`` or ``Prompt``.

    Returns:
        A problem for each such value, in document order; what is below it is not looked at. What
        lies deeper than a document may be nested is a problem of prompts, and not looked at either;
        of schemas the writer tells it, beside their other faults.
    """
    if not isinstance(root, kind):
        return (Problem(0, 0, f"a {kind.__name__} is needed; got {_shown(root)}"),)
    found: list[Problem] = []
    pending: list[tuple[object, int]] = [(root, 1)]
    while pending:
        node, depth = pending.pop()
        place = getattr(node, "location", NOWHERE)
        found += (Problem(place.line, place.column, each) for each in _faults(node))
        children = _sound_children(node)
        if depth < MAX_DEPTH:
            pending += ((child, depth + 1) for child in reversed(children))
        elif kind is Prompt and not all(isinstance(child, Text) for child in children):
            found.append(Problem(place.line, place.column, NESTED_TOO_DEEP))
    return tuple(found)


def _faults(node: object) -> Iterator[str]:
    kind, what = _kind_of(node), _name_of(node)
    for field in _TEXTS.get(kind, ()):
        yield from _wrong(what, field, getattr(node, field), _is_text, "a str")
    for field in _OPTIONAL_TEXTS.get(kind, ()):
        yield from _wrong(what, field, getattr(node, field), _is_text_or_none, "a str or None")
    if isinstance(node, Turn):  # of a schema the writer tells it, beside its other faults
        allowed = ", ".join(sorted(CHAT_ROLES))
        yield from _wrong(what, "role", node.role, CHAT_ROLES.__contains__, allowed)
    if kind in _FLAGS:
        field = _FLAGS[kind]
        yield from _wrong(what, field, getattr(node, field), _is_flag, "True or False")
    if isinstance(node, Parameter):
        yield from _wrong(what, "max_tokens", node.max_tokens, _is_whole, "an int")
    if isinstance(node, Prompt | Import):
        yield from _argument_faults(what, node.arguments)
    if kind in _CHILDREN:
        yield from _child_faults(what, node)


def _wrong(
    what: str, field: str, value: object, is_right: Callable[[object], bool], allowed: str
) -> Iterator[str]:
    if not is_right(value):
        yield f"{field} of {what} is {_shown(value)}; allowed: {allowed}"


def _argument_faults(what: str, arguments: object) -> Iterator[str]:
    if not isinstance(arguments, Mapping):
        yield (
            f"arguments of {what} are {_shown(arguments)}; allowed: a dict of texts by name of "
            "parameter"
        )
        return
    for name, value in arguments.items():
        if not isinstance(name, str):
            yield f"arguments of {what} hold the name {_shown(name)}; allowed: a str"
        elif not isinstance(value, str):
            yield f"argument {name!r} of {what} is {_shown(value)}; allowed: a str{_as_text(value)}"


def _child_faults(what: str, node: object) -> Iterator[str]:
    field, allowed = _CHILDREN[_kind_of(node)]
    children = getattr(node, field)
    names = ", ".join(each.__name__ for each in allowed)
    if not isinstance(children, tuple | list):
        yield f"{field} of {what} are {_shown(children)}; allowed: a tuple of {names}"
        return
    for child in children:
        if not isinstance(child, allowed):
            advice = f"; write Text({shorten(child)!r})" if isinstance(child, str) else ""
            yield f"{field} of {what} hold {_shown(child)}; allowed: {names}{advice}"


def _sound_children(node: object) -> Sequence[object]:
    kind = _kind_of(node)
    if kind not in _CHILDREN:
        return ()
    field, allowed = _CHILDREN[kind]
    children = getattr(node, field)
    if not isinstance(children, tuple | list):
        return ()
    return [child for child in children if isinstance(child, allowed)]


def _kind_of(node: object) -> type:
    return next(kind for kind in _KINDS if isinstance(node, kind))


def _name_of(node: object) -> str:
    """A node in messages, such as ``Import('plan')``."""
    name = getattr(node, "schema" if isinstance(node, Prompt) else "name", None)
    return f"{type(node).__name__}({name!r})" if isinstance(name, str) else type(node).__name__


def _shown(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{shorten(repr(value))} of type {kind}"


def _as_text(value: object) -> str:
    return f", such as {str(value)!r}" if isinstance(value, int | float) else ""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
