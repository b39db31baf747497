"""The ways of ``if``, conditional expressions and ``match``: which there are, and their names."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.pml.program.arms import (
    Always,
    Case,
    Condition,
    attributes_of,
    check_pattern,
    match_pattern,
    pattern_values,
)
from pc_rag.pml.program.definition import RefusedError
from pc_rag.pml.program.max_tokens import attribute_hints, narrowed
from pc_rag.pml.program.naming import case_words, condition_words, else_words
from pc_rag.pml.program.scope import value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pc_rag.pml.program.arms import Test
    from pc_rag.pml.program.expression import Expression
    from pc_rag.pml.program.max_tokens import Hints
    from pc_rag.pml.program.scope import Lookup, Scope


@dataclass(frozen=True, slots=True)
class Way:
    """One way that a program can go.

    Attributes:
        node: Its condition or pattern; what it says, for ``else``.
        words: What its condition says, for the name of its module.
        body: What it says: statements, or the expression that is its text.
        test: Whether it is gone; ``None`` where it never is.
        constants: Names that it sees besides, and that no argument decides.
        hints: Names that it sees besides, or knows more of, and that arguments decide.
        problem: Why it cannot be compiled; the body is looked through for more.
    """

    node: ast.AST
    words: str
    body: Sequence[ast.stmt] | ast.expr
    test: Test | None
    constants: Mapping[str, object] = field(default_factory=dict)
    hints: Mapping[str, Hints] = field(default_factory=dict)
    problem: RefusedError | None = None


def if_ways(node: ast.If, lookup: Lookup, scope: Scope) -> Iterator[Way]:
    """The ways of ``if``, ``elif`` and ``else``."""
    conditions: list[ast.expr] = []
    while True:
        conditions.append(node.test)
        yield _condition(node.test, node.body, lookup, scope)
        match node.orelse:
            case [ast.If() as following]:
                node = following
            case []:
                return
            case rest:
                yield Way(rest[0], else_words(conditions), rest, Always())
                return


def conditional_ways(
    node: ast.IfExp, texts: tuple[ast.expr, ast.expr], lookup: Lookup, scope: Scope
) -> Iterator[Way]:
    """The ways of ``a if test else b``.

    Args:
        node: The expression.
        texts: What stands in text where the test holds, and where it does not.
        lookup: Of the function.
        scope: Around the expression.
    """
    yield _condition(node.test, texts[0], lookup, scope)
    yield Way(node.orelse, else_words([node.test]), texts[1], Always())


def match_ways(node: ast.Match, lookup: Lookup, scope: Scope) -> Iterator[Way]:
    """The ways of ``match``.

    Raises:
        RefusedError: What is matched cannot be compiled.
    """
    subject = lookup.expression(node.subject, scope)
    for case in node.cases:
        try:
            yield _case(case, subject, lookup, scope)
        except RefusedError as error:
            # What it captures is not known, so a look through its body would find false problems.
            yield Way(case.pattern, case_words(case), (), None, problem=error)


def _condition(
    test: ast.expr, body: Sequence[ast.stmt] | ast.expr, lookup: Lookup, scope: Scope
) -> Way:
    try:
        expression = lookup.expression(test, scope)
        words = condition_words(test)
        if not expression.is_known:
            hints = dict(_narrowing(test, lookup, scope))
            return Way(test, words, body, Condition(expression), hints=hints)
        return Way(test, words, body, Always() if value_of(expression) else None)
    except RefusedError as error:
        return Way(test, "", body, None, problem=error)


def _narrowing(test: ast.expr, lookup: Lookup, scope: Scope) -> Iterator[tuple[str, Hints]]:
    """What ``isinstance`` says about names where a condition holds."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            for each in values:
                yield from _narrowing(each, lookup, scope)
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kinds]):
            if name in scope.hints:
                yield name, narrowed(scope.hints[name], _classes(lookup.known(kinds, scope)))


def _classes(kinds: object) -> tuple[type, ...]:
    if isinstance(kinds, tuple):
        return tuple(each for kind in kinds for each in _classes(kind))
    return (kinds,) if isinstance(kinds, type) else ()


def _case(case: ast.match_case, subject: Expression, lookup: Lookup, scope: Scope) -> Way:
    pattern, words = case.pattern, case_words(case)
    check_pattern(pattern)
    constants: dict[str, object] = {}
    for node in pattern_values(pattern):
        lookup.known(node, scope)
        constants |= lookup.expression(node, scope).constants
    captures = _captures(pattern, lookup.hints(subject.node, scope), lookup, scope)
    for name in captures:
        if scope.has(name):
            raise RefusedError(
                pattern, f"the case gives {name!r} another value; capture under another name"
            )
    if subject.is_known:
        return _known_case(case, subject, constants, lookup, scope)
    hints = {**_subject_narrowing(pattern, subject, lookup, scope), **captures}
    guard = None
    if case.guard is not None:
        guard = lookup.expression(case.guard, scope.module(hints=hints))
        if guard.is_known:
            if not value_of(guard):
                return Way(pattern, words, case.body, None)
            guard = None
        else:
            hints |= dict(_narrowing(case.guard, lookup, scope.module(hints=hints)))
    if guard is None and isinstance(pattern, ast.MatchAs) and pattern.name is None:
        return Way(pattern, words, case.body, Always())
    return Way(pattern, words, case.body, Case(subject, pattern, constants, guard), hints=hints)


def _known_case(
    case: ast.match_case,
    subject: Expression,
    constants: Mapping[str, object],
    lookup: Lookup,
    scope: Scope,
) -> Way:
    """A case whose pattern is decided when the program is made."""
    words = case_words(case)
    try:
        found = match_pattern(case.pattern, value_of(subject), constants)
    except TypeError as error:
        raise RefusedError(case.pattern, str(error)) from error
    if found is None:
        return Way(case.pattern, words, case.body, None)
    test: Test | None = Always()
    if case.guard is not None:
        guard = lookup.expression(case.guard, scope.knowing(found))
        if not guard.is_known:
            test = Condition(guard)
        elif not value_of(guard):
            test = None
    return Way(case.pattern, words, case.body, test, constants=found)


def _captures(pattern: ast.pattern, hints: Hints, lookup: Lookup, scope: Scope) -> dict[str, Hints]:
    """The names that a pattern gives values, and what is known of these."""
    match pattern:
        case ast.MatchAs(pattern=inner, name=name):
            found = {} if inner is None else _captures(inner, hints, lookup, scope)
            if name is not None:
                found[name] = _narrowed_by(inner, hints, lookup, scope)
            return found
        case ast.MatchOr(patterns=patterns):
            found = {}
            for each in patterns:
                for name, more in _captures(each, hints, lookup, scope).items():
                    found[name] = (*found.get(name, ()), *more)
            return found
        case ast.MatchClass(cls=node):
            owner = lookup.known(node, scope)
            if not isinstance(owner, type):
                raise RefusedError(node, f"{ast.unparse(node)} is not a class")
            found = {}
            of_class = narrowed(hints, (owner,))
            try:
                attributes = attributes_of(pattern, owner)
            except TypeError as error:
                raise RefusedError(pattern, str(error)) from error
            for attribute, inner in attributes:
                below = of_class if attribute is None else attribute_hints(of_class, attribute)
                found |= _captures(inner, below, lookup, scope)
            return found
        case _:
            return {}


def _narrowed_by(pattern: ast.pattern | None, hints: Hints, lookup: Lookup, scope: Scope) -> Hints:
    match pattern:
        case ast.MatchClass(cls=node):
            return narrowed(hints, _classes(lookup.known(node, scope)))
        case ast.MatchOr(patterns=patterns) if all(
            isinstance(each, ast.MatchClass) for each in patterns
        ):
            return tuple(
                hint for each in patterns for hint in _narrowed_by(each, hints, lookup, scope)
            )
        case ast.MatchAs(pattern=inner) if inner is not None:
            return _narrowed_by(inner, hints, lookup, scope)
        case _:
            return hints


def _subject_narrowing(
    pattern: ast.pattern, subject: Expression, lookup: Lookup, scope: Scope
) -> dict[str, Hints]:
    if not isinstance(subject.node, ast.Name):
        return {}
    name = subject.node.id
    return {name: _narrowed_by(pattern, scope.hints[name], lookup, scope)}
