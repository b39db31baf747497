"""What a PML document says, as values: schemas, modules, unions, roles, prompts, imports, text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.types import Role


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Where a node begins in its document; 0 where it belongs to no document.

    Attributes:
        line: 1-based line.
        column: 1-based column, in characters.
    """

    line: int = 0
    column: int = 0


NOWHERE = Location()
"""The location of a node that was not read from a document."""


@dataclass(frozen=True, slots=True)
class Text:
    """Characters that the model reads, as they are after the whitespace rule.

    Attributes:
        text: The characters; never empty in a parsed document.
        location: Of the first visible character. Not compared.
    """

    text: str
    location: Location = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Module:
    """Named reusable text.

    Attributes:
        name: Unique among the modules of the nearest enclosing module.
        children: What it holds, in document order.
        location: Of its start tag. Not compared.
    """

    name: str
    children: tuple[SchemaChild, ...] = ()
    location: Location = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Union:
    """Alternatives with one start position; a prompt imports at most one.

    Attributes:
        members: At least one module.
        location: Of its start tag. Not compared.
    """

    members: tuple[Module, ...]
    location: Location = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class RoleBlock:
    """One turn of a chat, translated by the chat template of the model.

    Attributes:
        role: Who speaks.
        children: What is said, in document order; holds no other role block at any depth.
        location: Of its start tag. Not compared.
    """

    role: Role
    children: tuple[SchemaChild, ...] = ()
    location: Location = field(default=NOWHERE, compare=False)


SchemaChild: TypeAlias = Text | Module | Union | RoleBlock


@dataclass(frozen=True, slots=True)
class Schema:
    """Declares modules; bare text in it is always included.

    Attributes:
        name: What prompts refer to.
        children: Text, modules, unions and role blocks, in document order.
        location: Of its start tag. Not compared.
        source: Name of the document. Not compared.
    """

    name: str
    children: tuple[SchemaChild, ...] = ()
    location: Location = field(default=NOWHERE, compare=False)
    source: str = field(default="<string>", compare=False)


@dataclass(frozen=True, slots=True)
class Import:
    """The use of one module in a prompt.

    Attributes:
        name: The module's name, looked up in the module of the enclosing import.
        children: Text of this request, and imports of modules nested in this one.
        location: Of its tag. Not compared.
    """

    name: str
    children: tuple[PromptChild, ...] = ()
    location: Location = field(default=NOWHERE, compare=False)


PromptChild: TypeAlias = Text | Import


@dataclass(frozen=True, slots=True)
class Prompt:
    """Imports modules of one schema and adds text of its own.

    Attributes:
        schema: Name of the schema.
        children: Text and imports, in document order.
        location: Of its start tag. Not compared.
        source: Name of the document. Not compared.
    """

    schema: str
    children: tuple[PromptChild, ...] = ()
    location: Location = field(default=NOWHERE, compare=False)
    source: str = field(default="<string>", compare=False)


def modules_of(children: tuple[SchemaChild, ...]) -> Iterator[Module]:
    """The modules that an import at this place can name: unions and role blocks add no level."""
    for child in children:
        if isinstance(child, Module):
            yield child
        elif isinstance(child, Union):
            yield from child.members
        elif isinstance(child, RoleBlock):
            yield from modules_of(child.children)
