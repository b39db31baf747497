"""What a program says, between its Python and its PML: one list of parts for schema and prompts.

The schema holds every part; a prompt imports the modules of those that its arguments choose. Both
come from the same parts, so a prompt fits its schema.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.pml.nodes import NOWHERE, Import, Location, Module, Parameter, RoleBlock, Text, Union
from pc_rag.pml.program.expression import Expression, format_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pc_rag.pml.nodes import PromptChild, SchemaChild
    from pc_rag.pml.program.arms import Test
    from pc_rag.types import Role


@dataclass(frozen=True, slots=True)
class Slot:
    """An argument in text.

    Attributes:
        parameter: What reserves its tokens.
        value: The argument before it is formatted.
        conversion: As ``format_value``.
        spec: As ``format_value``.
        is_bare: It stands in text without an f-string around it, so it has to be text itself.
    """

    parameter: Parameter
    value: Expression
    conversion: int = -1
    spec: str = ""
    is_bare: bool = False

    def argument(self, arguments: Mapping[str, object]) -> str:
        """Its text in one prompt.

        Raises:
            PromptError: The argument cannot be formatted, or is no text where it has to be.
        """
        value = self.value.value(arguments)
        if self.is_bare and not isinstance(value, str):
            raise self.value.failed(f"it stands in text but is {type(value).__name__}, not str")
        try:
            return format_value(value, self.conversion, self.spec)
        except (TypeError, ValueError) as error:
            raise self.value.failed(str(error)) from error


@dataclass(frozen=True, slots=True)
class Arm:
    """One of several ways a program can go.

    Attributes:
        name: Of its module; ``None`` where it says nothing, so that there is nothing to import.
        test: Whether it is gone.
        parts: What it says.
        location: Of the condition.
    """

    name: str | None
    test: Test
    parts: tuple[Part, ...]
    location: Location


@dataclass(frozen=True, slots=True)
class Choice:
    """The first arm whose test holds is gone, or none."""

    arms: tuple[Arm, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Another program, in a module of its own.

    Attributes:
        name: Of the module.
        values: Of the other program's parameters that are not known before the prompt is built.
        role: Of the other program.
        parts: What the other program says.
        location: Of the call.
    """

    name: str
    values: Mapping[str, Expression]
    role: Role | None
    parts: tuple[Part, ...]
    location: Location


Part: TypeAlias = Text | Slot | Choice | Call


def schema_children(parts: tuple[Part, ...], role: Role | None) -> tuple[SchemaChild, ...]:
    """What a schema or module holds, in one turn where there is a role."""
    children: list[SchemaChild] = []
    for part in parts:
        match part:
            case Text(text=text):
                last = children[-1] if children else None
                if isinstance(last, Text):
                    children[-1] = replace(last, text=last.text + text)
                elif text:
                    children.append(part)
            case Slot(parameter=parameter):
                children.append(parameter)
            case Choice(arms=arms):
                children += _alternatives(arms)
            case Call(name=name, role=inner_role, parts=inner, location=location):
                inside = schema_children(inner, inner_role)
                children.append(Module(name, inside, location=location))
    if role is None:
        return tuple(children)
    return (RoleBlock(role, tuple(children)),)


def _alternatives(arms: tuple[Arm, ...]) -> tuple[SchemaChild, ...]:
    members = tuple(
        Module(arm.name, schema_children(arm.parts, None), location=arm.location)
        for arm in arms
        if arm.name is not None
    )
    return (Union(members, location=members[0].location),) if len(members) > 1 else members


@dataclass(frozen=True, slots=True)
class Filled:
    """What a prompt or import holds.

    Attributes:
        children: Imports, in the order of the schema.
        arguments: Of the parameters that lie in no module below.
    """

    children: tuple[PromptChild, ...]
    arguments: Mapping[str, str]


def fill(parts: tuple[Part, ...], arguments: Mapping[str, object]) -> Filled:
    """Choose among the parts, and put the arguments in.

    Args:
        parts: Of one module.
        arguments: Values of the names that are not known before.

    Raises:
        PromptError: A condition or an argument in text has no value.
    """
    children: list[PromptChild] = []
    texts: dict[str, str] = {}
    for part in parts:
        match part:
            case Slot(parameter=parameter):
                texts[parameter.name] = part.argument(arguments)
            case Choice(arms=arms):
                children += _chosen(arms, arguments)
            case Call(name=name, values=values, parts=inner):
                given = {key: each.value(arguments) for key, each in values.items()}
                children.append(_import(name, inner, given))
    return Filled(tuple(children), texts)


def _chosen(arms: tuple[Arm, ...], arguments: Mapping[str, object]) -> tuple[PromptChild, ...]:
    for arm in arms:
        captured = arm.test.captured(arguments)
        if captured is not None:
            if arm.name is None:
                return ()
            return (_import(arm.name, arm.parts, {**arguments, **captured}),)
    return ()


def _import(name: str, parts: tuple[Part, ...], arguments: Mapping[str, object]) -> Import:
    filled = fill(parts, arguments)
    return Import(name, filled.children, arguments=filled.arguments, location=NOWHERE)
