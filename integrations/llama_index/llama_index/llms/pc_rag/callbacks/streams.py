"""Streams that runs returned: what is begun while one is pulled belongs to the run it came from."""

from __future__ import annotations

import inspect
import threading
import weakref
from dataclasses import dataclass, field
from types import AsyncGeneratorType, FrameType, GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import Callable

_Generator: TypeAlias = "GeneratorType[Any, Any, Any] | AsyncGeneratorType[Any, Any]"

_MAX_STREAMS = 4096
_STREAMS_PER_END = 8
"""Streams that are looked at for each run that ends, on average."""


def _generator_of(result: object) -> _Generator | None:
    """The generator that a result is, or that a streamed response reads; ``None`` of others."""
    if isinstance(result, (StreamingResponse, AsyncStreamingResponse)):
        result = result.response_gen
    return result if isinstance(result, (GeneratorType, AsyncGeneratorType)) else None


def _frame_of(generator: _Generator | None) -> FrameType | None:
    """Where a generator stands; ``None`` of one that ended."""
    if isinstance(generator, AsyncGeneratorType):
        return generator.ag_frame
    return None if generator is None else generator.gi_frame


@dataclass(frozen=True, slots=True)
class _Stream:
    generator: weakref.ref[_Generator]
    run_ids: list[str] = field(default_factory=list)

    @property
    def frame(self) -> FrameType | None:
        return _frame_of(self.generator())


class OpenStreams:
    """Streams that are not read to their end, by what returned them.

    A query that streams ends before its model is asked: LlamaIndex asks it when the first piece is
    pulled, from wherever that is, and nothing in the events leads back to the query. What leads
    back is that the query's generator stands on the stack then.

        query |--------| returns a generator
                               consumer pulls it |------------------------|
                                    model's span   |--|   (parent: none, or the consumer's)

    Streams are only looked at, and not held: one that nobody reads may be collected. Every method
    may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, and no other lock inside: see OpenCalls
        self._streams: dict[int, _Stream] = {}
        self._ended: list[str] = []
        self._num_ends = 0

    def add(self, run_id: str, result: object) -> bool:
        """A run ended; whether with a stream that is still to be read."""
        generator = _generator_of(result)
        frame = _frame_of(generator)
        if generator is None or frame is None:
            return False
        with self._lock:
            known = self._streams.get(id(frame))
            if known is None or known.frame is not frame:
                if known is not None:  # it ended, and its frame's place in memory is another's
                    self._ended += known.run_ids
                elif len(self._streams) >= _MAX_STREAMS:
                    return False
                self._streams[id(frame)] = known = _Stream(weakref.ref(generator))
            known.run_ids.append(run_id)
            return True

    def is_due(self) -> bool:
        """Whether it pays to ask for those that ended; to be asked whenever a run ends.

        Asking looks at every stream, and somebody may keep thousands that nobody reads, as handlers
        do that keep every response: so the more there are, the more seldom.
        """
        with self._lock:
            self._num_ends += 1
            if self._num_ends * _STREAMS_PER_END < len(self._streams):
                return False
            self._num_ends = 0
            return True

    def pulled(self) -> str | None:
        """The run whose stream is pulled on this thread right now, the innermost of several."""
        with self._lock:
            if not self._streams:
                return None
            frame = inspect.currentframe()
            while frame is not None:
                stream = self._streams.get(id(frame))
                if stream is not None and stream.frame is frame:
                    return stream.run_ids[0]
                frame = frame.f_back
            return None

    def parent_of(
        self, parent_id: str | None, is_inside: Callable[[str | None, str], bool]
    ) -> str | None:
        """What a run that starts now stands in.

        Args:
            parent_id: Its parent as LlamaIndex says, which may be the consumer's.
            is_inside: Whether a run is another, or stands inside it.
        """
        pulled = self.pulled()
        return parent_id if pulled is None or is_inside(parent_id, pulled) else pulled

    def take_ended(self) -> list[str]:
        """Runs whose streams were read to their end, failed, were closed or thrown away; once."""
        with self._lock:
            ended = [key for key, stream in self._streams.items() if stream.frame is None]
            run_ids, self._ended = self._ended, []
            return run_ids + [each for key in ended for each in self._streams.pop(key).run_ids]
