"""Prompt Cache for RAG: every corpus chunk is prefilled once, then reused by every question.

Importing this package does no work: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pc_rag.config import EngineConfig
    from pc_rag.corpus import Answer, Corpus, Document, PromptFormat, read_paths
    from pc_rag.engine import Completion, CompletionStream, PromptCache
    from pc_rag.errors import PromptCacheError
    from pc_rag.metrics import CacheStats, RequestMetrics
    from pc_rag.model.conversation import (
        CachePoint,
        ChatMessage,
        Conversation,
        ToolCall,
        ToolSpec,
    )
    from pc_rag.model.detection.capabilities import Capabilities, capabilities_of
    from pc_rag.model.grammar import Grammar
    from pc_rag.model.loading import load_model, wrap_model
    from pc_rag.model.sampling import GenerationConfig
    from pc_rag.pml import (
        MaxTokens,
        Program,
        parse_prompt,
        parse_schema,
        program,
        write_prompt,
        write_schema,
    )
    from pc_rag.types import HitKind, MissReason, Role

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "CachePoint",
    "CacheStats",
    "Capabilities",
    "ChatMessage",
    "Completion",
    "CompletionStream",
    "Conversation",
    "Corpus",
    "Document",
    "EngineConfig",
    "GenerationConfig",
    "Grammar",
    "HitKind",
    "MaxTokens",
    "MissReason",
    "Program",
    "PromptCache",
    "PromptCacheError",
    "PromptFormat",
    "RequestMetrics",
    "Role",
    "ToolCall",
    "ToolSpec",
    "capabilities_of",
    "load_model",
    "parse_prompt",
    "parse_schema",
    "program",
    "read_paths",
    "wrap_model",
    "write_prompt",
    "write_schema",
]

_HOMES = {
    "Answer": "pc_rag.corpus",
    "CachePoint": "pc_rag.model.conversation",
    "CacheStats": "pc_rag.metrics",
    "Capabilities": "pc_rag.model.detection.capabilities",
    "ChatMessage": "pc_rag.model.conversation",
    "Completion": "pc_rag.engine",
    "CompletionStream": "pc_rag.engine",
    "Conversation": "pc_rag.model.conversation",
    "Corpus": "pc_rag.corpus",
    "Document": "pc_rag.corpus",
    "EngineConfig": "pc_rag.config",
    "GenerationConfig": "pc_rag.model.sampling",
    "Grammar": "pc_rag.model.grammar",
    "HitKind": "pc_rag.types",
    "MaxTokens": "pc_rag.pml",
    "MissReason": "pc_rag.types",
    "Program": "pc_rag.pml",
    "PromptCache": "pc_rag.engine",
    "PromptCacheError": "pc_rag.errors",
    "PromptFormat": "pc_rag.corpus",
    "RequestMetrics": "pc_rag.metrics",
    "Role": "pc_rag.types",
    "ToolCall": "pc_rag.model.conversation",
    "ToolSpec": "pc_rag.model.conversation",
    "capabilities_of": "pc_rag.model.detection.capabilities",
    "load_model": "pc_rag.model.loading",
    "parse_prompt": "pc_rag.pml",
    "parse_schema": "pc_rag.pml",
    "program": "pc_rag.pml",
    "read_paths": "pc_rag.corpus",
    "wrap_model": "pc_rag.model.loading",
    "write_prompt": "pc_rag.pml",
    "write_schema": "pc_rag.pml",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pc_rag' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
