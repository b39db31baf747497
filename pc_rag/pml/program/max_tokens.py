"""How long an argument may be, and which annotation says so."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeAlias

from pc_rag.errors import SchemaError
from pc_rag.pml.attributes import MAX_PARAMETER_LENGTH

Hints: TypeAlias = tuple[Any, ...]
"""What the annotations say a value may be: one of these. Empty where nothing is known."""


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """In ``Annotated[str, MaxTokens(10)]``: the value stands in text, and reserves 10 tokens.

    Attributes:
        max_tokens: Position IDs it reserves; an argument has at most as many tokens. From 1 to
            1,000,000.
        scaffold: Text that stands in its place while what is around it is encoded.
        pads_with_space: A shorter argument is filled up with spaces.

    Raises:
        SchemaError: ``max_tokens`` is no whole number from 1 to 1,000,000, ``scaffold`` no text, or
            ``pads_with_space`` neither ``True`` nor ``False``.
    """

    max_tokens: int
    scaffold: str | None = None
    pads_with_space: bool = False

    def __post_init__(self) -> None:
        is_whole = isinstance(self.max_tokens, int) and not isinstance(self.max_tokens, bool)
        if not is_whole or not 1 <= self.max_tokens <= MAX_PARAMETER_LENGTH:
            raise SchemaError(
                f"MaxTokens({self.max_tokens!r}) is no number of tokens; give a whole number from "
                f"1 to {MAX_PARAMETER_LENGTH:,}"
            )
        if self.scaffold is not None and not isinstance(self.scaffold, str):
            raise SchemaError(
                f"MaxTokens(scaffold={self.scaffold!r}) is no text; give a str, or leave it out"
            )
        if not isinstance(self.pads_with_space, bool):
            raise SchemaError(
                f"MaxTokens(pads_with_space={self.pads_with_space!r}) is neither True nor False"
            )


@dataclass(frozen=True, slots=True)
class UnreadHint:
    """An annotation that cannot be resolved.

    Attributes:
        reason: Why.
    """

    reason: str


def parameter_hints(function: types.FunctionType, name: str) -> Hints:
    """What the annotation of one parameter says.

    Each annotation is resolved on its own: that of the return value, often imported for type
    checkers only, does not matter.
    """
    annotation = _annotation(function, name)
    if annotation is None:
        return ()
    return (_resolved(annotation, function.__globals__, closure_of(function)),)


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Values of the names that a function takes from the functions around it, as far as it has."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not given a value yet
            found[name] = cell.cell_contents
    return found


def attribute_hints(hints: Hints, attribute: str) -> Hints:
    """What the annotations of an attribute say, in each class that a value may be of."""
    found: list[Any] = []
    for owner in (owner for hint in hints for owner in classes_in(hint)):
        for base in owner.__mro__:
            annotation = _annotation(base, attribute)
            if annotation is not None:
                names = vars(sys.modules.get(base.__module__, types.ModuleType("")))
                found.append(_resolved(annotation, names, dict(vars(base))))
                break
    return tuple(found)


def narrowed(hints: Hints, classes: tuple[type, ...]) -> Hints:
    """What is left of the hints where a value is known to be of one of the classes."""
    kept: list[Any] = []
    for hint in hints:
        left = [each for owner in classes_in(hint) for each in _both(owner, classes)]
        is_limit = max_tokens_in(hint) is not None
        kept += [hint] if left and is_limit else left
    return tuple(kept) or classes


def _both(owner: type, classes: tuple[type, ...]) -> tuple[type, ...]:
    """The narrowest classes of what is of one class, and of one of the others."""
    if issubclass(owner, classes):
        return (owner,)
    return tuple(each for each in classes if issubclass(each, owner))


def classes_in(hint: object) -> tuple[type, ...]:
    """The classes that a value with this annotation may be of."""
    if isinstance(hint, type) and not typing.get_origin(hint):
        return (hint,)
    if typing.get_origin(hint) is typing.Literal:
        return tuple(type(value) for value in typing.get_args(hint))
    return tuple(each for inner in _alternatives(hint) for each in classes_in(inner))


def max_tokens_in(hint: object) -> MaxTokens | None:
    """The first ``MaxTokens`` of an annotation, also inside of ``... | None``."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, MaxTokens):
            return extra
    inner = (max_tokens_in(each) for each in _alternatives(hint))
    return next((found for found in inner if found is not None), None)


def _alternatives(hint: object) -> tuple[object, ...]:
    if typing.get_origin(hint) is typing.Annotated:
        return typing.get_args(hint)[:1]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    value = getattr(hint, "__value__", None)  # type X = ...
    return () if value is None else (value,)


def _annotation(owner: type | types.FunctionType, name: str) -> object:
    try:
        return inspect.get_annotations(owner).get(name)
    except NameError as error:  # Python 3.14 resolves annotations when they are read
        return UnreadHint(f"cannot be read: {error}")


def _resolved(annotation: object, names: dict[str, Any], local_names: dict[str, Any]) -> object:
    if isinstance(annotation, UnreadHint):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"hint": annotation})
    try:
        hints = typing.get_type_hints(holder, names, local_names, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        return UnreadHint(f"{annotation!r} cannot be read: {error}")
    return hints["hint"]
