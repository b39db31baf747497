"""What pc-rag tells LlamaIndex's instrumentation."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from llama_index.core.instrumentation.events import BaseEvent

from pc_rag.metrics import RequestMetrics


class PromptCacheEvent(BaseEvent):
    """A model call ended: what its prompt found in the cache.

    One for every call, also where the consumer of a stream left early; it carries the span of the
    call, and comes before LlamaIndex's own end event; late only of a stream that was left while a
    thread computed, or that the garbage collector closed inside a cycle: then with the engine's
    next request. A call that failed has none.

    Attributes:
        model_name: What the model is called.
        finish_reason: ``stop``, ``length``, ``tool_calls`` or ``cancelled``.
        metrics: ``RequestMetrics.to_dict()`` of the request: JSON-safe.
    """

    model_name: str
    finish_reason: str
    metrics: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name of the event's kind."""
        return "PromptCacheEvent"

    @cached_property
    def request_metrics(self) -> RequestMetrics:
        """The metrics as an object."""
        return RequestMetrics.from_dict(self.metrics)
