"""``PromptCacheCallbackHandler``: cache hits for applications with a ``CallbackManager``."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.callbacks.schema import BASE_TRACE_EVENT, CBEventType, EventPayload
from llama_index.llms.pc_rag.callbacks.responses import (
    METRICS_KEY,
    found_documents,
    raw_value,
    text_of,
)
from llama_index.llms.pc_rag.callbacks.streams import OpenStreams
from typing_extensions import override

from pc_rag.serving.runs import RETRIEVER, CacheHitRuns, CallOutcome, is_cancellation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pc_rag.metrics import CacheStats

_NO_TRACE: Final = ""


class PromptCacheCallbackHandler(CacheHitRuns, BaseCallbackHandler):
    """Counts cache hits of every model call, and of every run: a trace with all its events.

    ``Settings.callback_manager = CallbackManager([handler])``, or the manager of an index, an
    engine and its LLM; then ``print(handler.report())``. It reports as ``CacheHitEventHandler``
    does, which needs no manager, and which hears more: prefer that one.

    Metrics are read from ``raw["pc_rag"]`` of the response. A stream whose consumer left has none
    there: it is one cancelled request, whatever it had shown. A model whose ``chat`` asks its own
    ``complete``, as LlamaIndex's ``CustomLLM`` does, sends two events and counts as two calls, and
    so does ``as_structured_llm`` of any model; ours alone does not. Use one handler for one kind
    of manager: each event counts where it is heard.

    Args:
        max_runs: Latest finished runs whose reports are kept.
        stats: Takes the metrics; one of its own by default.

    Raises:
        ConfigError: ``max_runs`` is below 1.
    """

    def __init__(self, *, max_runs: int = 256, stats: CacheStats | None = None) -> None:
        self._streams = OpenStreams()
        CacheHitRuns.__init__(
            self,
            owner="PromptCacheCallbackHandler",
            carrier='raw["pc_rag"]',
            max_runs=max_runs,
            stats=stats,
            is_patient=True,
            keeps_empty=False,
            take_ended=self._streams.take_ended,
        )
        # An exception has a start and no end.
        BaseCallbackHandler.__init__(self, [CBEventType.EXCEPTION], [CBEventType.EXCEPTION])
        self._trace: ContextVar[str] = ContextVar("pc_rag_trace", default=_NO_TRACE)

    @override
    def start_trace(self, trace_id: str | None = None) -> None:
        run_id = f"{trace_id or 'trace'}-{uuid4()}"
        self._trace.set(run_id)
        self.start_run(run_id, self._streams.pulled())

    @override
    def end_trace(
        self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None
    ) -> None:
        self.end_run(self._trace.get())
        self._trace.set(_NO_TRACE)

    @override
    def on_event_start(
        self,
        event_type: CBEventType,
        payload: Mapping[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **kwargs: Any,
    ) -> str:
        event_id = event_id or str(uuid4())
        is_outermost = parent_id in {"", BASE_TRACE_EVENT}
        stated = (self._trace.get() or None) if is_outermost else parent_id
        parent = self._streams.parent_of(stated, self.is_inside)
        if event_type is CBEventType.LLM:
            self.start_call(event_id, parent, [_asked(payload or {})])
        else:
            is_retrieval = event_type is CBEventType.RETRIEVE
            self.start_run(event_id, parent, mark=RETRIEVER if is_retrieval else None)
        return event_id

    @override
    def on_event_end(
        self,
        event_type: CBEventType,
        payload: Mapping[str, Any] | None = None,
        event_id: str = "",
        **kwargs: Any,
    ) -> None:
        payload = payload or {}
        if event_type is CBEventType.LLM:
            self._end_llm(event_id, payload)
            return
        if event_type is CBEventType.RETRIEVE:
            nodes = payload.get(EventPayload.NODES)
            if nodes is not None:
                self.add_retrieved(event_id, found_documents(nodes))
        if self._streams.is_due():
            self.settle()
        if not self._streams.add(event_id, payload.get(EventPayload.RESPONSE)):
            self.end_run(event_id)

    def _end_llm(self, event_id: str, payload: Mapping[str, Any]) -> None:
        error = payload.get(EventPayload.EXCEPTION)
        if error is not None:
            is_left = is_cancellation(error)
            self.end_call(event_id, CallOutcome.CANCELLED if is_left else CallOutcome.FAILED)
            return
        response = payload.get(EventPayload.RESPONSE) or payload.get(EventPayload.COMPLETION)
        self.end_call_with(event_id, raw_value(response, METRICS_KEY))


def _asked(payload: Mapping[str, Any]) -> str:
    """What a model is asked, as text."""
    prompt = payload.get(EventPayload.PROMPT)
    return str(prompt) if prompt is not None else text_of(payload.get(EventPayload.MESSAGES) or ())
