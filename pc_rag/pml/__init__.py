"""Prompt Markup Language: schemas that declare modules, and prompts that import them."""

from pc_rag.pml.nodes import (
    Import,
    Location,
    Module,
    Prompt,
    PromptChild,
    RoleBlock,
    Schema,
    SchemaChild,
    Text,
    Union,
)
from pc_rag.pml.parser import parse_prompt, parse_schema, read_schema

__all__ = [
    "Import",
    "Location",
    "Module",
    "Prompt",
    "PromptChild",
    "RoleBlock",
    "Schema",
    "SchemaChild",
    "Text",
    "Union",
    "parse_prompt",
    "parse_schema",
    "read_schema",
]
