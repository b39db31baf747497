"""The reply to a call: text as it comes, and the calls of tools in it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from pc_rag.errors import GenerationTimeoutError
from pc_rag.model.tool_parser import InvalidToolCall, ToolCallParser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from pc_rag.engine import Completion, CompletionStream
    from pc_rag.model.conversation import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished reply.

    Attributes:
        text: What the model said besides calling tools.
        model_name: What the model is called.
        tool_calls: The calls, as the tools' schemas want them.
        invalid_tool_calls: What looked like a call and is none.
        completion: The whole answer, and what it cost.
    """

    text: str
    completion: Completion
    model_name: str
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()

    @property
    def finish_reason(self) -> str:
        """Why it ended: ``tool_calls``, or as the completion says."""
        return "tool_calls" if self.tool_calls else self.completion.finish_reason.value


class ReplyStream:
    """A reply as it is generated: an iterator of text that is never part of a tool call.

    A context manager; pulling and closing are those of ``CompletionStream``: any thread may close
    it, and generation stops before its next token.

    Args:
        stream: The answer.
        model_name: What the model is called.
        parser: Takes calls of tools out of the text; ``None`` where no tool may be called.
        max_tool_calls: Further calls are reported as invalid.
        timeout_seconds: ``next`` fails once this time has passed since the call.
        on_end: Called once with the reply, when the answer has ended by itself.
    """

    def __init__(
        self,
        stream: CompletionStream,
        *,
        model_name: str,
        parser: ToolCallParser | None = None,
        max_tool_calls: int | None = None,
        timeout_seconds: float | None = None,
        on_end: Callable[[Reply], None] | None = None,
    ) -> None:
        self._stream = stream
        self._model_name = model_name
        self._parser = parser
        self._max_tool_calls = max_tool_calls
        self._timeout_seconds = timeout_seconds
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._on_end = on_end
        self._text: list[str] = []
        self._reply: Reply | None = None
        self._has_ended = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        # No generator of our own: it would hold this object in a cycle, and a reply that is
        # dropped half-way has to end at once, not when cycles are looked for.
        while not self._has_ended:
            piece = next(self._stream, None)
            self._check_deadline()
            text = self._end() if piece is None else self._take(piece)
            if text:
                return text
        raise StopIteration

    def close(self) -> None:
        """Stop; see ``CompletionStream.close``."""
        self._stream.close()

    def run(self) -> Reply:
        """Go on to the end, and close."""
        with self:
            for _ in self:
                pass
        return self.reply

    @property
    def reply(self) -> Reply:
        """The reply, once the stream has ended or was closed.

        Raises:
            GenerationError: It has neither ended nor been closed, or it failed.
        """
        if self._reply is None:
            return self._reply_so_far(self._stream.completion)
        return self._reply

    def when_completed(self, callback: Callable[[], None]) -> None:
        """Have it called once there is a reply; see ``CompletionStream.when_completed``."""
        self._stream.when_completed(callback)

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._has_ended = True
            self.close()
            raise GenerationTimeoutError(
                f"the call took longer than its timeout of {self._timeout_seconds} s and was "
                "stopped; allow more time, fewer tokens (max_tokens) or fewer chunks"
            )

    def _take(self, piece: str) -> str:
        text = self._parser.feed(piece) if self._parser else piece
        self._text.append(text)
        return text

    def _end(self) -> str:
        """Account for the end; text that was held back."""
        self._has_ended = True
        rest, self._reply = self._finished()
        if self._on_end is not None and not self._reply.completion.metrics.is_cancelled:
            self._on_end(self._reply)
        return rest

    def _finished(self) -> tuple[str, Reply]:
        """Text that was held back, and the reply with it."""
        completion = self._stream.completion
        if self._parser is None:
            return "", self._reply_so_far(completion)
        parsed = self._parser.finish()
        self._text.append(parsed.text)
        limit = self._max_tool_calls
        calls = parsed.calls[:limit]
        surplus = parsed.calls[len(calls) :]
        refused = tuple(
            InvalidToolCall(
                raw=f"{call.name} {dict(call.arguments)}",
                error=f"the reply may hold {self._max_tool_calls} calls; this is one more",
            )
            for call in surplus
        )
        reply = replace(
            self._reply_so_far(completion),
            tool_calls=calls,
            invalid_tool_calls=parsed.invalid + refused,
        )
        return parsed.text, reply

    def _reply_so_far(self, completion: Completion) -> Reply:
        return Reply(text="".join(self._text), completion=completion, model_name=self._model_name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def new_call_id() -> str:
    """An id for a tool call: unlike any other."""
    return f"call_{uuid.uuid4().hex[:24]}"
