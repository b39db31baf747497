"""Handlers: what queries found in the cache, and how fast any model answers."""

from __future__ import annotations

from llama_index.llms.pc_rag.callbacks.cache_hits import CacheHitEventHandler
from llama_index.llms.pc_rag.callbacks.legacy import PromptCacheCallbackHandler
from llama_index.llms.pc_rag.callbacks.ttft import TTFTEventHandler

from pc_rag.serving.runs import CallOutcome, DocumentOutcome, DocumentUse, RunReport, RunTimes

__all__ = [
    "CacheHitEventHandler",
    "CallOutcome",
    "DocumentOutcome",
    "DocumentUse",
    "PromptCacheCallbackHandler",
    "RunReport",
    "RunTimes",
    "TTFTEventHandler",
]
