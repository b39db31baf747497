"""What is called, and with which arguments."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING

from pc_rag.pml.program.definition import RefusedError, definition_of
from pc_rag.pml.program.expression import given
from pc_rag.pml.program.scope import value_of
from pc_rag.pml.program.values import is_path

if TYPE_CHECKING:
    from pc_rag.pml.program.definition import Definition
    from pc_rag.pml.program.expression import Expression
    from pc_rag.pml.program.scope import Lookup, Scope


def callee_of(
    node: ast.Call, caller: Definition, lookup: Lookup, scope: Scope
) -> Definition | None:
    """The program that is called; ``None`` where something else is.

    Raises:
        RefusedError: It is the caller itself, or a name that is not known.
    """
    function = node.func
    own = caller.function.__name__
    if isinstance(function, ast.Name) and function.id == own and not scope.has(own):
        raise RefusedError(node, f"{own} calls itself; a program has an end")
    called = lookup.expression(function, scope) if is_path(function) else None
    return definition_of(value_of(called)) if called is not None and called.is_known else None


def bound_arguments(
    node: ast.Call, callee: Definition, lookup: Lookup, scope: Scope
) -> dict[str, Expression]:
    """What a call gives each parameter, defaults included.

    Raises:
        RefusedError: The arguments do not fit the signature, or cannot be compiled.
    """
    has_starred = any(isinstance(each, ast.Starred) for each in node.args)
    if has_starred or any(each.arg is None for each in node.keywords):
        raise RefusedError(node, "starred arguments are not compiled; write them out")
    keywords = {str(each.arg): each.value for each in node.keywords}
    try:
        bound = callee.signature.bind(*node.args, **keywords).arguments
    except TypeError as error:
        raise RefusedError(node, f"{callee.name}: {error}") from error
    values = {name: lookup.expression(each, scope) for name, each in bound.items()}
    for name, parameter in callee.signature.parameters.items():
        if name not in values and parameter.default is not inspect.Parameter.empty:
            values[name] = given(parameter.default)
    return values
