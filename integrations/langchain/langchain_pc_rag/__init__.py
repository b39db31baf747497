"""LangChain models, indexes and callbacks on pc-rag's prompt cache.

Importing this package does no work: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langchain_pc_rag.callbacks import (
        CacheHitHandler,
        CallOutcome,
        DocumentOutcome,
        RunReport,
        RunTimes,
        TTFTHandler,
    )
    from langchain_pc_rag.chat_models import ChatPcRag
    from langchain_pc_rag.chunks import format_chunks, message_chunks
    from langchain_pc_rag.compare import Comparison, compare_chains
    from langchain_pc_rag.embeddings import PcRagEmbeddings
    from langchain_pc_rag.indexes import PromptCacheIndex
    from langchain_pc_rag.llms import PcRagLLM
    from langchain_pc_rag.middleware import PromptCacheMiddleware
    from langchain_pc_rag.retrievers import WarmingRetriever, warm_documents
    from langchain_pc_rag.vectorstores import PromptCacheVectorStore

__all__ = [
    "CacheHitHandler",
    "CallOutcome",
    "ChatPcRag",
    "Comparison",
    "DocumentOutcome",
    "PcRagEmbeddings",
    "PcRagLLM",
    "PromptCacheIndex",
    "PromptCacheMiddleware",
    "PromptCacheVectorStore",
    "RunReport",
    "RunTimes",
    "TTFTHandler",
    "WarmingRetriever",
    "compare_chains",
    "format_chunks",
    "message_chunks",
    "warm_documents",
]

_HOMES = {
    "CacheHitHandler": "langchain_pc_rag.callbacks",
    "CallOutcome": "langchain_pc_rag.callbacks",
    "ChatPcRag": "langchain_pc_rag.chat_models",
    "Comparison": "langchain_pc_rag.compare",
    "DocumentOutcome": "langchain_pc_rag.callbacks",
    "PcRagEmbeddings": "langchain_pc_rag.embeddings",
    "PcRagLLM": "langchain_pc_rag.llms",
    "PromptCacheIndex": "langchain_pc_rag.indexes",
    "PromptCacheMiddleware": "langchain_pc_rag.middleware",
    "PromptCacheVectorStore": "langchain_pc_rag.vectorstores",
    "RunReport": "langchain_pc_rag.callbacks",
    "RunTimes": "langchain_pc_rag.callbacks",
    "TTFTHandler": "langchain_pc_rag.callbacks",
    "WarmingRetriever": "langchain_pc_rag.retrievers",
    "compare_chains": "langchain_pc_rag.compare",
    "format_chunks": "langchain_pc_rag.chunks",
    "message_chunks": "langchain_pc_rag.chunks",
    "warm_documents": "langchain_pc_rag.retrievers",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'langchain_pc_rag' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
