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
    from langchain_pc_rag.compare import Comparison, compare_chains
    from langchain_pc_rag.llms import PcRagLLM

__all__ = [
    "CacheHitHandler",
    "CallOutcome",
    "ChatPcRag",
    "Comparison",
    "DocumentOutcome",
    "PcRagLLM",
    "RunReport",
    "RunTimes",
    "TTFTHandler",
    "compare_chains",
]

_HOMES = {
    "CacheHitHandler": "langchain_pc_rag.callbacks",
    "CallOutcome": "langchain_pc_rag.callbacks",
    "ChatPcRag": "langchain_pc_rag.chat_models",
    "Comparison": "langchain_pc_rag.compare",
    "DocumentOutcome": "langchain_pc_rag.callbacks",
    "PcRagLLM": "langchain_pc_rag.llms",
    "RunReport": "langchain_pc_rag.callbacks",
    "RunTimes": "langchain_pc_rag.callbacks",
    "TTFTHandler": "langchain_pc_rag.callbacks",
    "compare_chains": "langchain_pc_rag.compare",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'langchain_pc_rag' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
