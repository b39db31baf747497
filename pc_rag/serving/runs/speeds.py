"""Times of every model call, and of every run, as a framework's callbacks tell of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pc_rag.metrics import to_plain
from pc_rag.metrics.speed import CallTimes, SpeedStats, speed_text
from pc_rag.serving.runs.followed import FollowedRuns
from pc_rag.serving.runs.times import RunClock, RunTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from pc_rag.metrics import Outcome, Plain
    from pc_rag.metrics.speed import ModelSpeed

_MAX_OPEN_CALLS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a response says about itself, where it does.

    Attributes:
        model: Name of the model; it counts where the call had none of its own at its start.
        ttft_seconds: Its own time to the first token; it counts where no token was seen.
        num_output_tokens: Tokens generated.
        is_replay: Whether the framework's response cache gave the answer.
    """

    model: str | None = None
    ttft_seconds: float | None = None
    num_output_tokens: int | None = None
    is_replay: bool = False


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

    @property
    def decode_seconds(self) -> float | None:
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token


class TTFTRuns(FollowedRuns[RunClock, RunTimes]):
    """Times every call of any model, and every outermost run.

    What the TTFT handlers of all frameworks share: they translate callbacks to starts, tokens and
    ends here. Every method may be called from any thread, and none waits. Memory is bounded.

    Args:
        owner: Name of the handler, for messages.
        max_runs: Latest finished runs whose times are kept.
        max_samples: Latest calls of a model that percentiles are of.
        read_clock: Seconds on a monotonic clock.
        is_patient: Whether a run is finished only when every call in it ended too.
        keeps_empty: Whether runs without a call are kept.
        take_ended: Tells of runs that turn out to have ended, each once; asked before reading.

    Raises:
        ConfigError: A limit is below 1.
    """

    def __init__(
        self,
        *,
        owner: str,
        max_runs: int = 256,
        max_samples: int = 512,
        read_clock: Callable[[], float] = time.perf_counter,
        is_patient: bool = False,
        keeps_empty: bool = True,
        take_ended: Callable[[], Iterable[Hashable]] = tuple,
    ) -> None:
        super().__init__(
            owner=owner,
            new_record=lambda run_id: RunClock(str(run_id), read_clock()),
            freeze=RunClock.freeze,
            is_kept=lambda run: keeps_empty or not run.is_empty,
            max_runs=max_runs,
            is_patient=is_patient,
            take_ended=take_ended,
        )
        self._read_clock = read_clock
        self._stats = SpeedStats(max_samples=max_samples)
        self._num_replayed = 0
        self._calls: OrderedDict[Hashable, _Call] = OrderedDict()

    # -- what it tells -------------------------------------------------------------------------

    def snapshot(self) -> tuple[ModelSpeed, ...]:
        """The sums of this moment, by model."""
        return self._stats.snapshot()

    @property
    def num_replayed(self) -> int:
        """Answers of the framework's response cache."""
        with self._lock:
            return self._num_replayed

    def report(self) -> str:
        """Everything as a table for people, a row for each model."""
        lines = [speed_text(self.snapshot()), *self._open_lines]
        if replayed := self.num_replayed:
            lines.append(f"replayed by the response cache: {replayed}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Plain]:
        """Everything as JSON can say it, the times of the latest runs included."""
        return {
            "models": [each.to_dict() for each in self.snapshot()],
            "runs": [run.to_dict() for run in self.runs],
            "num_replayed": to_plain(self.num_replayed),
        }

    # -- what it hears -------------------------------------------------------------------------

    def end_run(self, run_id: Hashable) -> None:
        """A run ended, however it did."""
        now = self._read_clock()
        with self._lock:
            finished = self._tree.end(run_id)
            if finished is not None:
                finished.ended = now

    def end_late(self, run_id: Hashable) -> None:
        """A run turns out to have ended, when something of a model was seen last."""
        with self._lock:
            finished = self._tree.end(run_id)
            if finished is not None:
                finished.ended = finished.seen

    def start_call(
        self,
        run_id: Hashable,
        parent_run_id: Hashable | None,
        model: str,
        *,
        has_own_name: bool = True,
    ) -> None:
        """A model call starts.

        Args:
            run_id: Its id.
            parent_run_id: The run it stands in.
            model: What the model is called.
            has_own_name: Whether that is its own name; else the response may name it better.
        """
        with self._lock:
            run = self._tree.start(run_id, parent_run_id)
            self._calls[run_id] = _Call(model, has_own_name, self._read_clock(), run)
            if len(self._calls) > _MAX_OPEN_CALLS:
                self._calls.popitem(last=False)

    def see_token(self, run_id: Hashable, *, is_event: bool = False) -> None:
        """A piece of a call's answer was seen that carries something generated.

        A model may send every token both as a token and as an event of another protocol: the
        larger number of the two counts.
        """
        now = self._read_clock()
        with self._lock:
            call = self._calls.get(run_id)
            if call is None:
                return
            if is_event:
                call.num_events += 1
            else:
                call.num_tokens += 1
            call.last_token = call.run.seen = now
            if call.first_token is None:
                call.first_token = now

    def end_call(self, run_id: Hashable, outcome: Outcome, told: Told) -> None:
        """A model call ended, and is counted once."""
        now = self._read_clock()
        times: CallTimes | None = None
        with self._lock:
            call = self._calls.pop(run_id, None)
            if call is not None:
                call.run.seen = now
            if call is not None and told.is_replay:
                self._num_replayed += 1
                call.run.num_replayed += 1
            elif call is not None:
                times = _times_of(call, outcome, told, now)
                call.run.calls.append(times)
            finished = self._tree.end(run_id)
            if finished is not None:
                finished.ended = now
        # Not inside our lock: a stream that is collected inside theirs comes here from there.
        if times is not None:
            self._stats.record(times)


def _times_of(call: _Call, outcome: Outcome, told: Told, now: float) -> CallTimes:
    """The times of a call that ended; notes its first token in its run."""
    first, counted = call.first_token, max(call.num_tokens, call.num_events) or None
    if first is None and told.ttft_seconds is not None:
        first = call.started + told.ttft_seconds
    run = call.run
    if first is not None and (run.first_token is None or first < run.first_token):
        run.first_token = first
    return CallTimes(
        model=call.model if call.has_own_name or not told.model else told.model,
        outcome=outcome,
        total_seconds=now - call.started,
        ttft_seconds=None if first is None else first - call.started,
        root_ttft_seconds=None if first is None else first - run.started,
        decode_seconds=call.decode_seconds,
        num_output_tokens=counted if told.num_output_tokens is None else told.num_output_tokens,
        is_streamed=call.first_token is not None,
    )
