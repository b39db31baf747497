"""What a PML document says, as values: schemas and what they declare, prompts and their imports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Reserved positions that an argument of the prompt fills (the paper, section 3.2.2).

    Attributes:
        name: Unique among the parameters of the nearest enclosing module, or of the schema.
        max_tokens: Position IDs it reserves; an argument has at most as many tokens. At least 1.
        scaffold: Text that stands in its place while what holds it is encoded; without one the
            model's neutral token does.
        default: The argument of prompts that give none; ``None`` where they must.
        pads_with_space: A shorter argument is filled up with spaces; otherwise the positions behind
            it stay empty.
        location: Of its tag. Not compared.
    """

    name: str
    max_tokens: int
    scaffold: str | None = None
    default: str | None = None
    pads_with_space: bool = False
    location: Location = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Module:
    """Named reusable text.

    Attributes:
        name: Unique among the modules and scaffolds of the nearest enclosing module.
        children: What it holds, in document order.
        is_cached: Its KV, and that of all it holds, is stored. Otherwise it is computed in every
            request that imports it.
        location: Of its start tag. Not compared.
    """

    name: str
    children: tuple[SchemaChild, ...] = ()
    is_cached: bool = field(default=True, kw_only=True)
    location: Location = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Union:
    """Alternatives with one start position; a prompt imports at most one.

    Attributes:
        members: At least one module.
        scaffold: Name of the member that text behind the union attends when it is encoded; ``None``
            for none.
        location: Of its start tag. Not compared.
    """

    members: tuple[Module, ...]
    scaffold: str | None = field(default=None, kw_only=True)
    location: Location = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Modules that are encoded together besides each on its own.

    A prompt that imports all of them, or the scaffold itself, reads the KV in which each attends
    those before it. It adds no level: a member is imported by its own name.

    Attributes:
        name: Unique among the modules and scaffolds of the nearest enclosing module.
        members: At least two modules, which hold text, parameters and role blocks only: what they
            say is the same in every prompt.
        location: Of its start tag. Not compared.
    """

    name: str
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


SchemaChild: TypeAlias = Text | Parameter | Module | Union | Scaffold | RoleBlock


@dataclass(frozen=True, slots=True)
class Schema:
    """Declares modules; bare text in it is always included.

    Attributes:
        name: What prompts refer to.
        children: What it declares, in document order.
        location: Of its start tag. Not compared.
        source: Name of the document. Not compared.
    """

    name: str
    children: tuple[SchemaChild, ...] = ()
    location: Location = field(default=NOWHERE, compare=False)
    source: str = field(default="<string>", compare=False)


@dataclass(frozen=True, slots=True)
class Import:
    """The use of one module or scaffold in a prompt.

    Attributes:
        name: The name, or the dotted path, looked up in the module of the enclosing import.
        children: Text of this request, turns, and imports of modules nested in this one.
        arguments: Texts for the module's parameters, by name.
        location: Of its tag. Not compared.
    """

    name: str
    children: tuple[PromptChild, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict, hash=False, kw_only=True)
    location: Location = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat in a prompt, around text and imports of modules that lie in no turn.

    Attributes:
        role: Who speaks.
        children: What is said, in document order; holds no other turn at any depth.
        location: Of its start tag. Not compared.
    """

    role: Role
    children: tuple[PromptChild, ...] = ()
    location: Location = field(default=NOWHERE, compare=False)


PromptChild: TypeAlias = Text | Import | Turn


@dataclass(frozen=True, slots=True)
class Prompt:
    """Imports modules of one schema and adds text of its own.

    Attributes:
        schema: Name of the schema.
        children: Text, imports and turns, in document order.
        arguments: Texts for the parameters that lie in no module of the schema, by name.
        location: Of its start tag. Not compared.
        source: Name of the document. Not compared.
    """

    schema: str
    children: tuple[PromptChild, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict, hash=False, kw_only=True)
    location: Location = field(default=NOWHERE, compare=False)
    source: str = field(default="<string>", compare=False)

    def with_text(self, text: str) -> Prompt:
        """The same prompt with more text behind it, such as the question."""
        return replace(self, children=(*self.children, Text(text)))
