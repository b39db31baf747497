"""Python functions as programs: a schema and a builder of prompts out of one function."""

from pc_rag.pml.program.decorator import Program, program
from pc_rag.pml.program.max_tokens import MaxTokens

__all__ = ["MaxTokens", "Program", "program"]
