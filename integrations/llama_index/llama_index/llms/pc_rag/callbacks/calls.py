"""Which model call an event belongs to: calls that ask another method of their model are one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

State = TypeVar("State")

CALL: Final = "call"
"""Mark of spans that are a model call."""

_MAX_OPEN: Final = 4096
_MAX_LEFT: Final = 256


@dataclass(frozen=True, slots=True)
class CallKey:
    """Id of a call among runs. Its span is a run too, and ends before a stream is read."""

    span_id: str

    def __str__(self) -> str:
        return self.span_id


class OpenCalls(Generic[State]):
    """The open model calls by span. Every method may be called from any thread.

    LlamaIndex's ``CustomLLM`` makes ``chat`` out of ``complete``, so one call sends the events of
    two, from a span and from one inside it. Only the outer is a call here, and the inner's span
    stands for it.

    Memory is bounded: of very many open calls the oldest are forgotten.
    """

    def __init__(self) -> None:
        # Reentrant, and never held while another lock is taken: the garbage collector may close an
        # abandoned stream on a thread that is in here, and its events come at once.
        self._lock = threading.RLock()
        self._open: OrderedDict[str, State] = OrderedDict()
        self._inner: OrderedDict[str, str] = OrderedDict()
        self._left: OrderedDict[str, State] = OrderedDict()

    def join(self, span_id: str, outer: str | None) -> bool:
        """Whether a call that starts is a part of an open one; then its span stands for that."""
        with self._lock:
            outer = self._inner.get(outer or "", outer or "")
            if outer not in self._open:
                return False
            self._inner[span_id] = outer
            if len(self._inner) > _MAX_OPEN:
                self._inner.popitem(last=False)
            return True

    def start(self, span_id: str, state: State) -> None:
        """A call starts that is a part of no other."""
        with self._lock:
            self._open[span_id] = state
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)

    def of(self, span_id: str) -> State | None:
        """The state of the open call that a span is or stands for; ``None`` of none."""
        with self._lock:
            return self._open.get(self._inner.get(span_id, span_id))

    def is_own(self, span_id: str) -> bool:
        """Whether a span is an open call, and does not only stand for one."""
        with self._lock:
            return span_id in self._open

    def end(self, span_id: str, *, is_left: bool = False) -> State | None:
        """A call ended; its state, or ``None`` where the span is no open call's own.

        Args:
            span_id: The span that says so.
            is_left: Whether its consumer left, so that metrics may come late.
        """
        with self._lock:
            outer = self._inner.pop(span_id, None)
            if outer is not None:
                if outer in self._left:
                    self._leave(span_id, self._left[outer])
                return None
            state = self._open.pop(span_id, None)
            if state is not None and is_left:
                self._leave(span_id, state)
            return state

    def _leave(self, span_id: str, state: State) -> None:
        self._left[span_id] = state
        if len(self._left) > _MAX_LEFT:
            self._left.popitem(last=False)

    def left(self, span_id: str) -> State | None:
        """The state of a call whose consumer left, asked for once; ``None`` of none."""
        with self._lock:
            return self._left.pop(self._inner.get(span_id, span_id), None)
