"""LangChain models, indexes and callbacks on pc-rag's prompt cache.

Importing this package does no work: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langchain_pc_rag.chat_models import ChatPcRag
    from langchain_pc_rag.llms import PcRagLLM

__all__ = [
    "ChatPcRag",
    "PcRagLLM",
]

_HOMES = {
    "ChatPcRag": "langchain_pc_rag.chat_models",
    "PcRagLLM": "langchain_pc_rag.llms",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'langchain_pc_rag' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
