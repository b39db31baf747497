"""``TTFTHandler``: time to the first token, and per token behind it, of any LangChain model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from langchain_core.outputs import LLMResult
from typing_extensions import override

from langchain_pc_rag.callbacks.responses import (
    first_generation,
    has_content,
    is_content_event,
    is_replay,
    metadata_value,
    model_name_at_start,
    num_output_tokens,
    ttft_seconds,
)
from langchain_pc_rag.callbacks.run_handler import RunHandler
from pc_rag.metrics import Outcome
from pc_rag.serving.runs import Told, TTFTRuns, is_cancellation

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
    from langchain_protocol.protocol import MessagesData


class TTFTHandler(TTFTRuns, RunHandler):
    """Times every call of any model, ours or not, chat or string, sync or async.

    ``for piece in chain.stream(question, config={"callbacks": [handler]}): ...``, then
    ``print(handler.report())``. TTFT runs from a call's start to its first token that carries text,
    reasoning or a piece of a tool call; and once more from the start of the outermost run, so with
    retrieval in it. Attach the handler to the outermost run for that.

    Tokens are seen only where the model streams: ``stream``, ``astream``, ``astream_events``. With
    ``invoke`` a model computes the same and shows nothing before its end; then TTFT is what the
    response says itself (ours says so), and otherwise ``None``. No handler can make a model
    stream: use ``.stream()``, or ``chat_model.bind(stream=True)`` for calls inside an agent.

    TPOT is the time between the first token and the last over the tokens between them, a slow
    consumer's time included; tokens are what the response counts, else the token events.

    An answer that LangChain's response cache replays is no call of a model: it is counted as
    replayed. Calls that failed are counted and not timed.

    Memory is bounded. It never waits, so async chains call it on their event loop
    (``run_inline``), and no thread's hop is in its times.

    Args:
        max_runs: Latest finished runs whose times are kept.
        max_samples: Latest calls of a model that percentiles are of.
        read_clock: Seconds on a monotonic clock.

    Raises:
        ConfigError: A limit is below 1.
    """

    def __init__(
        self,
        *,
        max_runs: int = 256,
        max_samples: int = 512,
        read_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            owner="TTFTHandler", max_runs=max_runs, max_samples=max_samples, read_clock=read_clock
        )

    @override
    def _start_run(
        self, run_id: UUID, parent_run_id: UUID | None, *, is_retriever: bool = False
    ) -> None:
        self.start_run(run_id, parent_run_id)

    @override
    def _end_run(self, run_id: UUID, result: object = None) -> None:
        self.end_run(run_id)

    def _start_call(
        self, serialized: dict[str, Any], run_id: UUID, parent: UUID | None, kwargs: dict[str, Any]
    ) -> None:
        name, is_own = model_name_at_start(
            serialized, kwargs.get("metadata"), kwargs.get("invocation_params")
        )
        self.start_call(run_id, parent, name, has_own_name=is_own)

    @override
    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_call(serialized, run_id, parent_run_id, kwargs)

    @override
    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_call(serialized, run_id, parent_run_id, kwargs)

    @override
    def on_llm_new_token(
        self,
        token: str | list[str | dict[str, Any]],
        *,
        chunk: GenerationChunk | ChatGenerationChunk | None = None,
        run_id: UUID,
        **kwargs: Any,
    ) -> None:
        if has_content(token, chunk):
            self.see_token(run_id)

    @override
    def on_stream_event(self, event: MessagesData, *, run_id: UUID, **kwargs: Any) -> None:
        if is_content_event(event):
            self.see_token(run_id, is_event=True)

    @override
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        self.end_call(run_id, Outcome.COMPLETED, _told(response))

    @override
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        outcome = Outcome.CANCELLED if is_cancellation(error) else Outcome.FAILED
        self.end_call(run_id, outcome, _told(kwargs.get("response")))


def _told(response: object) -> Told:
    """What a response, whole or partial, says about itself."""
    generation = first_generation(response)
    name = metadata_value(generation, "model_name")
    num_tokens = (
        num_output_tokens(response, generation) if isinstance(response, LLMResult) else None
    )
    return Told(
        model=name if isinstance(name, str) else None,
        ttft_seconds=ttft_seconds(generation),
        num_output_tokens=num_tokens,
        is_replay=is_replay(generation),
    )
