"""``TTFTEventHandler``: time to the first token, and per token behind it, of any LlamaIndex LLM."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.llms.pc_rag.callbacks.call_events import CallEventHandler
from llama_index.llms.pc_rag.callbacks.responses import has_content, model_name, told
from typing_extensions import override

from pc_rag.metrics import Outcome
from pc_rag.serving.runs import Told, TTFTRuns

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index.core.instrumentation.events.llm import (
        LLMChatStartEvent,
        LLMCompletionStartEvent,
    )
    from llama_index.llms.pc_rag.callbacks.calls import CallKey

    from pc_rag.metrics import Plain
    from pc_rag.metrics.speed import ModelSpeed
    from pc_rag.serving.runs import RunTimes


class TTFTEventHandler(CallEventHandler):
    """Times every call of any LLM, ours or not, chat or completion, sync or async.

    ``with TTFTEventHandler() as handler: engine.query(question).print_response_stream()``, then
    ``print(handler.report())``. TTFT runs from a call's start to its first piece that carries text,
    reasoning or a tool call; and once more from the start of the query around it, so with retrieval
    in it. Only a handler that follows spans knows the query: see ``attach``, and
    ``CacheHitEventHandler`` for what is different without.

    Pieces are seen only where the model streams. Of ``complete`` and ``chat`` TTFT is what ``raw``
    of the response says (``ttft_seconds``; ours says so), and otherwise ``None``.

    TPOT is the time between the first piece and the last over the tokens between them, a slow
    consumer's time included; tokens are what the response's usage counts, else the pieces.

    Calls are kept apart by the model's name; the class's name stands in where it has none. Calls
    that failed are counted and not timed. Memory is bounded, and it never waits.

    Args:
        max_runs: Latest finished runs whose times are kept.
        max_samples: Latest calls of a model that percentiles are of.
        read_clock: Seconds on a monotonic clock.

    Raises:
        ConfigError: A limit is below 1.
    """

    _runs: TTFTRuns = PrivateAttr()

    def __init__(
        self,
        *,
        max_runs: int = 256,
        max_samples: int = 512,
        read_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._runs = TTFTRuns(
            owner=self.class_name(),
            max_runs=max_runs,
            max_samples=max_samples,
            read_clock=read_clock,
            is_patient=True,
            keeps_empty=False,
            take_ended=self._streams.take_ended,
        )

    @classmethod
    @override
    def class_name(cls) -> str:
        return "TTFTEventHandler"

    # -- what it tells -------------------------------------------------------------------------

    def snapshot(self) -> tuple[ModelSpeed, ...]:
        """The sums of this moment, by model."""
        return self._runs.snapshot()

    @property
    def runs(self) -> tuple[RunTimes, ...]:
        """Times of the latest finished runs, the latest last."""
        return self._runs.runs

    @property
    def last_run(self) -> RunTimes | None:
        """Times of the run that finished last; ``None`` before the first."""
        return self._runs.last_run

    @property
    def num_open_runs(self) -> int:
        """Spans and calls that started and did not end."""
        return self._runs.num_open_runs

    def report(self) -> str:
        """Everything as a table for people, a row for each model."""
        return self._runs.report()

    def to_dict(self) -> dict[str, Plain]:
        """Everything as JSON can say it, the times of the latest runs included."""
        return self._runs.to_dict()

    # -- what it hears -------------------------------------------------------------------------

    @property
    @override
    def _followed(self) -> TTFTRuns:
        return self._runs

    @override
    def _start_call(
        self, key: CallKey, event: LLMChatStartEvent | LLMCompletionStartEvent, prompt: str
    ) -> CallKey:
        name, is_own = model_name(event.model_dict)
        self._runs.start_call(key, key.span_id, name, has_own_name=is_own)
        return key

    @override
    def _see_piece(self, key: CallKey, response: object) -> None:
        if has_content(response):
            self._runs.see_token(key)

    @override
    def _end_call(self, key: CallKey, state: Any, response: object) -> None:
        self._runs.end_call(key, Outcome.COMPLETED, told(response))

    @override
    def _fail_call(self, key: CallKey, state: Any, *, is_cancelled: bool) -> None:
        self._runs.end_call(key, Outcome.CANCELLED if is_cancelled else Outcome.FAILED, Told())
