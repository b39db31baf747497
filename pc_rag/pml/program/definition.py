"""The function behind a program: its syntax tree, and where each of its nodes stands."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from pc_rag.errors import Problem, SchemaError
from pc_rag.pml.nodes import Location

if TYPE_CHECKING:
    from pc_rag.types import Role

_MAX_FILES_KEPT = 4
_OWNERS = ("self", "cls")


class RefusedError(Exception):
    """A node that has no PML; never leaves this room.

    Args:
        node: What cannot be compiled.
        message: Why, and what to write instead.
    """

    def __init__(self, node: ast.AST, message: str) -> None:
        self.node = node
        self.message = message
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Definition:
    """A plain function that is compiled.

    Attributes:
        function: As it was decorated.
        signature: Of the function.
        tree: Its syntax.
        lines: Of its file.
        path: Of its file, for errors.
        name: What prompts call its schema, and callers its module.
        role: The turn that all of its text lies in; ``None`` for no turn of its own.
    """

    function: FunctionType
    signature: inspect.Signature
    tree: ast.FunctionDef
    lines: tuple[str, ...]
    path: str
    name: str
    role: Role | None

    @property
    def is_generator(self) -> bool:
        """It yields its text; otherwise it returns it."""
        return inspect.isgeneratorfunction(self.function)

    def location(self, node: ast.AST) -> Location:
        """Where a node begins, in characters."""
        line = getattr(node, "lineno", self.tree.lineno)
        num_bytes = getattr(node, "col_offset", 0)
        before = self.lines[line - 1].encode()[:num_bytes]
        return Location(line, len(before.decode(errors="replace")) + 1)

    def problem(self, node: ast.AST, message: str) -> Problem:
        """A located problem."""
        place = self.location(node)
        return Problem(place.line, place.column, message)

    def error(self, *messages: str) -> SchemaError:
        """The error of problems of the whole function."""
        problems = tuple(self.problem(self.tree, message) for message in messages)
        return SchemaError(problems, self.path)


def read_definition(function: object, *, name: str | None, role: Role | None) -> Definition:
    """Find the syntax of a function in its file.

    Args:
        function: What was decorated.
        name: Of the program; ``None`` for the function's own.
        role: Of the program.

    Raises:
        SchemaError: It is no plain function, or its source is not to be had.
    """
    if isinstance(function, (staticmethod, classmethod)):
        kind = type(function).__name__
        raise SchemaError(f"a program is a plain function; put @{kind} above @program")
    if not isinstance(function, FunctionType):
        raise SchemaError(
            f"a program is a plain function, not {function!r}; put @program right above its def"
        )
    path = function.__code__.co_filename
    if function.__name__ == "<lambda>":
        raise SchemaError("a program is a plain function, not a lambda; write a def", path)
    if hasattr(function, "__wrapped__"):
        raise SchemaError(
            f"{function.__qualname__} is wrapped by another decorator; put @program right above "
            "its def",
            path,
        )
    try:
        lines, _ = inspect.findsource(function)
    except (OSError, TypeError, IndexError) as error:
        raise SchemaError(
            f"the source of {function.__qualname__} is not available, and programs are compiled "
            "from it; define it in a file, not in an interactive session or in executed text",
            path,
        ) from error
    tree = _find(function, "".join(lines))
    if not isinstance(tree, ast.FunctionDef):
        what = (
            "is a coroutine; make it a plain function, with def and without await"
            if tree
            else "does not stand in its file as it did when it was run; import it again"
        )
        place = Problem(function.__code__.co_firstlineno, 0, f"{function.__qualname__} {what}")
        raise SchemaError((place,), path)
    signature = inspect.signature(function)
    owner = function.__qualname__.rpartition(".")[0]
    if owner and not owner.endswith("<locals>") and next(iter(signature.parameters), "") in _OWNERS:
        raise SchemaError(
            f"{function.__qualname__} is a method, whose text depends on an object; make it a "
            "plain function, or a static method with @staticmethod above @program",
            path,
        )
    name = function.__name__ if name is None else name
    return Definition(function, signature, tree, tuple(lines), path, name, role)


def definition_of(value: object) -> Definition | None:
    """The definition of a program; ``None`` for anything else."""
    found = getattr(value, "definition", None) if callable(value) else None
    return found if isinstance(found, Definition) else None


def _find(function: FunctionType, text: str) -> ast.FunctionDef | ast.expr | ast.stmt | None:
    """The definition that begins where the function's code does.

    The whole file is parsed, because cutting a function out and moving it to the margin would
    change the strings in it that go over several lines.
    """
    code = function.__code__
    for node in _functions(text):
        first = min((each.lineno for each in node.decorator_list), default=node.lineno)
        if first == code.co_firstlineno and node.name == code.co_name:
            every = node.args
            names = [a.arg for a in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
            is_same = (*names,) == code.co_varnames[: len(names)] and _is_code_of(text, code)
            return node if is_same else None
    return None


def _is_code_of(text: str, code: CodeType) -> bool:
    """Whether a file, as it is now, says what a function that was read from it does.

    A file that was changed on the same line since it was imported would give another text than the
    function. The file is compiled to compare, and never run.
    """
    return any(
        each.co_firstlineno == code.co_firstlineno
        and each.co_name == code.co_name
        and _meaning(each) == _meaning(code)
        for each in _codes(text)
    )


def _meaning(code: CodeType) -> tuple[object, ...]:
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames


@lru_cache(maxsize=_MAX_FILES_KEPT)
def _codes(text: str) -> tuple[CodeType, ...]:
    """Every code object of a file."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # which notebooks allow
    found = [compile(text, "<program>", "exec", flags=flags, dont_inherit=True)]
    for code in found:  # which grows
        found += (each for each in code.co_consts if isinstance(each, CodeType))
    return tuple(found)


@lru_cache(maxsize=_MAX_FILES_KEPT)
def _functions(text: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in ast.walk(tree) if isinstance(node, kinds))
