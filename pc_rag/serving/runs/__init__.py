"""Runs as callbacks tell of them: which calls and retrievals belong together, and their reports.

A framework's handlers translate its callbacks to starts and ends; the algorithm is here. Ids are
any hashable values: LangChain's UUIDs, LlamaIndex's span ids.
"""

from pc_rag.serving.runs.hits import RETRIEVER, CacheHitRuns
from pc_rag.serving.runs.outcomes import (
    CallOutcome,
    DocumentOutcome,
    DocumentUse,
    FoundDocument,
    is_cancellation,
)
from pc_rag.serving.runs.record import RunRecord
from pc_rag.serving.runs.report import RunReport
from pc_rag.serving.runs.speeds import Told, TTFTRuns
from pc_rag.serving.runs.times import RunClock, RunTimes
from pc_rag.serving.runs.tree import RunTree

__all__ = [
    "RETRIEVER",
    "CacheHitRuns",
    "CallOutcome",
    "DocumentOutcome",
    "DocumentUse",
    "FoundDocument",
    "RunClock",
    "RunRecord",
    "RunReport",
    "RunTimes",
    "RunTree",
    "TTFTRuns",
    "Told",
    "is_cancellation",
]
