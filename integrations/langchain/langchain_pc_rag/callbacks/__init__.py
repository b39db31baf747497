"""Callback handlers: what a chain found in the cache, and how fast any model answers."""

from __future__ import annotations

from langchain_pc_rag.callbacks.cache_hits import CacheHitHandler
from langchain_pc_rag.callbacks.ttft import TTFTHandler
from pc_rag.serving.runs import CallOutcome, DocumentOutcome, DocumentUse, RunReport, RunTimes

__all__ = [
    "CacheHitHandler",
    "CallOutcome",
    "DocumentOutcome",
    "DocumentUse",
    "RunReport",
    "RunTimes",
    "TTFTHandler",
]
