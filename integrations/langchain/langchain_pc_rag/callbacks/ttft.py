"""``TTFTHandler``: time to the first token, and per token behind it, of any LangChain model."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.outputs import LLMResult
from typing_extensions import override

from langchain_pc_rag.callbacks.responses import (
    first_generation,
    has_content,
    is_cancellation,
    is_content_event,
    is_replay,
    metadata_value,
    model_name_at_start,
    num_output_tokens,
    ttft_seconds,
)
from langchain_pc_rag.callbacks.run_handler import RunHandler
from langchain_pc_rag.callbacks.run_times import RunClock, RunTimes
from langchain_pc_rag.callbacks.run_tree import RunTree
from pc_rag.errors import ConfigError
from pc_rag.metrics import Plain, to_plain
from pc_rag.metrics.speed import CallTimes, ModelSpeed, SpeedStats, speed_text
from pc_rag.metrics.stats import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, GenerationChunk
    from langchain_protocol.protocol import MessagesData

_MAX_OPEN_CALLS = 4096


@dataclass(slots=True, eq=False)
class _Call:
    model: str
    has_own_name: bool
    started: float
    run: RunClock
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    num_events: int = 0


class TTFTHandler(RunHandler):
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
        if max_runs < 1:
            raise ConfigError(f"TTFTHandler: max_runs is {max_runs}; it must be at least 1")
        self._read_clock = read_clock
        self._lock = threading.RLock()  # reentrant: see CacheHitHandler
        self._stats = SpeedStats(max_samples=max_samples)
        self._num_replayed = 0
        self._calls: OrderedDict[UUID, _Call] = OrderedDict()
        self._tree: RunTree[RunClock] = RunTree(self._new_run, max_finished=max_runs)

    def _new_run(self, run_id: UUID) -> RunClock:
        return RunClock(str(run_id), self._read_clock())

    # -- what it tells -------------------------------------------------------------------------

    def snapshot(self) -> tuple[ModelSpeed, ...]:
        """The sums of this moment, by model."""
        return self._stats.snapshot()

    @property
    def runs(self) -> tuple[RunTimes, ...]:
        """Times of the latest finished runs, the latest last."""
        with self._lock:
            return tuple(run.freeze() for run in self._tree.finished())

    @property
    def last_run(self) -> RunTimes | None:
        """Times of the run that finished last; ``None`` before the first."""
        with self._lock:
            finished = self._tree.finished()
            return finished[-1].freeze() if finished else None

    @property
    def num_replayed(self) -> int:
        """Answers of LangChain's response cache."""
        with self._lock:
            return self._num_replayed

    def report(self) -> str:
        """Everything as a table for people, a row for each model."""
        text = speed_text(self.snapshot())
        replayed = self.num_replayed
        return f"{text}\nreplayed by the response cache: {replayed}" if replayed else text

    def to_dict(self) -> dict[str, Plain]:
        """Everything as JSON can say it, the times of the latest runs included."""
        return {
            "models": [each.to_dict() for each in self.snapshot()],
            "runs": [run.to_dict() for run in self.runs],
            "num_replayed": to_plain(self.num_replayed),
        }

    # -- what it hears -------------------------------------------------------------------------

    def _start(self, run_id: UUID, parent_run_id: UUID | None) -> RunClock:
        with self._lock:
            return self._tree.start(run_id, parent_run_id)

    def _start_run(
        self,
        run_id: UUID,
        parent_run_id: UUID | None,
        *,
        is_retriever: bool = False,  # noqa: ARG002 - not told apart
    ) -> None:
        self._start(run_id, parent_run_id)

    def _end_run(self, run_id: UUID, result: object = None) -> None:  # noqa: ARG002 - not looked at
        now = self._read_clock()
        with self._lock:
            run = self._tree.of(run_id)
            if run is not None and run.run_id == str(run_id):
                run.ended = now
            self._tree.end(run_id)

    def _start_call(
        self, serialized: dict[str, Any], run_id: UUID, parent: UUID | None, kwargs: dict[str, Any]
    ) -> None:
        name, is_own = model_name_at_start(
            serialized, kwargs.get("metadata"), kwargs.get("invocation_params")
        )
        with self._lock:
            run = self._start(run_id, parent)
            self._calls[run_id] = _Call(name, is_own, self._read_clock(), run)
            if len(self._calls) > _MAX_OPEN_CALLS:
                self._calls.popitem(last=False)

    def _see_token(self, run_id: UUID, *, is_event: bool) -> None:
        now = self._read_clock()
        with self._lock:
            call = self._calls.get(run_id)
            if call is None:
                return
            # A model may send every token both as a token and as an event of the newer protocol.
            if is_event:
                call.num_events += 1
            else:
                call.num_tokens += 1
            call.last_token = now
            if call.first_token is None:
                call.first_token = now

    def _end_call(self, run_id: UUID, response: object, outcome: Outcome) -> None:
        now = self._read_clock()
        with self._lock:
            call = self._calls.pop(run_id, None)
            if call is not None:
                self._account(call, response, outcome, now)
            self._end_run(run_id)

    def _account(self, call: _Call, response: object, outcome: Outcome, now: float) -> None:
        generation = first_generation(response)
        if is_replay(generation):
            self._num_replayed += 1
            call.run.num_replayed += 1
            return
        first, counted = call.first_token, max(call.num_tokens, call.num_events) or None
        told = None
        if isinstance(response, LLMResult):
            told = num_output_tokens(response, generation)
        is_streamed = first is not None
        own_ttft = ttft_seconds(generation)
        if first is None and own_ttft is not None:
            first = call.started + own_ttft
        name = call.model
        if not call.has_own_name:
            own_name = metadata_value(generation, "model_name")
            name = own_name if isinstance(own_name, str) and own_name else name
        run = call.run
        if first is not None and (run.first_token is None or first < run.first_token):
            run.first_token = first
        times = CallTimes(
            model=name,
            outcome=outcome,
            total_seconds=now - call.started,
            ttft_seconds=None if first is None else first - call.started,
            root_ttft_seconds=None if first is None else first - run.started,
            decode_seconds=None
            if call.first_token is None or call.last_token is None
            else call.last_token - call.first_token,
            num_output_tokens=counted if told is None else told,
            is_streamed=is_streamed,
        )
        run.calls.append(times)
        self._stats.record(times)

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
            self._see_token(run_id, is_event=False)

    @override
    def on_stream_event(self, event: MessagesData, *, run_id: UUID, **kwargs: Any) -> None:
        if is_content_event(event):
            self._see_token(run_id, is_event=True)

    @override
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_call(run_id, response, Outcome.COMPLETED)

    @override
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        outcome = Outcome.CANCELLED if is_cancellation(error) else Outcome.FAILED
        self._end_call(run_id, kwargs.get("response"), outcome)
