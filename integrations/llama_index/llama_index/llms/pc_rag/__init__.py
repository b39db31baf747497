"""LlamaIndex LLM, ingestion and query engine on pc-rag's prompt cache.

Importing this package does no work: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_index.llms.pc_rag.base import PcRagLLM
    from llama_index.llms.pc_rag.callbacks import (
        CacheHitEventHandler,
        CallOutcome,
        DocumentOutcome,
        DocumentUse,
        PromptCacheCallbackHandler,
        RunReport,
        RunTimes,
        TTFTEventHandler,
    )
    from llama_index.llms.pc_rag.embeddings import PcRagEmbedding
    from llama_index.llms.pc_rag.encoder import PromptCacheEncoder
    from llama_index.llms.pc_rag.events import PromptCacheEvent
    from llama_index.llms.pc_rag.prefetch import PromptCachePrefetch
    from llama_index.llms.pc_rag.query_engine import PromptCacheQueryEngine
    from llama_index.llms.pc_rag.synthesizer import PromptCacheSynthesizer

__all__ = [
    "CacheHitEventHandler",
    "CallOutcome",
    "DocumentOutcome",
    "DocumentUse",
    "PcRagEmbedding",
    "PcRagLLM",
    "PromptCacheCallbackHandler",
    "PromptCacheEncoder",
    "PromptCacheEvent",
    "PromptCachePrefetch",
    "PromptCacheQueryEngine",
    "PromptCacheSynthesizer",
    "RunReport",
    "RunTimes",
    "TTFTEventHandler",
]

_HOMES = {
    "CacheHitEventHandler": "llama_index.llms.pc_rag.callbacks",
    "CallOutcome": "llama_index.llms.pc_rag.callbacks",
    "DocumentOutcome": "llama_index.llms.pc_rag.callbacks",
    "DocumentUse": "llama_index.llms.pc_rag.callbacks",
    "PcRagEmbedding": "llama_index.llms.pc_rag.embeddings",
    "PcRagLLM": "llama_index.llms.pc_rag.base",
    "PromptCacheCallbackHandler": "llama_index.llms.pc_rag.callbacks",
    "PromptCacheEncoder": "llama_index.llms.pc_rag.encoder",
    "PromptCacheEvent": "llama_index.llms.pc_rag.events",
    "PromptCachePrefetch": "llama_index.llms.pc_rag.prefetch",
    "PromptCacheQueryEngine": "llama_index.llms.pc_rag.query_engine",
    "PromptCacheSynthesizer": "llama_index.llms.pc_rag.synthesizer",
    "RunReport": "llama_index.llms.pc_rag.callbacks",
    "RunTimes": "llama_index.llms.pc_rag.callbacks",
    "TTFTEventHandler": "llama_index.llms.pc_rag.callbacks",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'llama_index.llms.pc_rag' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
