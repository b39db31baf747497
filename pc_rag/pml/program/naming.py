"""Names of modules and parameters, made from the conditions and names of a program."""

from __future__ import annotations

import ast

from pc_rag.pml.names import RESERVED_NAMES, is_name

MAX_LENGTH = 48
"""Characters of a name that is made from a condition; what is longer is cut."""

OTHERS = "other"
"""What is left when no condition holds."""

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "is",
    ast.NotEq: "is not",
    ast.Lt: "below",
    ast.LtE: "at most",
    ast.Gt: "above",
    ast.GtE: "at least",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_TURNED_ROUND: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}
_UNARY: dict[type[ast.unaryop], str] = {ast.Not: "not", ast.USub: "minus"}
_NOT_PARAMETERS = ("schema", "xmlns")
"""Names that mean something else as attributes of prompts."""


class Names:
    """The names of one enclosing module, each given once."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._parameters: set[str] = set()

    def module(self, base: str) -> str:
        """A name of a module: the base, or the base with the first number that is free."""
        return _unique(base, self._modules)

    def own(self, name: str) -> str:
        """A name of the module of a program that is called: its own, if it can be."""
        is_free = is_name(name) and name not in RESERVED_NAMES
        return self.module(name if is_free else slug(name))

    def parameter(self, base: str) -> str:
        """A name of a parameter, likewise."""
        name = base if is_name(base) else slug(base)
        return _unique(f"{name}_" if name in _NOT_PARAMETERS else name, self._parameters)


def slug(words: str) -> str:
    """Words as a name: lower case, and hyphens for all that no name can hold.

    Dots are hyphens too, so that only a number that makes a name unique stands behind a dot.
    """
    kept = (c if c != "." and is_name(f"a{c}") else "-" for c in words.lower())
    name = "-".join(part for part in "".join(kept).split("-") if part)[:MAX_LENGTH].rstrip("-")
    if not name:
        return "empty"
    if not is_name(name):
        name = f"_{name}"
    return f"{name}_" if name in RESERVED_NAMES else name


def condition_words(node: ast.expr) -> str:
    """What a condition says, in words."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.Attribute(value=owner, attr=attribute):
            is_class = isinstance(owner, ast.Name) and owner.id[:1].isupper()
            return attribute if is_class else f"{condition_words(owner)} {attribute}"
        case ast.UnaryOp() | ast.BoolOp() | ast.Compare():
            return _operator_words(node)
        case ast.Call(func=ast.Name(id="isinstance"), args=[value, kinds]):
            return f"{condition_words(value)} is {condition_words(kinds)}"
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return " or ".join(map(condition_words, items))
        case _:
            return ast.unparse(node)


def _operator_words(node: ast.UnaryOp | ast.BoolOp | ast.Compare) -> str:
    if isinstance(node, ast.UnaryOp):
        return f"{_UNARY.get(type(node.op), '')} {condition_words(node.operand)}"
    if isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        return word.join(map(condition_words, node.values))
    return _comparison_words(node)


def _comparison_words(node: ast.Compare) -> str:
    left, comparisons = node.left, list(zip(node.ops, node.comparators, strict=True))
    words = [condition_words(left)]
    op, right = comparisons[0]
    if isinstance(left, ast.Constant) and type(op) in _TURNED_ROUND:
        # 2 <= days <= 3: days at least 2 and at most 3
        words = [condition_words(right), _COMPARISONS[_TURNED_ROUND[type(op)]], *words]
        comparisons = comparisons[1:]
        words += ["and"] if comparisons else []
    for op, each in comparisons:
        words += [_COMPARISONS[type(op)], condition_words(each)]
    return " ".join(words)


def else_words(conditions: list[ast.expr]) -> str:
    """What holds when none of the conditions does."""
    if len(conditions) != 1:
        return OTHERS
    match conditions[0]:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return condition_words(operand)
        case condition:
            return f"not {condition_words(condition)}"


def case_words(case: ast.match_case) -> str:
    """What a case of a match says, in words."""
    words = _pattern_words(case.pattern) or OTHERS
    return words if case.guard is None else f"{words} if {condition_words(case.guard)}"


def _pattern_words(pattern: ast.pattern) -> str:
    match pattern:
        case ast.MatchValue(value=value):
            return condition_words(value) or "empty"
        case ast.MatchSingleton(value=value):
            return str(value)
        case ast.MatchOr(patterns=patterns):
            return " or ".join(_pattern_words(each) or OTHERS for each in patterns)
        case ast.MatchClass(cls=owner, patterns=patterns, kwd_patterns=named):
            inner = [words for each in (*patterns, *named) if (words := _pattern_words(each))]
            return " ".join((ast.unparse(owner).rpartition(".")[2], *inner))
        case ast.MatchAs(pattern=inner) if inner is not None:
            return _pattern_words(inner)
        case _:
            return ""


def _unique(base: str, taken: set[str]) -> str:
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}.{number}"
    taken.add(name)
    return name
