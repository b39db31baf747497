"""LlamaIndex's events of model calls as starts, pieces and ends, each call once."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.llms.pc_rag.callbacks.calls import CALL, CallKey, OpenCalls
from llama_index.llms.pc_rag.callbacks.responses import asked
from llama_index.llms.pc_rag.callbacks.spans import SpanEventHandler
from llama_index.llms.pc_rag.callbacks.streams import OpenStreams
from llama_index_instrumentation.events.span import SpanDropEvent
from typing_extensions import override

from pc_rag.serving.runs import is_cancellation

if TYPE_CHECKING:
    from llama_index_instrumentation.base import BaseEvent

    from pc_rag.serving.runs import CacheHitRuns, TTFTRuns

_STARTS: Final = (LLMChatStartEvent, LLMCompletionStartEvent)
_PIECES: Final = (LLMChatInProgressEvent, LLMCompletionInProgressEvent)
_ENDS: Final = (LLMChatEndEvent, LLMCompletionEndEvent)


class CallEventHandler(SpanEventHandler):
    """Hears of every model call once, and of the runs around it where it is attached."""

    _calls: OpenCalls[Any] = PrivateAttr(default_factory=OpenCalls)
    _streams: OpenStreams = PrivateAttr(default_factory=OpenStreams)

    @property
    @abstractmethod
    def _followed(self) -> CacheHitRuns | TTFTRuns:
        """Where starts and ends of runs go."""

    @abstractmethod
    def _start_call(
        self, key: CallKey, event: LLMChatStartEvent | LLMCompletionStartEvent, prompt: str
    ) -> object:
        """A call starts; what is to be known of it at its end."""

    def _see_piece(self, key: CallKey, response: object) -> None:
        """A call showed a piece of its answer."""

    @abstractmethod
    def _end_call(self, key: CallKey, state: Any, response: object) -> None:
        """A call came to its end."""

    @abstractmethod
    def _fail_call(self, key: CallKey, state: Any, *, is_cancelled: bool) -> None:
        """A call raised an error, or its consumer left."""

    def _hear(self, event: BaseEvent) -> None:
        """An event that is none of a call's start, pieces and end."""

    @override
    def enter_span(self, span_id: str, parent_id: str | None) -> None:
        followed = self._followed
        followed.start_run(span_id, self._streams.parent_of(parent_id, followed.is_inside))

    @override
    def end_span(self, span_id: str, result: object = None) -> None:
        if self._streams.is_due():
            self._followed.settle()
        if not self._streams.add(span_id, result):
            self._followed.end_run(span_id)

    @override
    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Take an event; what is no call's is left alone."""
        span_id = event.span_id
        if span_id is None:
            return  # events outside of spans cannot be told apart
        if isinstance(event, _STARTS):
            self._start(span_id, event)
        elif isinstance(event, _PIECES):
            if self._calls.is_own(span_id):
                self._see_piece(CallKey(span_id), event.response)
        elif isinstance(event, _ENDS):
            state = self._calls.end(span_id)
            if state is not None:
                self._end_call(CallKey(span_id), state, event.response)
        elif isinstance(event, ExceptionEvent):
            self._fail(span_id, event.exception)
        elif isinstance(event, SpanDropEvent):
            self._fail(span_id, sys.exception())  # the dispatcher tells of it while it handles it
        else:
            self._hear(event)

    def _start(self, span_id: str, event: LLMChatStartEvent | LLMCompletionStartEvent) -> None:
        prompt = asked(event)
        outer = self._followed.run_around(span_id, CALL)
        self._followed.mark_run(span_id, CALL)
        if self._calls.join(span_id, outer if isinstance(outer, str) else None):
            return
        self._calls.start(span_id, self._start_call(CallKey(span_id), event, prompt))

    def _fail(self, span_id: str, error: BaseException | None) -> None:
        is_cancelled = is_cancellation(error)
        state = self._calls.end(span_id, is_left=is_cancelled)
        if state is not None:
            self._fail_call(CallKey(span_id), state, is_cancelled=is_cancelled)
