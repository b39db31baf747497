"""From a document to its nodes, or to one error with all of its problems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pc_rag.errors import PMLError, PromptError, SchemaError
from pc_rag.pml.attributes import arguments_of, parameter_length
from pc_rag.pml.included import IncludedFiles
from pc_rag.pml.names import PARAMETER_TAGS
from pc_rag.pml.nodes import (
    Import,
    Module,
    Parameter,
    Prompt,
    RoleBlock,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
)
from pc_rag.pml.tree import read_tree
from pc_rag.pml.validation import prompt_problems, schema_problems
from pc_rag.types import CHAT_ROLES, Role

if TYPE_CHECKING:
    from os import PathLike

    from pc_rag.pml.nodes import PromptChild, SchemaChild
    from pc_rag.pml.tree import Element, TreeChild


def parse_schema(
    document: str | bytes,
    *,
    source: str = "<string>",
    src_root: str | PathLike[str] | None = None,
) -> Schema:
    """Parse a schema.

    Args:
        document: The characters, or bytes in UTF-8 or in the encoding that they declare.
        source: Name of the document, for errors.
        src_root: Folder below which ``src`` attributes name files; without one they are refused.
            No link below it is followed, and no file of more than 10,000,000 bytes is read.

    Raises:
        PMLSyntaxError: It is not well-formed XML, or uses a part of XML that PML refuses.
        SchemaError: It breaks rules of PML, or a file cannot be included; holds every problem with
            line and column.
    """
    root = read_tree(document, source)
    files = IncludedFiles(src_root)
    problems = schema_problems(root, files)
    if problems:
        raise SchemaError(problems, source)
    builder = _SchemaBuilder(files)
    children = builder.children(root, is_cached=True)
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
    return Prompt(
        root.attributes["schema"],
        children,
        arguments=arguments_of(root),
        location=root.location,
        source=source,
    )


def read_schema(
    path: str | PathLike[str], *, src_root: str | PathLike[str] | None = None
) -> Schema:
    """Parse the schema in a file; errors name the file.

    Args:
        path: Of the file.
        src_root: As for ``parse_schema``; the file's own folder has to be given, too.

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
    return parse_schema(document, source=str(path), src_root=src_root)


class _SchemaBuilder:
    """Makes nodes of elements that have no problems.

    Args:
        files: The included ones, which have been read.
    """

    def __init__(self, files: IncludedFiles) -> None:
        self._files = files

    def children(self, element: Element, *, is_cached: bool) -> tuple[SchemaChild, ...]:
        return tuple(self._child(child, is_cached=is_cached) for child in element.children)

    def _child(self, child: TreeChild, *, is_cached: bool) -> SchemaChild:
        if isinstance(child, Text):
            return child
        if child.tag in PARAMETER_TAGS:
            return _parameter(child)
        if child.tag == "module":
            return self._module(child, is_cached=is_cached)
        if child.tag == "union":
            members = self._members(child, is_cached=is_cached)
            scaffold = child.attributes.get("scaffold")
            return Union(members, scaffold=scaffold, location=child.location)
        if child.tag == "scaffold":
            members = self._members(child, is_cached=is_cached)
            return Scaffold(child.attributes["name"], members, child.location)
        children = self.children(child, is_cached=is_cached)
        return RoleBlock(Role(child.tag), children, child.location)

    def _members(self, element: Element, *, is_cached: bool) -> tuple[Module, ...]:
        return tuple(
            self._module(child, is_cached=is_cached)
            for child in element.children
            if not isinstance(child, Text)
        )

    def _module(self, element: Element, *, is_cached: bool) -> Module:
        attributes, location = element.attributes, element.location
        is_cached = is_cached and attributes.get("cache") != "false"
        if "src" in attributes:
            text = self._files.text(attributes["src"])
            children: tuple[SchemaChild, ...] = (Text(text, location),) if text else ()
        else:
            children = self.children(element, is_cached=is_cached)
        return Module(attributes["name"], children, is_cached=is_cached, location=location)


def _parameter(element: Element) -> Parameter:
    attributes = element.attributes
    return Parameter(
        name=attributes["name"],
        max_tokens=parameter_length(element),
        scaffold=attributes.get("scaffold"),
        default=attributes.get("default"),
        pads_with_space=attributes.get("pad") == "space",
        location=element.location,
    )


def _prompt_child(child: TreeChild) -> PromptChild:
    if isinstance(child, Text):
        return child
    children = tuple(_prompt_child(part) for part in child.children)
    if child.tag in CHAT_ROLES:
        return Turn(Role(child.tag), children, child.location)
    return Import(child.tag, children, arguments=arguments_of(child), location=child.location)
