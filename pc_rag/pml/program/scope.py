"""What a name means where it stands in a program."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.pml.program.definition import RefusedError, definition_of
from pc_rag.pml.program.expression import CALLABLE, Expression, check_syntax
from pc_rag.pml.program.max_tokens import attribute_hints, closure_of, parameter_hints
from pc_rag.pml.program.naming import Names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pc_rag.pml.program.definition import Definition
    from pc_rag.pml.program.max_tokens import Hints

_CONSTANT_CLASSES = (str, bytes, int, float, complex, bool, type(None), enum.Enum, range)


def is_constant(value: object) -> bool:
    """Whether a value can never change, so that it may become text when a program is made."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        frozen = bool(getattr(value, "__dataclass_params__").frozen)  # noqa: B009 - not in its type
        fields = (getattr(value, each.name) for each in dataclasses.fields(value))
        return frozen and all(map(is_constant, fields))
    return isinstance(value, _CONSTANT_CLASSES)


def _is_known(value: object) -> bool:
    """Whether a name outside of a program can be looked up when the program is made."""
    is_namespace = isinstance(value, (type, types.ModuleType))
    is_callable = value in CALLABLE if isinstance(value, types.BuiltinFunctionType) else False
    return is_constant(value) or is_namespace or is_callable or definition_of(value) is not None


@dataclass(frozen=True, slots=True)
class Scope:
    """The names that a part of a function sees, and the names of PML around it.

    Attributes:
        constants: Values of the function's own names that no argument decides.
        hints: Of the function's own names that arguments decide.
        names: Those given in the enclosing module.
    """

    constants: Mapping[str, object]
    hints: Mapping[str, Hints]
    names: Names = field(default_factory=Names)

    def knowing(self, constants: Mapping[str, object]) -> Scope:
        """The same module, with more constants."""
        return dataclasses.replace(self, constants={**self.constants, **constants})

    def module(
        self,
        *,
        constants: Mapping[str, object] | None = None,
        hints: Mapping[str, Hints] | None = None,
    ) -> Scope:
        """A module below, with more names."""
        return Scope({**self.constants, **(constants or {})}, {**self.hints, **(hints or {})})

    def has(self, name: str) -> bool:
        """Whether the function gave the name a value before this place."""
        return name in self.constants or name in self.hints


class Lookup:
    """Finds what expressions of one function mean.

    Args:
        definition: Of the function.
    """

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        function = definition.function
        code = function.__code__
        self._own_names = {*code.co_varnames, *code.co_cellvars}
        self._around = closure_of(function)

    def expression(self, node: ast.expr, scope: Scope) -> Expression:
        """An expression with all its names looked up.

        Raises:
            RefusedError: Its syntax is not known, or a name in it.
        """
        check_syntax(node)
        constants: dict[str, object] = {}
        is_known = True
        for name in (each for each in ast.walk(node) if isinstance(each, ast.Name)):
            if name.id in scope.hints:
                is_known = False
            else:
                value = constants[name.id] = self._value(name, scope)
                is_known = is_known and _is_known(value)
        self._check_calls(node, constants)
        path, location = self._definition.path, self._definition.location(node)
        return Expression(node, constants, is_known=is_known, path=path, location=location)

    def known(self, node: ast.expr, scope: Scope) -> object:
        """The value of an expression that no argument decides.

        Raises:
            RefusedError: An argument decides it, or it cannot be computed.
        """
        expression = self.expression(node, scope)
        if not expression.is_known:
            raise RefusedError(
                node,
                f"{ast.unparse(node)} is not known when the program is made; use constants: "
                "literals, or names whose values cannot change, such as tuples",
            )
        return value_of(expression)

    def hints(self, node: ast.expr, scope: Scope) -> Hints:
        """What annotations say about a name or its attributes; empty where they say nothing."""
        match node:
            case ast.Name(id=name):
                return scope.hints.get(name, ())
            case ast.Attribute(value=owner, attr=attribute):
                return attribute_hints(self.hints(owner, scope), attribute)
            case _:
                return ()

    def parameter_hints(self) -> dict[str, Hints]:
        """What annotations say about the function's parameters."""
        function = self._definition.function
        return {
            name: parameter_hints(function, name) for name in self._definition.signature.parameters
        }

    def _value(self, node: ast.Name, scope: Scope) -> object:
        name = node.id
        if name in scope.constants:
            return scope.constants[name]
        if name in self._own_names:
            raise RefusedError(
                node,
                f"{name!r} has no value here that is known; use parameters, loop variables inside "
                "of their loop, and captures inside of their case",
            )
        function = self._definition.function
        namespaces = [self._around]
        if name not in function.__code__.co_freevars:
            namespaces = [function.__globals__, vars(builtins)]
        for names in namespaces:
            if name in names:
                return names[name]
        raise RefusedError(
            node, f"{name!r} is not defined yet where the program is made; define it above"
        )

    def _check_calls(self, node: ast.expr, constants: Mapping[str, object]) -> None:
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            function = call.func
            called = constants.get(function.id) if isinstance(function, ast.Name) else None
            if not any(called is each for each in CALLABLE):
                raise RefusedError(
                    call,
                    f"a call of {ast.unparse(function)} is not compiled here; compute it before "
                    "the call of the program and pass the result as a parameter, or make the "
                    "function a program with @program and yield from it",
                )
            if any(isinstance(each, ast.Starred) for each in call.args) or any(
                each.arg is None for each in call.keywords
            ):
                raise RefusedError(call, "starred arguments are not compiled; write them out")


def value_of(expression: Expression) -> object:
    """The value of an expression that is known.

    Raises:
        RefusedError: It cannot be computed.
    """
    from pc_rag.errors import PromptError  # noqa: PLC0415

    try:
        return expression.value({})
    except PromptError as error:
        raise RefusedError(expression.node, error.problems[0].message) from error
