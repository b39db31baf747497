"""Whether an arm of a program is gone: conditions, and patterns with what they capture."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pc_rag.pml.program.definition import RefusedError
from pc_rag.pml.program.expression import Expression, evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MATCHES_ITSELF = (
    bool,
    bytearray,
    bytes,
    dict,
    float,
    frozenset,
    int,
    list,
    set,
    str,
    tuple,
)
"""Built-in classes whose one positional pattern is matched against the value itself."""


class Test(Protocol):
    """What an arm waits for."""

    def captured(self, arguments: Mapping[str, object]) -> Mapping[str, object] | None:
        """The names that the arm sees besides the arguments; ``None`` where it is not gone.

        Raises:
            PromptError: It has no value with these arguments.
        """
        ...


@dataclass(frozen=True, slots=True)
class Always:
    """``else``."""

    def captured(self, arguments: Mapping[str, object]) -> Mapping[str, object] | None:  # noqa: ARG002, D102 - see Test
        return {}


@dataclass(frozen=True, slots=True)
class Condition:
    """``if``."""

    expression: Expression

    def captured(self, arguments: Mapping[str, object]) -> Mapping[str, object] | None:  # noqa: D102 - see Test
        return {} if _truth(self.expression, arguments) else None


@dataclass(frozen=True, slots=True)
class Case:
    """``case``.

    Attributes:
        subject: What is matched.
        pattern: Only what ``check_pattern`` lets through.
        constants: Values of the names in the pattern.
        guard: What has to hold besides, if anything.
    """

    subject: Expression
    pattern: ast.pattern
    constants: Mapping[str, object]
    guard: Expression | None

    def captured(self, arguments: Mapping[str, object]) -> Mapping[str, object] | None:  # noqa: D102 - see Test
        value = self.subject.value(arguments)
        try:
            found = match_pattern(self.pattern, value, self.constants)
        except Exception as error:  # whatever a value's own comparison raises
            raise self.subject.failed(f"{type(error).__name__}: {error}") from error
        if found is None or self.guard is None:
            return found
        return found if _truth(self.guard, {**arguments, **found}) else None


def _truth(expression: Expression, arguments: Mapping[str, object]) -> bool:
    value = expression.value(arguments)
    try:
        return bool(value)
    except Exception as error:  # whatever a value's own __bool__ raises
        raise expression.failed(f"{type(error).__name__}: {error}") from error


def check_pattern(pattern: ast.pattern) -> None:
    """See that ``match_pattern`` knows everything in a pattern.

    Raises:
        RefusedError: It does not.
    """
    if isinstance(pattern, (ast.MatchSequence, ast.MatchMapping, ast.MatchStar)):
        raise RefusedError(
            pattern,
            "patterns of sequences and mappings are not compiled; match on one value at a time",
        )
    for child in ast.iter_child_nodes(pattern):
        if isinstance(child, ast.pattern):
            check_pattern(child)


def pattern_values(pattern: ast.pattern) -> Iterator[ast.expr]:
    """The expressions in a pattern: values and classes."""
    for node in ast.walk(pattern):
        if isinstance(node, ast.MatchValue):
            yield node.value
        elif isinstance(node, ast.MatchClass):
            yield node.cls


def match_pattern(
    pattern: ast.pattern,
    value: object,
    constants: Mapping[str, object],
) -> dict[str, object] | None:
    """What a pattern captures of a value; ``None`` where it does not match.

    Args:
        pattern: Only what ``check_pattern`` lets through.
        value: Of the subject.
        constants: Values of the names in the pattern.
    """
    match pattern:
        case ast.MatchValue(value=expected):
            return {} if value == evaluate(expected, constants) else None
        case ast.MatchSingleton(value=expected):
            return {} if value is expected else None
        case ast.MatchAs(pattern=inner, name=name):
            found = {} if inner is None else match_pattern(inner, value, constants)
            return found if found is None or name is None else {**found, name: value}
        case ast.MatchOr(patterns=patterns):
            tries = (match_pattern(each, value, constants) for each in patterns)
            return next((found for found in tries if found is not None), None)
        case ast.MatchClass():
            return _match_class(pattern, value, constants)
    raise NotImplementedError(type(pattern).__name__)  # check_pattern lets nothing else through


def attributes_of(pattern: ast.MatchClass, owner: type) -> list[tuple[str | None, ast.pattern]]:
    """The attribute of a class that each pattern inside is for; ``None`` for the value itself.

    Raises:
        TypeError: The class does not tell which attributes its positional patterns are for.
    """
    names: tuple[str | None, ...] = getattr(owner, "__match_args__", ())
    if not names and issubclass(owner, _MATCHES_ITSELF):
        names = (None,)
    if len(pattern.patterns) > len(names):
        raise TypeError(
            f"{owner.__name__} takes {len(names)} positional patterns, not {len(pattern.patterns)}"
        )
    positional = list(zip(names, pattern.patterns, strict=False))
    return [*positional, *zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True)]


def _match_class(
    pattern: ast.MatchClass, value: object, constants: Mapping[str, object]
) -> dict[str, object] | None:
    owner = evaluate(pattern.cls, constants)
    if not isinstance(value, owner):
        return None
    found: dict[str, object] = {}
    for attribute, inner in attributes_of(pattern, owner):
        if attribute is not None and not hasattr(value, attribute):
            return None
        part = value if attribute is None else getattr(value, attribute)
        captured = match_pattern(inner, part, constants)
        if captured is None:
            return None
        found |= captured
    return found
