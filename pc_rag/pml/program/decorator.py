"""The decorator that makes a schema and a builder of prompts out of a Python function."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, overload

from pc_rag.errors import PromptError, SchemaError
from pc_rag.pml.names import is_name
from pc_rag.pml.nodes import Prompt, Schema
from pc_rag.pml.program.compiler import compile_parts
from pc_rag.pml.program.definition import Definition, read_definition
from pc_rag.pml.program.naming import Names
from pc_rag.pml.program.recipe import Call, Choice, fill, schema_children
from pc_rag.pml.writer import write_schema
from pc_rag.types import CHAT_ROLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pc_rag.pml.program.recipe import Part
    from pc_rag.types import Role

_P = ParamSpec("_P")
_R = TypeVar("_R")

END = "end"
"""Name of the empty module that ends a program with branches."""


class Program(Generic[_P, _R]):
    """A function that is also a schema, and builds prompts of it; made by ``program``.

    Calling it runs the plain function. Its name, docstring and annotations are the function's.

    Attributes:
        definition: The function and its syntax.
        schema: Everything that the function can say: add it to an engine once.
    """

    def __init__(self, function: Callable[_P, _R], definition: Definition) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.definition = definition
        self._parts = _with_end(compile_parts(definition), definition)
        self.schema = Schema(
            definition.name,
            schema_children(self._parts, definition.role),
            definition.location(definition.tree),
            definition.path,
        )
        try:
            write_schema(self.schema)
        except SchemaError as error:
            # Rules that only the whole can break, such as how deep modules lie in each other.
            messages = dict.fromkeys(problem.message for problem in error.problems)
            raise definition.error(*messages) from error

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """What the plain function gives."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<program {self.definition.name!r} of {self.definition.path}>"

    def prompt(self, *args: _P.args, **kwargs: _P.kwargs) -> Prompt:
        """The prompt that reads as what the plain function gives for the same arguments.

        Arguments that stand in text become arguments of the prompt; the others choose which
        modules it imports. Defaults apply.

        Raises:
            PromptError: The arguments do not fit the function's signature, or a condition cannot be
                computed with them.
        """
        try:
            bound = self.definition.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise PromptError(f"{self.definition.name}: {error}") from error
        bound.apply_defaults()
        filled = fill(self._parts, bound.arguments)
        return Prompt(self.definition.name, filled.children, arguments=filled.arguments)


@overload
def program(function: Callable[_P, _R], /) -> Program[_P, _R]: ...


@overload
def program(
    *, name: str | None = None, role: Role | None = None
) -> Callable[[Callable[_P, _R]], Program[_P, _R]]: ...


def program(
    function: Callable[_P, _R] | None = None,
    /,
    *,
    name: str | None = None,
    role: Role | None = None,
) -> Program[_P, _R] | Callable[[Callable[_P, _R]], Program[_P, _R]]:
    """Make a schema, and a builder of prompts, out of a function that yields or returns text.

    ``docs/programs.md`` says what becomes of each statement. The function's source is read, not
    changed, and nothing but the function itself is ever executed. Names outside of the function are
    looked up here, once.

    Args:
        function: A generator of texts, or a function that builds one text and returns it.
        name: Of the schema; the function's own by default.
        role: The turn of a chat that all of the text lies in; none by default.

    Raises:
        SchemaError: Something in the function cannot be compiled, or its source is not available;
            names the file, and holds every line with what to write instead.
    """
    if function is None:
        return functools.partial(_program, name=name, role=role)
    return _program(function, name=name, role=role)


def _program(function: Callable[_P, _R], *, name: str | None, role: Role | None) -> Program[_P, _R]:
    definition = read_definition(function, name=name, role=role)
    problems = []
    if not is_name(definition.name):
        problems.append(
            f"{definition.name!r} is no name of a schema; give another with @program(name=...)"
        )
    if role is not None and role not in CHAT_ROLES:
        roles = ", ".join(f"Role.{each.name}" for each in sorted(CHAT_ROLES))
        problems.append(f"role {str(role)!r} is no turn of a program; take one of {roles}")
    if problems:
        raise definition.error(*problems)
    return Program(function, definition)


def _with_end(parts: tuple[Part, ...], definition: Definition) -> tuple[Part, ...]:
    """Parts whose last is in every prompt, where a prompt imports anything.

    Text that is added to a prompt goes right behind the last import, which may lie in the middle of
    the program; an empty module at the end is the import that it goes behind then.
    """
    if (
        not parts
        or isinstance(parts[-1], Call)
        or not any(isinstance(each, (Choice, Call)) for each in parts)
    ):
        return parts
    names = Names()
    for part in parts:
        if isinstance(part, Call):
            names.module(part.name)
        elif isinstance(part, Choice):
            for arm in part.arms:
                names.module(arm.name or "")
    place = definition.location(definition.tree)
    return (*parts, Call(names.module(END), {}, None, (), place))
