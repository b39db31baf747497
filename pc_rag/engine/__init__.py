"""The prompt cache: schemas in, text out, with stored KV in between."""

from pc_rag.engine.batch import Batch
from pc_rag.engine.batch_group import BatchMemory
from pc_rag.engine.completion import Completion
from pc_rag.engine.prompt_cache import PromptCache
from pc_rag.engine.request import EntryRecipe, Request
from pc_rag.engine.stream import CompletionStream

__all__ = [
    "Batch",
    "BatchMemory",
    "Completion",
    "CompletionStream",
    "EntryRecipe",
    "PromptCache",
    "Request",
]
