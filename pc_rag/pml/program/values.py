"""A value in text: a constant becomes characters, an argument a parameter."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from pc_rag.pml.nodes import Parameter, Text
from pc_rag.pml.program.definition import RefusedError
from pc_rag.pml.program.expression import format_value
from pc_rag.pml.program.max_tokens import UnreadHint, classes_in, max_tokens_in
from pc_rag.pml.program.recipe import Slot
from pc_rag.pml.program.scope import is_constant, value_of
from pc_rag.pml.writer import first_unwritable

if TYPE_CHECKING:
    from pc_rag.pml.program.expression import Expression
    from pc_rag.pml.program.max_tokens import Hints, MaxTokens
    from pc_rag.pml.program.recipe import Part
    from pc_rag.pml.program.scope import Lookup, Scope


def value_parts(
    expression: Expression,
    lookup: Lookup,
    scope: Scope,
    *,
    conversion: int = -1,
    spec: str = "",
    is_bare: bool = False,
) -> list[Part]:
    """What a value says where it stands in text; nothing, where that is empty.

    Args:
        expression: The value.
        lookup: Of the function.
        scope: Around the expression.
        conversion: As ``format_value``.
        spec: As ``format_value``.
        is_bare: It stands there without an f-string around it, so it has to be text itself.

    Raises:
        RefusedError: It cannot stand in text.
    """
    if not expression.is_known:
        return [_slot(expression, lookup, scope, conversion, spec, is_bare=is_bare)]
    node, value = expression.node, value_of(expression)
    if not is_constant(value):
        raise _changing(node)
    if is_bare and not isinstance(value, str):
        raise RefusedError(
            node, f'{ast.unparse(node)} is {type(value).__name__}, not str; write f"{{...}}"'
        )
    try:
        text = format_value(value, conversion, spec)
    except (TypeError, ValueError) as error:
        raise RefusedError(node, f"it cannot be formatted: {error}") from error
    bad = first_unwritable(text)
    if bad is not None:
        raise RefusedError(node, f"no XML can hold U+{ord(bad):04X}; take it out of the text")
    return [Text(text, expression.location)] if text else []


def is_path(node: ast.expr) -> bool:
    """Whether an expression is a name, or attributes of one."""
    return _root(node) is not None


def _root(node: ast.expr) -> ast.Name | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _changing(node: ast.expr) -> RefusedError:
    shown = ast.unparse(node)
    return RefusedError(node, f"{shown} can change, so it is no text; make it a constant")


def _slot(
    value: Expression,
    lookup: Lookup,
    scope: Scope,
    conversion: int,
    spec: str,
    *,
    is_bare: bool,
) -> Slot:
    node = value.node
    shown = ast.unparse(node)
    root = _root(node)
    if root is None:
        raise RefusedError(
            node,
            f"{shown} in text is computed from arguments; compute it before the call, and pass it "
            "as a parameter of its own",
        )
    if root.id not in scope.hints:
        raise _changing(node)
    hints = lookup.hints(node, scope)
    limit = _limit(node, hints)
    classes = [each for hint in hints for each in classes_in(hint)]
    if is_bare and not all(issubclass(each, str) for each in classes):
        raise RefusedError(node, f'{shown} is no str; write f"{{{shown}}}"')
    parameter = Parameter(
        name=scope.names.parameter(shown),
        max_tokens=limit.max_tokens,
        scaffold=limit.scaffold,
        pads_with_space=limit.pads_with_space,
        location=value.location,
    )
    return Slot(parameter, value, conversion, spec, is_bare)


def _limit(node: ast.expr, hints: Hints) -> MaxTokens:
    """The one limit that all annotations of a value agree on."""
    shown = ast.unparse(node)
    unread = next((hint for hint in hints if isinstance(hint, UnreadHint)), None)
    if unread is not None:
        raise RefusedError(node, f"{shown} stands in text, and its annotation {unread.reason}")
    limits = {max_tokens_in(hint) for hint in hints}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None:
        what = "differs between its classes in" if limits else "has no"
        name = shown.rpartition(".")[2]
        raise RefusedError(
            node,
            f"{shown} stands in text, and its annotation {what} MaxTokens; write "
            f"{name}: Annotated[str, MaxTokens(10)] where it is declared, with the number of "
            "tokens to reserve",
        )
    return limit
