"""What handlers of every kind do with runs: follow them, and keep the latest that finished."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from pc_rag.metrics.limits import check_limits
from pc_rag.serving.runs.tree import RunTree

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

Record = TypeVar("Record")
Frozen = TypeVar("Frozen")


class FollowedRuns(Generic[Record, Frozen]):
    """Follows runs by their starts and ends; every method may be called from any thread.

    Args:
        owner: Name of the handler, for messages.
        new_record: Makes the running numbers of an outermost run, from its id.
        freeze: Makes plain values of them.
        is_kept: Whether a finished run is worth keeping.
        max_runs: Latest finished runs that are kept.
        is_patient: Whether a run is finished only when every call in it ended too.
        take_ended: Tells of runs that turn out to have ended, each once; asked before reading.

    Raises:
        ConfigError: ``max_runs`` is below 1.
    """

    def __init__(
        self,
        *,
        owner: str,
        new_record: Callable[[Hashable], Record],
        freeze: Callable[[Record], Frozen],
        is_kept: Callable[[Record], bool],
        max_runs: int,
        is_patient: bool,
        take_ended: Callable[[], Iterable[Hashable]],
    ) -> None:
        check_limits(owner, max_runs=max_runs)
        self._freeze = freeze
        self._take_ended = take_ended
        # Reentrant: the garbage collector may close an abandoned stream on a thread that is in
        # here, and its callbacks come at once. For the same reason no other lock is taken inside.
        self._lock = threading.RLock()
        self._tree: RunTree[Record] = RunTree(
            new_record, max_finished=max_runs, is_patient=is_patient, is_kept=is_kept
        )

    def settle(self) -> None:
        """End the runs that turn out to have ended. Readers need not call it."""
        for run_id in self._take_ended():
            self.end_late(run_id)

    @property
    def runs(self) -> tuple[Frozen, ...]:
        """Reports of the latest finished runs, the latest last."""
        self.settle()
        with self._lock:
            return tuple(self._freeze(record) for record in self._tree.finished())

    @property
    def last_run(self) -> Frozen | None:
        """Report of the run that finished last; ``None`` before the first."""
        self.settle()
        with self._lock:
            finished = self._tree.finished()
            return self._freeze(finished[-1]) if finished else None

    @property
    def num_open_runs(self) -> int:
        """Runs and calls that started and did not end."""
        self.settle()
        with self._lock:
            return self._tree.num_open_runs

    @property
    def _open_lines(self) -> list[str]:
        """A line about runs that are not over, for reports; none where all are."""
        is_open = bool(self.num_open_runs)
        return ["still open: runs that go on, or a stream that was not read to its end"] * is_open

    def start_run(
        self, run_id: Hashable, parent_run_id: Hashable | None, *, mark: str | None = None
    ) -> None:
        """A run starts that is no model call, of a kind that ``mark`` names or of none."""
        with self._lock:
            self._tree.start(run_id, parent_run_id, mark=mark)

    def end_late(self, run_id: Hashable) -> None:
        """A run turns out to have ended some time ago."""
        with self._lock:
            self._tree.end(run_id)

    def mark_run(self, run_id: Hashable, mark: str) -> None:
        """An open run turns out to be of a kind, before anything starts inside it."""
        with self._lock:
            self._tree.mark(run_id, mark)

    def is_inside(self, run_id: Hashable | None, outer_run_id: Hashable) -> bool:
        """Whether an open run is another, or stands inside it with nothing ended between."""
        with self._lock:
            return self._tree.is_inside(run_id, outer_run_id)

    def run_around(self, run_id: Hashable, mark: str) -> Hashable | None:
        """The outermost run of a kind around an open run; ``None`` of none."""
        with self._lock:
            return self._tree.around(run_id, mark)
