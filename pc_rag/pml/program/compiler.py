"""From the statements of a function to the parts of its text."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from pc_rag.errors import SchemaError
from pc_rag.pml.program.arms import Always
from pc_rag.pml.program.calls import bound_arguments, callee_of
from pc_rag.pml.program.choices import conditional_ways, if_ways, match_ways
from pc_rag.pml.program.definition import RefusedError
from pc_rag.pml.program.expression import constant_node
from pc_rag.pml.program.loops import Budget, loop_turns
from pc_rag.pml.program.naming import slug
from pc_rag.pml.program.recipe import Arm, Call, Choice
from pc_rag.pml.program.refusals import refusal
from pc_rag.pml.program.scope import Lookup, Scope, is_constant, value_of
from pc_rag.pml.program.values import value_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pc_rag.errors import Problem
    from pc_rag.pml.program.choices import Way
    from pc_rag.pml.program.definition import Definition
    from pc_rag.pml.program.max_tokens import Hints
    from pc_rag.pml.program.recipe import Part


def compile_parts(definition: Definition) -> tuple[Part, ...]:
    """What a program says.

    Raises:
        SchemaError: Something in it cannot be compiled; holds every such place.
    """
    compiler = _Compiler(definition, Budget(), (definition,), is_in_turn=bool(definition.role))
    parts = compiler.function({}, compiler.lookup.parameter_hints())
    if compiler.problems:
        raise SchemaError(tuple(sorted(set(compiler.problems))), definition.path)
    return parts


class _Compiler:
    """Compiles one function, for one set of known arguments.

    Args:
        definition: Of the function.
        budget: Shared with the programs that call it.
        callers: It, behind the programs that call it.
        is_in_turn: Its text lies in a turn.
    """

    def __init__(
        self,
        definition: Definition,
        budget: Budget,
        callers: tuple[Definition, ...],
        *,
        is_in_turn: bool,
    ) -> None:
        self.lookup = Lookup(definition)
        self.problems: list[Problem] = []
        self._definition = definition
        self._budget = budget
        self._callers = callers
        self._is_in_turn = is_in_turn
        self._text_name: str | None = None

    def function(
        self, constants: Mapping[str, object], hints: Mapping[str, Hints]
    ) -> tuple[Part, ...]:
        """What the function says; problems are noted, not raised.

        Args:
            constants: Parameters that are known.
            hints: Parameters that are not.
        """
        tree = self._definition.tree
        for starred in (tree.args.vararg, tree.args.kwarg):
            if starred is not None:
                self._refuse(starred, "starred parameters are not compiled; name each parameter")
        scope = Scope(constants, hints)
        statements = [each for each in tree.body if not _says_nothing(each)]
        if self._definition.is_generator:
            return tuple(self._body(statements, scope))
        return tuple(self._returned(statements, scope))

    # -- functions that return their text -----------------------------------------------------

    def _returned(self, statements: list[ast.stmt], scope: Scope) -> list[Part]:
        last = statements[-1] if statements else self._definition.tree
        if not (isinstance(last, ast.Return) and last.value is not None):
            self._refuse(last, "the function does not end by returning its text; end with return")
            is_bare_return = isinstance(last, ast.Return)
            return self._body(statements[:-1] if is_bare_return else statements, scope)
        first, *rest = statements
        if isinstance(first, ast.Assign):
            target = first.targets[0] if len(first.targets) == 1 else None
        else:
            target = first.target if isinstance(first, ast.AnnAssign) else None
        if not isinstance(target, ast.Name):
            return [*self._body(statements[:-1], scope), *self._text(last.value, scope)]
        if scope.has(target.id):
            self._refuse(first, f"parameter {target.id!r} is given another value; rename it")
        start = first.value if isinstance(first, (ast.Assign, ast.AnnAssign)) else None
        if start is None:
            self._refuse(first, f'{target.id!r} has no text yet; write {target.id} = ""')
            return []
        parts = self._text(start, scope)
        self._text_name = target.id
        parts += self._body(rest[:-1], scope)
        return parts + self._text_behind(last.value, scope)

    def _text_behind(self, node: ast.expr, scope: Scope) -> list[Part]:
        """What a returned expression adds to the text so far, which it has to begin with."""
        name = self._text_name
        match node:
            case ast.Name() if node.id == name:
                return []
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [*self._text_behind(left, scope), *self._text(right, scope)]
            case ast.JoinedStr(
                values=[
                    ast.FormattedValue(value=ast.Name() as first, conversion=-1, format_spec=None),
                    *rest,
                ]
            ) if first.id == name:
                return [part for each in rest for part in self._text(each, scope)]
        self._refuse(node, f"what is returned does not begin with {name!r}; return {name} + ...")
        return []

    # -- statements ---------------------------------------------------------------------------

    def _body(self, statements: Sequence[ast.stmt], scope: Scope) -> list[Part]:
        parts: list[Part] = []
        for statement in statements:
            try:
                parts += self._statement(statement, scope)
            except RefusedError as error:
                self._refuse(error.node, error.message)
        return parts

    def _statement(self, node: ast.stmt, scope: Scope) -> list[Part]:
        match node:
            case _ if _says_nothing(node):
                parts: list[Part] = []
            case ast.If():
                parts = self._choice(if_ways(node, self.lookup, scope), scope)
            case ast.Match():
                parts = self._choice(match_ways(node, self.lookup, scope), scope)
            case ast.For():
                turns = loop_turns(node, self.lookup, scope, self._budget)
                inside = (self._body(node.body, scope.knowing(turn)) for turn in turns)
                parts = [part for turn in inside for part in turn]
            case ast.Expr(value=ast.Yield(value=value)) if value is not None:
                parts = self._text(value, scope)
            case ast.Expr(value=ast.YieldFrom(value=value)):
                parts = self._yielded_from(value, scope)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value) if (
                name == self._text_name
            ):
                parts = self._text(value, scope)
            case _:
                raise refusal(node, self._text_name)
        return parts

    def _choice(self, ways: Iterable[Way], scope: Scope) -> list[Part]:
        arms: list[Arm] = []
        for way in ways:
            if way.problem is not None:
                self._refuse(way.problem.node, way.problem.message)
                self._said(way, scope.module())
            if way.test is None:
                continue
            is_certain = isinstance(way.test, Always)
            if is_certain and not arms:
                return self._said(way, scope.knowing(way.constants))
            parts = self._said(way, scope.module(constants=way.constants, hints=way.hints))
            name = scope.names.module(slug(way.words)) if parts else None
            place = self._definition.location(way.node)
            arms.append(Arm(name, way.test, tuple(parts), place))
            if is_certain:
                break
        return [Choice(tuple(arms))] if any(arm.name for arm in arms) else []

    def _said(self, way: Way, scope: Scope) -> list[Part]:
        if isinstance(way.body, ast.expr):
            return self._text(way.body, scope)
        return self._body(way.body, scope)

    # -- text ---------------------------------------------------------------------------------

    def _text(self, node: ast.expr, scope: Scope) -> list[Part]:
        """What an expression says that is text; problems are noted, not raised."""
        try:
            match node:
                case ast.JoinedStr(values=values):
                    parts = [part for each in values for part in self._text(each, scope)]
                case ast.BinOp(left=left, op=ast.Add(), right=right):
                    parts = [*self._text(left, scope), *self._text(right, scope)]
                case ast.IfExp(body=body, orelse=orelse):
                    ways = conditional_ways(node, (body, orelse), self.lookup, scope)
                    parts = self._choice(ways, scope)
                case ast.FormattedValue():
                    parts = self._formatted(node, scope)
                case ast.Call():
                    parts = self._text_of_call(node, scope)
                case _:
                    value = self.lookup.expression(node, scope)
                    parts = value_parts(value, self.lookup, scope, is_bare=True)
        except RefusedError as error:
            self._refuse(error.node, error.message)
            return []
        return parts

    def _formatted(self, node: ast.FormattedValue, scope: Scope) -> list[Part]:
        """What stands in the braces of an f-string."""
        inner, conversion = node.value, node.conversion
        if isinstance(inner, ast.IfExp):
            body, orelse = (
                ast.copy_location(ast.FormattedValue(each, conversion, node.format_spec), each)
                for each in (inner.body, inner.orelse)
            )
            ways = conditional_ways(inner, (body, orelse), self.lookup, scope)
            return self._choice(ways, scope)
        is_plain = conversion == -1 and node.format_spec is None
        if is_plain and isinstance(inner, ast.JoinedStr):
            return self._text(inner, scope)
        if is_plain and isinstance(inner, ast.Call) and self._says_text(inner, scope):
            return self._text_of_call(inner, scope)
        spec = "" if node.format_spec is None else str(self.lookup.known(node.format_spec, scope))
        value = self.lookup.expression(inner, scope)
        return value_parts(value, self.lookup, scope, conversion=conversion, spec=spec)

    # -- calls --------------------------------------------------------------------------------

    def _yielded_from(self, node: ast.expr, scope: Scope) -> list[Part]:
        if isinstance(node, ast.Call):
            callee = callee_of(node, self._definition, self.lookup, scope)
            if callee is not None:
                return [self._call(node, callee, scope)]
        values = self.lookup.known(node, scope)
        if not isinstance(values, (str, tuple, list)):
            raise RefusedError(node, "yield from takes the call of a program, or constant texts")
        texts = (ast.copy_location(constant_node(each), node) for each in values)
        return [part for text in texts for part in self._text(text, scope)]

    def _says_text(self, node: ast.Call, scope: Scope) -> bool:
        """Whether a call is one of a program, or joins the texts of one."""
        if _joined(node) is not None:
            return True
        return callee_of(node, self._definition, self.lookup, scope) is not None

    def _text_of_call(self, node: ast.Call, scope: Scope) -> list[Part]:
        inner = _joined(node)
        if inner is not None:
            return self._yielded_from(inner, scope)
        callee = callee_of(node, self._definition, self.lookup, scope)
        if callee is None:
            value = self.lookup.expression(node, scope)
            return value_parts(value, self.lookup, scope, is_bare=True)
        if callee.is_generator:
            call = ast.unparse(node)
            raise RefusedError(
                node, f'{callee.name} yields its text; write yield from {call}, or "".join({call})'
            )
        return [self._call(node, callee, scope)]

    def _call(self, node: ast.Call, callee: Definition, scope: Scope) -> Call:
        if any(callee.function is caller.function for caller in self._callers):
            raise RefusedError(node, f"{callee.name} calls itself in the end; a program has an end")
        if callee.role and self._is_in_turn:
            raise RefusedError(
                node,
                f"{callee.name} is a turn ({callee.role}) and is called inside of a turn; take "
                "role= from one of the two",
            )
        values = bound_arguments(node, callee, self.lookup, scope)
        constants = {
            name: value_of(each)
            for name, each in values.items()
            if each.is_known and is_constant(value_of(each))
        }
        unknown = {name: each for name, each in values.items() if name not in constants}
        callers = (*self._callers, callee)
        is_in_turn = self._is_in_turn or bool(callee.role)
        compiler = _Compiler(callee, self._budget, callers, is_in_turn=is_in_turn)
        hints = compiler.lookup.parameter_hints()
        parts = compiler.function(constants, {name: hints[name] for name in unknown})
        if compiler.problems:
            problem = min(compiler.problems)
            raise RefusedError(node, f"with these arguments, {callee.path}: {problem}")
        place = self._definition.location(node)
        return Call(scope.names.own(callee.name), unknown, callee.role, parts, place)

    def _refuse(self, node: ast.AST, message: str) -> None:
        self.problems.append(self._definition.problem(node, message))


def _says_nothing(node: ast.stmt) -> bool:
    is_remark = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_remark or isinstance(node, ast.Pass)


def _joined(node: ast.Call) -> ast.Call | None:
    """The call whose texts ``"".join(...)`` joins."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=""), attr="join"),
            args=[ast.Call() as inner],
            keywords=[],
        ):
            return inner
    return None
