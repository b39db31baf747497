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


@dataclass(slots=True, eq=False)
class _Open(Generic[State]):
    span_id: str
    state: State
    waits_as: tuple[str, int] | None


class OpenCalls(Generic[State]):
    """The open model calls by span. Every method may be called from any thread.

    LlamaIndex's ``CustomLLM`` makes ``chat`` out of ``complete``, so one call sends the events of
    two, from a span and from one inside it. Only the outer is a call here, and the inner's span
    stands for it. ``astream_chat`` begins ``stream_chat`` when its first piece is pulled, in a span
    that is not inside its own: it is known by its class, its method and by what is asked.

    Memory is bounded: of very many open calls the oldest are forgotten.
    """

    def __init__(self) -> None:
        # Reentrant, and never held while another lock is taken: the garbage collector may close an
        # abandoned stream on a thread that is in here, and its events come at once.
        self._lock = threading.RLock()
        self._open: OrderedDict[str, _Open[State]] = OrderedDict()
        self._inner: OrderedDict[str, str] = OrderedDict()
        self._waiting: dict[tuple[str, int], list[str]] = {}
        self._left: OrderedDict[str, State] = OrderedDict()

    def join(self, span_id: str, outer: str | None, prompt: str) -> bool:
        """Whether a call that starts is a part of an open one; then its span stands for that."""
        with self._lock:
            if outer is None or outer not in self._open:
                outer = self._pulled_by(span_id, prompt)
            if outer is None:
                return False
            self._inner[span_id] = outer
            if len(self._inner) > _MAX_OPEN:
                self._inner.popitem(last=False)
            return True

    def start(self, span_id: str, prompt: str, state: State) -> None:
        """A call starts that is a part of no other."""
        kind = span_id.partition("-")[0]
        waits_as = (kind, hash(prompt)) if kind.partition(".")[2].startswith("astream_") else None
        with self._lock:
            self._open[span_id] = _Open(span_id, state, waits_as)
            if waits_as is not None:
                self._waiting.setdefault(waits_as, []).append(span_id)
            if len(self._open) > _MAX_OPEN:
                self._stop_waiting(self._open.popitem(last=False)[1])

    def _pulled_by(self, span_id: str, prompt: str) -> str | None:
        """The asynchronous stream that begins this synchronous one as its first piece is pulled."""
        owner, _, method = span_id.partition("-")[0].partition(".")
        if not method.startswith("stream_"):
            return None
        waiting = self._waiting.get((f"{owner}.a{method}", hash(prompt)))
        if not waiting:
            return None
        outer = waiting[0]
        self._stop_waiting(self._open[outer])
        return outer

    def _stop_waiting(self, call: _Open[State]) -> None:
        key, call.waits_as = call.waits_as, None
        waiting = self._waiting.get(key) if key is not None else None
        if key is not None and waiting:
            waiting.remove(call.span_id)
            if not waiting:
                del self._waiting[key]

    def of(self, span_id: str | None) -> State | None:
        """The state of the open call that a span is or stands for; ``None`` of none."""
        with self._lock:
            call = self._open.get(self._inner.get(span_id or "", span_id or ""))
            return None if call is None else call.state

    def show(self, span_id: str | None) -> State | None:
        """A call showed a piece; its state, or ``None`` where the span is no open call's own."""
        with self._lock:
            call = self._open.get(span_id or "")
            if call is None:
                return None
            self._stop_waiting(call)
            return call.state

    def end(self, span_id: str | None, *, is_left: bool = False) -> State | None:
        """A call ended; its state, or ``None`` where the span is no open call's own.

        Args:
            span_id: The span that says so.
            is_left: Whether its consumer left, so that metrics may come late.
        """
        with self._lock:
            outer = self._inner.pop(span_id or "", None)
            if outer is not None:
                if span_id is not None and outer in self._left:
                    self._leave(span_id, self._left[outer])
                return None
            call = self._open.pop(span_id or "", None)
            if call is None:
                return None
            self._stop_waiting(call)
            if is_left:
                self._leave(call.span_id, call.state)
            return call.state

    def _leave(self, span_id: str, state: State) -> None:
        self._left[span_id] = state
        if len(self._left) > _MAX_LEFT:
            self._left.popitem(last=False)

    def left(self, span_id: str | None) -> State | None:
        """The state of a call whose consumer left, asked for once; ``None`` of none."""
        with self._lock:
            span_id = self._inner.get(span_id or "", span_id or "")
            return self._left.pop(span_id, None)
