"""From a document to its nodes, or to one error with all of its problems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pc_rag.errors import PMLError, PromptError, SchemaError
from pc_rag.pml.nodes import Import, Module, Prompt, RoleBlock, Schema, Text, Union
from pc_rag.pml.tree import read_tree
from pc_rag.pml.validation import prompt_problems, schema_problems
from pc_rag.types import Role

if TYPE_CHECKING:
    from os import PathLike

    from pc_rag.pml.nodes import PromptChild, SchemaChild
    from pc_rag.pml.tree import Element, TreeChild


def parse_schema(document: str | bytes, *, source: str = "<string>") -> Schema:
    """Parse a schema.

    Args:
        document: The characters, or bytes in UTF-8 or in the encoding that they declare.
        source: Name of the document, for errors.

    Raises:
        PMLSyntaxError: It is not well-formed XML, or uses a part of XML that PML refuses.
        SchemaError: It breaks rules of PML; holds every problem with line and column.
    """
    root = read_tree(document, source)
    problems = schema_problems(root)
    if problems:
        raise SchemaError(problems, source)
    children = tuple(_schema_child(child) for child in root.children)
    return Schema(root.attributes["name"], children, root.location, source)


def parse_prompt(document: str | bytes, *, source: str = "<string>") -> Prompt:
    """Parse a prompt. Whether its imports fit a schema is checked when it is planned.

    Args:
        document: The characters, or bytes in UTF-8 or in the encoding that they declare.
        source: Name of the document, for errors.

    Raises:
        PMLSyntaxError: It is not well-formed XML, or uses a part of XML that PML refuses.
        PromptError: It is no prompt; holds every problem with line and column.
    """
    root = read_tree(document, source)
    problems = prompt_problems(root)
    if problems:
        raise PromptError(problems, source)
    children = tuple(_prompt_child(child) for child in root.children)
    return Prompt(root.attributes["schema"], children, root.location, source)


def read_schema(path: str | PathLike[str]) -> Schema:
    """Parse the schema in a file; errors name the file.

    Raises:
        PMLError: The file cannot be read.
        PMLSyntaxError: As ``parse_schema``.
        SchemaError: As ``parse_schema``.
    """
    try:
        document = Path(path).read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}; check the path and its permissions"
        raise PMLError(problem, str(path)) from error
    return parse_schema(document, source=str(path))


def _schema_child(child: TreeChild) -> SchemaChild:
    if isinstance(child, Text):
        return child
    if child.tag == "union":
        members = (_module(part) for part in child.children if not isinstance(part, Text))
        return Union(tuple(members), child.location)
    if child.tag == "module":
        return _module(child)
    children = tuple(_schema_child(part) for part in child.children)
    return RoleBlock(Role(child.tag), children, child.location)


def _module(element: Element) -> Module:
    children = tuple(_schema_child(part) for part in element.children)
    return Module(element.attributes["name"], children, element.location)


def _prompt_child(child: TreeChild) -> PromptChild:
    if isinstance(child, Text):
        return child
    return Import(child.tag, tuple(_prompt_child(part) for part in child.children), child.location)
