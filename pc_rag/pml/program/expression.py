"""Expressions that decide branches: a whitelist of syntax, and an evaluator that knows only it.

Nothing is compiled or executed; a value comes from walking the tree.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping  # evaluate.register reads annotations
from dataclasses import dataclass, field
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from pc_rag.errors import Problem, PromptError
from pc_rag.pml.nodes import NOWHERE, Location
from pc_rag.pml.program.definition import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

CALLABLE = (enumerate, isinstance, len, range, reversed, zip)
"""Built-in functions that an expression may call."""

_MAX_REPEATED = 100_000
_CONVERSIONS: Mapping[int, Callable[[object], object]] = {
    -1: lambda value: value,
    ord("s"): str,
    ord("r"): repr,
    ord("a"): ascii,
}


def _times(left: Any, right: Any) -> Any:  # noqa: ANN401 - numbers, or a text and a number
    texts = [each for each in (left, right) if isinstance(each, str)]
    if len(texts) == 1:
        count = right if texts[0] is left else left
        if isinstance(count, int) and len(texts[0]) * count > _MAX_REPEATED:
            raise ValueError(f"a repeated text of more than {_MAX_REPEATED:,} characters")
        return left * right
    return _of_numbers(operator.mul)(left, right)


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(left: object, right: object) -> object:
        if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            raise TypeError(
                f"arithmetic on {type(left).__name__} and {type(right).__name__}; only numbers can "
                "be computed with"
            )
        return function(left, right)

    return checked


_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _of_numbers(operator.add),
    ast.Sub: _of_numbers(operator.sub),
    ast.Mult: _times,
    ast.FloorDiv: _of_numbers(operator.floordiv),
    ast.Mod: _of_numbers(operator.mod),
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_OPERATORS = frozenset({*_ARITHMETIC, *_UNARY, *_COMPARISONS, ast.And, ast.Or})
_PARTS = (
    ast.keyword,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)
"""What expressions are made of that is no expression."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression of a program whose value is known at the latest when a prompt is built.

    Attributes:
        node: Its syntax; only what ``check_syntax`` lets through.
        constants: Values of names in it that no argument decides.
        is_known: No argument decides any of it.
        path: Of its file, for errors.
        location: Of the expression.
    """

    node: ast.expr
    constants: Mapping[str, object] = field(default_factory=dict)
    is_known: bool = False
    path: str = ""
    location: Location = NOWHERE

    def value(self, arguments: Mapping[str, object]) -> Any:  # noqa: ANN401 - any value of Python
        """Its value.

        Args:
            arguments: Values of the names that arguments decide.

        Raises:
            PromptError: Computing it fails with these arguments.
        """
        try:
            return evaluate(self.node, {**arguments, **self.constants})
        except Exception as error:
            # Whatever a value's own comparison raises is a fault of this prompt's arguments.
            raise self.failed(f"{type(error).__name__}: {error}") from error

    def failed(self, reason: str) -> PromptError:
        """The error that tells why it has no value with the arguments of a prompt."""
        message = f"{ast.unparse(self.node)} has no value with these arguments: {reason}"
        return PromptError((Problem(self.location.line, self.location.column, message),), self.path)


def given(value: object) -> Expression:
    """The expression of a value that is at hand."""
    return Expression(constant_node(value), is_known=True)


def constant_node(value: Any) -> ast.Constant:  # noqa: ANN401 - any value
    """A node that is evaluated as the value, though no source could write it."""
    return ast.Constant(value=value)


def check_syntax(node: ast.AST) -> None:
    """See that the evaluator knows everything in an expression.

    Raises:
        RefusedError: It does not.
    """
    for op in (getattr(node, "op", None), *getattr(node, "ops", ())):
        if op is not None and type(op) not in _OPERATORS:
            raise RefusedError(
                node, f"operator {type(op).__name__} is not compiled; compute it before the call"
            )
    if type(node) not in evaluate.registry and not isinstance(node, _PARTS):
        raise RefusedError(
            node,
            f"{_kind(node)} is not compiled; an expression may hold names, attributes, constants, "
            "comparisons, not, and, or, in, is, isinstance, len and arithmetic on numbers: compute "
            "it before the call, and pass the result as a parameter",
        )
    for child in ast.iter_child_nodes(node):
        check_syntax(child)


@singledispatch
def evaluate(node: ast.expr, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    """The value of an expression that ``check_syntax`` lets through.

    Args:
        node: Not modified.
        names: Values of all names in it.
    """
    raise NotImplementedError(f"{_kind(node)} of {len(names)} names")


@evaluate.register
def _(node: ast.Constant, _names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return node.value


@evaluate.register
def _(node: ast.Name, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return names[node.id]


@evaluate.register
def _(node: ast.Attribute, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return getattr(evaluate(node.value, names), node.attr)


@evaluate.register
def _(node: ast.Subscript, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return evaluate(node.value, names)[evaluate(node.slice, names)]


@evaluate.register
def _(node: ast.UnaryOp, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return _UNARY[type(node.op)](evaluate(node.operand, names))


@evaluate.register
def _(node: ast.BinOp, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    left = evaluate(node.left, names)
    return _ARITHMETIC[type(node.op)](left, evaluate(node.right, names))


@evaluate.register
def _(node: ast.IfExp, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return evaluate(node.body if evaluate(node.test, names) else node.orelse, names)


@evaluate.register
def _(node: ast.BoolOp, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    value: Any = None
    for each in node.values:
        value = evaluate(each, names)
        if bool(value) is isinstance(node.op, ast.Or):
            break
    return value


@evaluate.register
def _(node: ast.Compare, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    left = evaluate(node.left, names)
    value: Any = None
    for op, each in zip(node.ops, node.comparators, strict=True):
        right = evaluate(each, names)
        value = _COMPARISONS[type(op)](left, right)
        if not value:
            break
        left = right
    return value


@evaluate.register
def _(node: ast.Call, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    called = evaluate(node.func, names)
    if not any(called is each for each in CALLABLE):
        raise TypeError(f"{called!r} is not called by conditions")
    named = {str(each.arg): evaluate(each.value, names) for each in node.keywords}
    return called(*(evaluate(each, names) for each in node.args), **named)


@evaluate.register
def _(node: ast.Tuple, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return tuple(evaluate(each, names) for each in node.elts)


@evaluate.register
def _(node: ast.List, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return [evaluate(each, names) for each in node.elts]


@evaluate.register
def _(node: ast.Set, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return {evaluate(each, names) for each in node.elts}


@evaluate.register
def _(node: ast.JoinedStr, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    return "".join(str(evaluate(each, names)) for each in node.values)


@evaluate.register
def _(node: ast.FormattedValue, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - see Expression
    spec = "" if node.format_spec is None else str(evaluate(node.format_spec, names))
    return format_value(evaluate(node.value, names), node.conversion, spec)


def format_value(value: object, conversion: int, spec: str) -> str:
    """What an f-string makes of a value.

    Args:
        value: What stands in braces.
        conversion: The code of ``!s``, ``!r`` or ``!a``; -1 for none.
        spec: The format; empty for none.
    """
    return format(_CONVERSIONS[conversion](value), spec)


_KINDS = {
    "Lambda": "a lambda",
    "ListComp": "a comprehension",
    "SetComp": "a comprehension",
    "DictComp": "a comprehension",
    "GeneratorExp": "a comprehension",
    "NamedExpr": "an assignment inside of an expression",
    "Starred": "a starred value",
    "Slice": "a slice",
    "Dict": "a dict",
    "Yield": "a yield whose value is used",
    "YieldFrom": "a yield whose value is used",
    "Await": "await",
}


def _kind(node: ast.AST) -> str:
    name = type(node).__name__
    return _KINDS.get(name, name)
