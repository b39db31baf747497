"""Which outermost run a callback belongs to, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

State = TypeVar("State")

_NO_MARKS: Final[Mapping[str, Hashable]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class _Root(Generic[State]):
    run_id: Hashable
    state: State
    open_runs: set[Hashable] = field(default_factory=set)
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class _Link(Generic[State]):
    """A run: its root, and by mark the marked runs it stands inside, or is."""

    root: _Root[State]
    parent_run_id: Hashable | None
    around: Mapping[str, Hashable]
    marks: Mapping[str, Hashable]


class RunTree(Generic[State]):
    """Finds the state of the outermost run by the id of any open run in it. Not thread-safe.

    A run whose parent was never seen is a root: the handler was attached further in. A stream
    that its consumer left ends from the outside in, so a root may end before runs inside it; they
    still find it until they end too, or until it is forgotten.

        chain |-----------------| end
          retriever |---| end
          model           |---------| end      (the stream was closed behind the chain's end)

    Args:
        new_state: Makes the state of a root that starts, from its run id.
        max_finished: Latest finished roots kept.
        max_open: Roots that may be open; beyond it the oldest is forgotten, as one whose end
            never came.
        is_patient: Whether a root is finished only when every run inside it ended too, as where
            queries return a stream and end before it is read. Otherwise its own end finishes it.
        is_kept: Whether a root that finished is worth keeping; all are by default.
    """

    def __init__(
        self,
        new_state: Callable[[Hashable], State],
        *,
        max_finished: int,
        max_open: int = 4096,
        is_patient: bool = False,
        is_kept: Callable[[State], bool] = lambda _: True,
    ) -> None:
        self._new_state = new_state
        self._max_finished = max_finished
        self._max_open = max_open
        self._is_patient = is_patient
        self._is_kept = is_kept
        self._links: dict[Hashable, _Link[State]] = {}
        self._open: OrderedDict[Hashable, _Root[State]] = OrderedDict()
        self._finished: OrderedDict[Hashable, _Root[State]] = OrderedDict()

    def start(
        self, run_id: Hashable, parent_run_id: Hashable | None, *, mark: str | None = None
    ) -> State:
        """A run starts, with a mark or without; the state of its root."""
        parent = None if parent_run_id is None else self._links.get(parent_run_id)
        if parent is None:
            root = _Root(run_id, self._new_state(run_id))
            self._open[run_id] = root
            if len(self._open) > self._max_open:
                self._forget(self._open.popitem(last=False)[1])
        else:
            root = parent.root
        root.open_runs.add(run_id)
        around = _NO_MARKS if parent is None else parent.marks
        self._links[run_id] = _Link(root, parent_run_id, around, around)
        if mark is not None:
            self.mark(run_id, mark)
        return root.state

    def mark(self, run_id: Hashable, mark: str) -> None:
        """Mark an open run, for runs that start inside it from now on."""
        link = self._links.get(run_id)
        if link is not None and mark not in link.marks:
            link.marks = MappingProxyType({**link.marks, mark: run_id})

    def around(self, run_id: Hashable, mark: str) -> Hashable | None:
        """The outermost run with a mark that an open run stands inside; ``None`` of none."""
        link = self._links.get(run_id)
        return None if link is None else link.around.get(mark)

    def is_inside(self, run_id: Hashable | None, outer_run_id: Hashable) -> bool:
        """Whether an open run is another, or stands inside it with nothing ended between."""
        while run_id is not None and run_id != outer_run_id:
            link = self._links.get(run_id)
            run_id = None if link is None else link.parent_run_id
        return run_id is not None

    def of(self, run_id: Hashable) -> State | None:
        """The state of an open run's root; ``None`` of a run that never started or ended."""
        link = self._links.get(run_id)
        return None if link is None else link.root.state

    def end(self, run_id: Hashable) -> State | None:
        """A run ended, however it did; later ends of it change nothing.

        Returns:
            The state of the root that finished with it; ``None`` where none did.
        """
        link = self._links.pop(run_id, None)
        if link is None:
            return None
        root = link.root
        root.open_runs.discard(run_id)
        if run_id == root.run_id:
            root.has_ended = True
        is_last = run_id == root.run_id or self._is_patient
        if not (root.has_ended and is_last) or (self._is_patient and root.open_runs):
            return None
        self._finish(root)
        return root.state

    def _finish(self, root: _Root[State]) -> None:
        self._open.pop(root.run_id, None)
        if not self._is_kept(root.state):
            self._forget(root)
            return
        self._finished[root.run_id] = root
        if len(self._finished) > self._max_finished:
            self._forget(self._finished.popitem(last=False)[1])

    def _forget(self, root: _Root[State]) -> None:
        for run_id in root.open_runs:
            self._links.pop(run_id, None)
        root.open_runs.clear()

    def finished(self) -> list[State]:
        """States of the roots that finished, in the order they did."""
        return [root.state for root in self._finished.values()]

    @property
    def num_open_runs(self) -> int:
        """Runs that started and did not end."""
        return len(self._links)
