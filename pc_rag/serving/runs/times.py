"""What one outermost run took, with every model call in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pc_rag.metrics import Plain
    from pc_rag.metrics.speed import CallTimes

_MAX_CALLS = 1024
"""Calls of one run that are kept: an agent may go on for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """One outermost run: a chain or a query with all its model calls, or a model alone.

    Attributes:
        run_id: The framework's id of the run.
        total_seconds: From its start to its end; ``None`` while it runs.
        ttft_seconds: From its start to the first token of any of its models; ``None`` where none
            was seen.
        calls: Its model calls, the latest of very many, in the order they ended.
        num_replayed: Answers of the framework's response cache, which are no calls.
    """

    run_id: str
    total_seconds: float | None
    ttft_seconds: float | None
    calls: tuple[CallTimes, ...] = ()
    num_replayed: int = 0

    def to_dict(self) -> dict[str, Plain]:
        """Every field and every derived number, as JSON can say them."""
        return {
            "run_id": self.run_id,
            "total_seconds": self.total_seconds,
            "ttft_seconds": self.ttft_seconds,
            "calls": [call.to_dict() for call in self.calls],
            "num_replayed": self.num_replayed,
        }


@dataclass(slots=True, eq=False)
class RunClock:
    """The running times of one outermost run. Not thread-safe: its handler locks.

    ``seen`` is when something of a model was seen last.
    """

    run_id: str
    started: float
    seen: float = field(init=False)
    ended: float | None = None
    first_token: float | None = None
    calls: deque[CallTimes] = field(default_factory=lambda: deque(maxlen=_MAX_CALLS))
    num_replayed: int = 0

    def __post_init__(self) -> None:
        self.seen = self.started

    @property
    def is_empty(self) -> bool:
        """Whether no model was called in it."""
        return not self.calls and not self.num_replayed

    def freeze(self) -> RunTimes:
        """The times now, as plain values that no later callback changes."""
        return RunTimes(
            run_id=self.run_id,
            total_seconds=None if self.ended is None else self.ended - self.started,
            ttft_seconds=None if self.first_token is None else self.first_token - self.started,
            calls=tuple(self.calls),
            num_replayed=self.num_replayed,
        )
