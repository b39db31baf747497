"""``CacheHitEventHandler``: how often queries were served from the cache, and why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.events.retrieval import (
    RetrievalEndEvent,
    RetrievalStartEvent,
)
from llama_index.llms.pc_rag.callbacks.call_events import CallEventHandler
from llama_index.llms.pc_rag.callbacks.calls import CallKey
from llama_index.llms.pc_rag.callbacks.responses import found_documents
from llama_index.llms.pc_rag.events import PromptCacheEvent
from typing_extensions import override

from pc_rag.serving.runs import RETRIEVER, CacheHitRuns, CallOutcome
from pc_rag.types import FinishReason

if TYPE_CHECKING:
    from llama_index.core.instrumentation.events.llm import (
        LLMChatStartEvent,
        LLMCompletionStartEvent,
    )
    from llama_index_instrumentation.base import BaseEvent

    from pc_rag.metrics import (
        CacheStats,
        CacheStatsCollector,
        Plain,
        RequestMetrics,
        StatsSnapshot,
    )
    from pc_rag.serving.runs import RunRecord, RunReport


@dataclass(slots=True, eq=False)
class _Call:
    record: RunRecord
    metrics: list[RequestMetrics] = field(default_factory=list)
    is_unreadable: bool = False


class CacheHitEventHandler(CallEventHandler):
    """Counts cache hits of every model call, and of every run: a query with all its calls.

    ``with CacheHitEventHandler() as handler: engine.query(question)``, then
    ``print(handler.report())``. It says of every retrieved node whether a prompt of its query read
    its stored KV, held a part of it, missed it and why, or did not hold it.

    ``attach()`` hears events and spans, and so knows which retrievals and calls are one query, in
    any number of threads and tasks. A query that streams is finished when its stream is: read to
    its end, failed, or closed. A handler that was only given to ``dispatcher.add_event_handler``
    knows no spans: then each call is a run of its own, retrievals belong to none, and a model whose
    ``chat`` asks its own ``complete``, as LlamaIndex's ``CustomLLM`` does, counts as two calls.

    A stream whose consumer left is one cancelled request. Calls of other models bring no metrics;
    they are counted as unreported.

    Memory is bounded: numbers are sums, and the reports of the latest runs are kept. Runs without
    a model call and without retrieval, such as those that only embed, are not.

    Args:
        max_runs: Latest finished runs whose reports are kept.
        stats: Takes the metrics; one of its own by default.

    Raises:
        ConfigError: ``max_runs`` is below 1.
    """

    _runs: CacheHitRuns = PrivateAttr()

    def __init__(self, *, max_runs: int = 256, stats: CacheStats | None = None) -> None:
        super().__init__()
        self._runs = CacheHitRuns(
            owner=self.class_name(),
            carrier="PromptCacheEvent",
            max_runs=max_runs,
            stats=stats,
            is_patient=True,
            keeps_empty=False,
            take_ended=self._streams.take_ended,
        )

    @classmethod
    @override
    def class_name(cls) -> str:
        return "CacheHitEventHandler"

    # -- what it tells -------------------------------------------------------------------------

    @property
    def stats(self) -> CacheStats:
        """Sums by template and tenant: hit rates, miss reasons, tokens and seconds saved."""
        return self._runs.stats

    def snapshot(self) -> StatsSnapshot:
        """The sums of this moment, by template and tenant and all together."""
        return self._runs.snapshot()

    @property
    def runs(self) -> tuple[RunReport, ...]:
        """Reports of the latest finished runs, the latest last."""
        return self._runs.runs

    @property
    def last_run(self) -> RunReport | None:
        """Report of the run that finished last; ``None`` before the first."""
        return self._runs.last_run

    @property
    def calls(self) -> dict[CallOutcome, int]:
        """Model calls by what they told."""
        return self._runs.calls

    @property
    def num_open_runs(self) -> int:
        """Spans and calls that started and did not end."""
        return self._runs.num_open_runs

    def report(self) -> str:
        """Everything as text for people: sums, every miss with its reason, and the last run."""
        return self._runs.report()

    def to_dict(self) -> dict[str, Plain]:
        """Everything as JSON can say it, the reports of the latest runs included."""
        return self._runs.to_dict()

    def collector(self) -> CacheStatsCollector:
        """The sums for a Prometheus registry: ``REGISTRY.register(handler.collector())``.

        Its metrics have the names of an engine's own: register one of the two.

        Raises:
            MissingDependencyError: prometheus-client is not installed.
        """
        return self._runs.collector()

    # -- what it hears -------------------------------------------------------------------------

    @property
    @override
    def _followed(self) -> CacheHitRuns:
        return self._runs

    @override
    def _hear(self, event: BaseEvent) -> None:
        if isinstance(event, PromptCacheEvent):
            self._take_metrics(event)
        elif isinstance(event, RetrievalStartEvent):
            self._runs.mark_run(event.span_id, RETRIEVER)
        elif isinstance(event, RetrievalEndEvent):
            self._runs.add_retrieved(event.span_id, found_documents(event.nodes))

    def _take_metrics(self, event: PromptCacheEvent) -> None:
        metrics = self._runs.metrics_of(event.metrics)
        span_id = event.span_id or ""
        call: _Call | None = self._calls.of(span_id)
        if call is not None:
            if metrics is None:
                call.is_unreadable = True
            else:
                call.metrics.append(metrics)
            return
        # A closed stream tells of itself from the outside in: its metrics come behind its end.
        left: _Call | None = self._calls.left(span_id)
        if metrics is not None and left is not None:
            self._runs.add_late_metrics(left.record, metrics)
        elif metrics is not None:
            # The handler came when the call was under way.
            self._runs.end_call(CallKey(span_id), CallOutcome.REPORTED, metrics)

    @override
    def _start_call(
        self, key: CallKey, event: LLMChatStartEvent | LLMCompletionStartEvent, prompt: str
    ) -> _Call:
        return _Call(self._runs.start_call(key, key.span_id, [prompt]))

    @override
    def _end_call(self, key: CallKey, state: Any, response: object) -> None:
        call: _Call = state
        if call.metrics:
            self._runs.end_call(key, CallOutcome.REPORTED, *call.metrics)
        elif call.is_unreadable:
            self._runs.end_call(key, CallOutcome.UNREADABLE)
        else:
            self._runs.end_call(key, CallOutcome.UNREPORTED)

    @override
    def _fail_call(self, key: CallKey, state: Any, *, is_cancelled: bool) -> None:
        call: _Call = state
        if not is_cancelled:
            # With metrics where only what came behind the model failed, such as a parser.
            self._runs.end_call(key, CallOutcome.FAILED, *call.metrics)
            return
        # The last piece comes behind the metrics: its consumer may leave with everything told.
        finish = [each.finish_reason for each in call.metrics]
        is_whole = bool(finish) and FinishReason.CANCELLED not in finish
        outcome = CallOutcome.REPORTED if is_whole else CallOutcome.CANCELLED
        self._runs.end_call(key, outcome, *call.metrics)
