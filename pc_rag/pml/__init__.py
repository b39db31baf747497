"""Prompt Markup Language: schemas that declare modules, and prompts that import them."""

from pc_rag.pml.nodes import (
    Import,
    Location,
    Module,
    Parameter,
    Prompt,
    PromptChild,
    RoleBlock,
    Scaffold,
    Schema,
    SchemaChild,
    Text,
    Turn,
    Union,
)
from pc_rag.pml.parser import parse_prompt, parse_schema, read_schema
from pc_rag.pml.program import MaxTokens, Program, program
from pc_rag.pml.writer import write_prompt, write_schema

__all__ = [
    "Import",
    "Location",
    "MaxTokens",
    "Module",
    "Parameter",
    "Program",
    "Prompt",
    "PromptChild",
    "RoleBlock",
    "Scaffold",
    "Schema",
    "SchemaChild",
    "Text",
    "Turn",
    "Union",
    "parse_prompt",
    "parse_schema",
    "program",
    "read_schema",
    "write_prompt",
    "write_schema",
]
