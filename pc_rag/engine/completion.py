"""A finished answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pc_rag.metrics import RequestMetrics
    from pc_rag.types import FinishReason, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer.

    Attributes:
        text: The answer, cut before a stop string.
        token_ids: The generated tokens, without the end-of-sequence token.
        finish_reason: Why generation ended.
        metrics: What the request cost.
    """

    text: str
    token_ids: TokenIds
    finish_reason: FinishReason
    metrics: RequestMetrics
