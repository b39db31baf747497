"""Python functions as programs: a schema and a builder of prompts out of one function."""

from pc_rag.pml.program.max_tokens import MaxTokens
from pc_rag.pml.program.program import Program, program

__all__ = ["MaxTokens", "Program", "program"]
