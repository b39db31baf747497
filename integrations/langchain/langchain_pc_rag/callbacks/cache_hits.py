"""``CacheHitHandler``: how often a chain's prompts were served from the cache, and why not."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from typing_extensions import override

from langchain_pc_rag.callbacks.responses import (
    METRICS_KEY,
    first_generation,
    is_cancellation,
    is_replay,
    metadata_value,
)
from langchain_pc_rag.callbacks.run_handler import RunHandler
from langchain_pc_rag.callbacks.run_report import (
    CallOutcome,
    FoundDocument,
    RunRecord,
    RunReport,
)
from langchain_pc_rag.callbacks.run_tree import RunTree
from pc_rag.corpus import chunk_id_of
from pc_rag.errors import ConfigError, PromptCacheError
from pc_rag.metrics import CacheStats, CacheStatsCollector, RequestMetrics, to_plain
from pc_rag.metrics.text import stats_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import Generation, LLMResult

    from pc_rag.metrics import Plain, StatsSnapshot


class CacheHitHandler(RunHandler):
    """Counts cache hits of every model call, and of every run of a chain.

    ``chain.invoke(question, config={"callbacks": [handler]})``, then ``print(handler.report())``.
    Attach it to the outermost run, so that it sees retrieval too. It works with ``invoke``,
    ``batch``, ``stream`` and their async forms, from any number of threads, and in agents.

    A response that LangChain's own response cache replays carries the metrics of the request that
    made it; it is counted as replayed and nothing else. A stream whose consumer left is one
    cancelled request. Calls of other models bring no metrics; they are counted as unreported.

    Memory is bounded: numbers are sums, and the reports of the latest runs are kept. It never
    waits, so async chains call it on their event loop (``run_inline``).

    Args:
        max_runs: Latest finished runs whose reports are kept.
        stats: Takes the metrics; one of its own by default.

    Attributes:
        stats: Sums by template and tenant: hit rates, miss reasons, tokens and seconds saved.

    Raises:
        ConfigError: ``max_runs`` is below 1.
    """

    def __init__(self, *, max_runs: int = 256, stats: CacheStats | None = None) -> None:
        if max_runs < 1:
            raise ConfigError(f"CacheHitHandler: max_runs is {max_runs}; it must be at least 1")
        self.stats = stats if stats is not None else CacheStats()
        # Reentrant: the garbage collector may close an abandoned stream on a thread that is in
        # here, and its callbacks come at once.
        self._lock = threading.RLock()
        self._calls: Counter[CallOutcome] = Counter()
        self._last_problem = ""
        self._tree: RunTree[RunRecord] = RunTree(
            lambda run_id: RunRecord(str(run_id)), max_finished=max_runs
        )

    # -- what it tells -------------------------------------------------------------------------

    def snapshot(self) -> StatsSnapshot:
        """The sums of this moment, by template and tenant and all together."""
        return self.stats.snapshot()

    @property
    def runs(self) -> tuple[RunReport, ...]:
        """Reports of the latest finished runs, the latest last."""
        with self._lock:
            return tuple(record.freeze() for record in self._tree.finished())

    @property
    def last_run(self) -> RunReport | None:
        """Report of the run that finished last; ``None`` before the first."""
        with self._lock:
            finished = self._tree.finished()
            return finished[-1].freeze() if finished else None

    @property
    def calls(self) -> dict[CallOutcome, int]:
        """Model calls by what they told."""
        with self._lock:
            return {outcome: self._calls[outcome] for outcome in CallOutcome}

    @property
    def num_replayed(self) -> int:
        """Answers of LangChain's response cache: no hits of ours, and no requests."""
        return self.calls[CallOutcome.REPLAYED]

    def report(self) -> str:
        """Everything as text for people: sums, every miss with its reason, and the last run."""
        calls, last = self.calls, self.last_run
        counted = ", ".join(f"{count} {outcome}" for outcome, count in calls.items() if count)
        lines = [f"model calls: {counted or 'none'}"]
        if calls[CallOutcome.UNREPORTED]:
            lines.append(
                f"  {calls[CallOutcome.UNREPORTED]} brought no metrics of pc-rag: another model, "
                "or one that does not pass on response_metadata"
            )
        if calls[CallOutcome.UNREADABLE]:
            lines.append(f"  unreadable metrics, the latest: {self._last_problem}")
        lines += [stats_text(self.snapshot())]
        if last is not None:
            lines += ["", f"last {last.describe()}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Plain]:
        """Everything as JSON can say it, the reports of the latest runs included."""
        return {
            "calls": to_plain(self.calls),
            "stats": self.snapshot().to_dict(),
            "runs": [run.to_dict() for run in self.runs],
        }

    def collector(self) -> CacheStatsCollector:
        """The sums for a Prometheus registry: ``REGISTRY.register(handler.collector())``.

        Its metrics have the names of an engine's own: register one of the two.

        Raises:
            MissingDependencyError: prometheus-client is not installed.
        """
        return CacheStatsCollector(self.stats)

    # -- what it hears -------------------------------------------------------------------------

    def _start_run(
        self, run_id: UUID, parent_run_id: UUID | None, *, is_retriever: bool = False
    ) -> None:
        with self._lock:
            self._tree.start(run_id, parent_run_id, is_retriever=is_retriever)

    def _start_call(self, run_id: UUID, parent_run_id: UUID | None, prompts: Sequence[str]) -> None:
        with self._lock:
            self._tree.start(run_id, parent_run_id)
            record = self._tree.of(run_id)
            if record is not None:
                for prompt in prompts:
                    record.note_prompt(prompt)

    def _end_run(self, run_id: UUID, result: object = None) -> None:
        """Documents that a function or a tool returns may stand in for a retriever's."""
        found = _documents_by_id(result)
        with self._lock:
            record = self._tree.of(run_id)
            if record is not None:
                record.returned.update(found)
            self._tree.end(run_id)

    def _end_retriever(
        self, run_id: UUID, parent_run_id: UUID | None, documents: Sequence[Document]
    ) -> None:
        found = _documents_by_id(documents)
        with self._lock:
            record = self._tree.of(run_id)
            # A retriever of retrievers gives what it chose of theirs: theirs are no documents yet.
            if record is not None and not self._tree.is_inside_retriever(parent_run_id):
                record.has_retriever = True
                record.retrieved.update(found)
            self._tree.end(run_id)

    def _end_call(
        self, run_id: UUID, outcome: CallOutcome, metrics: RequestMetrics | None = None
    ) -> None:
        """A model call ended, and is counted once: in the sums, and in its run."""
        if metrics is not None:
            self.stats.record(metrics)
        elif outcome is CallOutcome.FAILED:
            self.stats.record_failure()
        elif outcome is CallOutcome.CANCELLED:
            self.stats.record_cancelled()
        with self._lock:
            self._calls[outcome] += 1
            record = self._tree.of(run_id)
            if record is not None:
                record.add_call(outcome, metrics)
            self._tree.end(run_id)

    def _metrics_of(self, generation: Generation | None) -> RequestMetrics | None:
        """The metrics that a generation brings; ``None`` of none, or where they are malformed."""
        plain = metadata_value(generation, METRICS_KEY)
        if plain is None:
            return None
        try:
            return RequestMetrics.from_dict(plain)
        except PromptCacheError as error:
            with self._lock:
                self._last_problem = str(error)
            return None

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
        self._start_call(run_id, parent_run_id, [_text_of(each) for each in messages])

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
        self._start_call(run_id, parent_run_id, prompts)

    @override
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        generation = first_generation(response)
        if is_replay(generation):
            self._end_call(run_id, CallOutcome.REPLAYED)
            return
        metrics = self._metrics_of(generation)
        if metrics is not None:
            self._end_call(run_id, CallOutcome.REPORTED, metrics)
        elif metadata_value(generation, METRICS_KEY) is not None:
            self._end_call(run_id, CallOutcome.UNREADABLE)
        else:
            self._end_call(run_id, CallOutcome.UNREPORTED)

    @override
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if not is_cancellation(error):
            self._end_call(run_id, CallOutcome.FAILED)
            return
        # Metrics come with the last piece: they are here where the consumer left right behind it.
        metrics = self._metrics_of(first_generation(kwargs.get("response")))
        outcome = CallOutcome.CANCELLED if metrics is None else CallOutcome.REPORTED
        self._end_call(run_id, outcome, metrics)


def _documents_by_id(result: object) -> dict[str, FoundDocument]:
    """Documents of a list by the id of the chunk that their text is."""
    if not isinstance(result, (list, tuple)):
        return {}
    found = [
        FoundDocument(each.page_content.strip(), str(each.id or each.metadata.get("source") or ""))
        for each in result
        if isinstance(each, Document)
    ]
    return {chunk_id_of(each.text): each for each in found}


def _text_of(messages: Sequence[BaseMessage]) -> str:
    """What messages say, content blocks joined."""
    blocks = [
        block if isinstance(block, str) else block.get("text") or ""
        for message in messages
        for block in ([message.content] if isinstance(message.content, str) else message.content)
    ]
    return "\n".join(map(str, blocks))
