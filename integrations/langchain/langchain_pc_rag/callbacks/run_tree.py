"""Which outermost run a callback belongs to, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

State = TypeVar("State")


@dataclass(slots=True, eq=False)
class _Root(Generic[State]):
    run_id: UUID
    state: State
    open_runs: set[UUID] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Link(Generic[State]):
    root: _Root[State]
    is_retriever: bool


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
        max_finished: Latest ended roots kept.
        max_open: Roots that may be open; beyond it the oldest is forgotten, as one whose end
            never came.
    """

    def __init__(
        self, new_state: Callable[[UUID], State], *, max_finished: int, max_open: int = 4096
    ) -> None:
        self._new_state = new_state
        self._max_finished = max_finished
        self._max_open = max_open
        self._links: dict[UUID, _Link[State]] = {}
        self._open: OrderedDict[UUID, _Root[State]] = OrderedDict()
        self._finished: OrderedDict[UUID, _Root[State]] = OrderedDict()

    def start(
        self, run_id: UUID, parent_run_id: UUID | None, *, is_retriever: bool = False
    ) -> State:
        """A run starts; the state of its root."""
        parent = None if parent_run_id is None else self._links.get(parent_run_id)
        if parent is None:
            root = _Root(run_id, self._new_state(run_id))
            self._open[run_id] = root
            if len(self._open) > self._max_open:
                self._forget(self._open.popitem(last=False)[1])
        else:
            root = parent.root
        root.open_runs.add(run_id)
        is_inside = parent is not None and parent.is_retriever
        self._links[run_id] = _Link(root, is_retriever or is_inside)
        return root.state

    def of(self, run_id: UUID) -> State | None:
        """The state of an open run's root; ``None`` of a run that never started or ended."""
        link = self._links.get(run_id)
        return None if link is None else link.root.state

    def is_inside_retriever(self, run_id: UUID | None) -> bool:
        """Whether a run is a retriever, or stands inside one."""
        link = None if run_id is None else self._links.get(run_id)
        return link is not None and link.is_retriever

    def end(self, run_id: UUID) -> None:
        """A run ended, however it did; later ends of it change nothing."""
        link = self._links.pop(run_id, None)
        if link is None:
            return
        root = link.root
        root.open_runs.discard(run_id)
        if run_id != root.run_id:
            return
        self._open.pop(run_id, None)
        self._finished[run_id] = root
        if len(self._finished) > self._max_finished:
            self._forget(self._finished.popitem(last=False)[1])

    def _forget(self, root: _Root[State]) -> None:
        for run_id in root.open_runs:
            self._links.pop(run_id, None)
        root.open_runs.clear()

    def finished(self) -> list[State]:
        """States of the roots that ended, in the order they ended."""
        return [root.state for root in self._finished.values()]

    @property
    def num_open_runs(self) -> int:
        """Runs that started and did not end."""
        return len(self._links)
