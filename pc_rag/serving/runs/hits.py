"""Cache hits of every model call, and of every run, as a framework's callbacks tell of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from pc_rag.errors import PromptCacheError
from pc_rag.metrics import CacheStats, CacheStatsCollector, RequestMetrics, to_plain
from pc_rag.metrics.text import stats_text
from pc_rag.serving.runs.followed import FollowedRuns
from pc_rag.serving.runs.outcomes import CallOutcome
from pc_rag.serving.runs.record import RunRecord, documents_by_id
from pc_rag.serving.runs.report import RunReport

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from pc_rag.metrics import Plain, StatsSnapshot
    from pc_rag.serving.runs.outcomes import FoundDocument

RETRIEVER: Final = "retriever"
"""Mark of runs that retrieve."""


class CacheHitRuns(FollowedRuns[RunRecord, RunReport]):
    """Counts cache hits of every model call, and of every outermost run.

    What the cache hit handlers of all frameworks share: they translate callbacks to starts and
    ends here. Every method may be called from any thread, and none waits.

    Memory is bounded: numbers are sums, and the reports of the latest runs are kept.

    Args:
        owner: Name of the handler, for messages.
        carrier: Where a response brings metrics, for people whose model brings none.
        max_runs: Latest finished runs whose reports are kept.
        stats: Takes the metrics; one of its own by default.
        is_patient: Whether a run is finished only when every call in it ended too.
        keeps_empty: Whether runs without a call and without retrieval are kept.
        take_ended: Tells of runs that turn out to have ended, each once; asked before reading.

    Attributes:
        stats: Sums by template and tenant: hit rates, miss reasons, tokens and seconds saved.

    Raises:
        ConfigError: ``max_runs`` is below 1.
    """

    def __init__(
        self,
        *,
        owner: str,
        carrier: str,
        max_runs: int = 256,
        stats: CacheStats | None = None,
        is_patient: bool = False,
        keeps_empty: bool = True,
        take_ended: Callable[[], Iterable[Hashable]] = tuple,
    ) -> None:
        super().__init__(
            owner=owner,
            new_record=lambda run_id: RunRecord(str(run_id)),
            freeze=RunRecord.freeze,
            is_kept=lambda record: keeps_empty or not record.is_empty,
            max_runs=max_runs,
            is_patient=is_patient,
            take_ended=take_ended,
        )
        self.stats = stats if stats is not None else CacheStats()
        self._carrier = carrier
        self._calls: Counter[CallOutcome] = Counter()
        self._last_problem = ""

    # -- what it tells -------------------------------------------------------------------------

    def snapshot(self) -> StatsSnapshot:
        """The sums of this moment, by template and tenant and all together."""
        return self.stats.snapshot()

    @property
    def calls(self) -> dict[CallOutcome, int]:
        """Model calls by what they told."""
        with self._lock:
            return {outcome: self._calls[outcome] for outcome in CallOutcome}

    def report(self) -> str:
        """Everything as text for people: sums, every miss with its reason, and the last run."""
        calls, last = self.calls, self.last_run
        counted = ", ".join(f"{count} {outcome}" for outcome, count in calls.items() if count)
        lines = [f"model calls: {counted or 'none'}"]
        if calls[CallOutcome.UNREPORTED]:
            lines.append(
                f"  {calls[CallOutcome.UNREPORTED]} brought no metrics of pc-rag: another model, "
                f"or one that does not pass on {self._carrier}"
            )
        if calls[CallOutcome.UNREADABLE]:
            lines.append(f"  unreadable metrics, the latest: {self._last_problem}")
        lines += [*self._open_lines, stats_text(self.snapshot())]
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

    def start_call(
        self, run_id: Hashable, parent_run_id: Hashable | None, prompts: Iterable[str]
    ) -> RunRecord:
        """A model call starts, with what it is asked; the record of its run.

        The record may be given to ``add_late_metrics``, and to nothing else.
        """
        with self._lock:
            record = self._tree.start(run_id, parent_run_id)
            for prompt in prompts:
                record.note_prompt(prompt)
            return record

    def end_run(self, run_id: Hashable, found: Iterable[FoundDocument] = ()) -> None:
        """A run ended that is no model call.

        Args:
            run_id: Its id.
            found: Documents that it gave: of a function they may stand in for a retriever's.
        """
        documents = documents_by_id(found)
        with self._lock:
            record = self._tree.of(run_id)
            if record is not None:
                record.returned.update(documents)
            self._tree.end(run_id)

    def add_retrieved(self, run_id: Hashable, found: Iterable[FoundDocument]) -> None:
        """A run that retrieves, and stays open, gave its documents."""
        documents = documents_by_id(found)
        with self._lock:
            record = self._tree.of(run_id)
            # A retriever of retrievers gives what it chose of theirs: theirs are no documents yet.
            if record is not None and self._tree.around(run_id, RETRIEVER) is None:
                record.has_retriever = True
                record.retrieved.update(documents)

    def end_call(self, run_id: Hashable, outcome: CallOutcome, *metrics: RequestMetrics) -> None:
        """A model call ended, and is counted once: in the sums, and in its run.

        Args:
            run_id: Its id.
            outcome: What it told.
            metrics: Of the request it made. Of several each is counted as a call: a model that
                asks ours twice.
        """
        for each in metrics:
            self.stats.record(each)
        if not metrics and outcome is CallOutcome.FAILED:
            self.stats.record_failure()
        elif not metrics and outcome is CallOutcome.CANCELLED:
            self.stats.record_cancelled()
        with self._lock:
            record = self._tree.of(run_id)
            told: tuple[RequestMetrics | None, ...] = metrics or (None,)
            self._calls[outcome] += len(told)
            if record is not None:
                for one in told:
                    record.add_call(outcome, one)
            self._tree.end(run_id)

    def end_call_with(self, run_id: Hashable, plain: object) -> None:
        """A model call came to its end, and its response brings these metrics or ``None``."""
        metrics = self.metrics_of(plain)
        if metrics is not None:
            self.end_call(run_id, CallOutcome.REPORTED, metrics)
        else:
            is_ours = plain is not None
            self.end_call(run_id, CallOutcome.UNREADABLE if is_ours else CallOutcome.UNREPORTED)

    def add_late_metrics(self, record: RunRecord, metrics: RequestMetrics) -> None:
        """Metrics of a call that was counted before they came: its run learns them.

        The sums do not: the request stands there already.
        """
        with self._lock:
            record.add_metrics(metrics)

    def metrics_of(self, plain: object) -> RequestMetrics | None:
        """Metrics as a response brings them; ``None`` of none, or where they are malformed."""
        if plain is None:
            return None
        try:
            return RequestMetrics.from_dict(plain)
        except PromptCacheError as error:
            with self._lock:
                self._last_problem = str(error)
            return None
