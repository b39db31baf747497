"""What a forward pass takes on its device, without making anybody wait for the device."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class PassClock:
    """Times one forward pass.

    A GPU still works when a call returns, so on CUDA the pass is framed by events of its stream,
    which are read once the result was used; on a CPU by a monotonic clock. Other devices say
    nothing: waiting for them would cost every request.

    Args:
        device: Where the pass runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_seconds: float | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Run the pass inside; a body that raises is not measured."""
        if self._device.type == "cuda":
            events = (_event(), _event())
            stream = torch.cuda.current_stream(self._device)
            events[0].record(stream)
            yield
            events[1].record(stream)
            self._events = events
            return
        started = time.perf_counter()
        yield
        if self._device.type == "cpu":
            self._cpu_seconds = time.perf_counter() - started

    def seconds(self) -> float | None:
        """What the pass took; ``None`` where unknown.

        Call it when the pass's result was used, so that the device has come past it: before that
        nothing is known, and nothing is waited for.
        """
        if self._events is None:
            return self._cpu_seconds
        started, ended = self._events
        if not ended.query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return None
        milliseconds: float = started.elapsed_time(ended)
        return milliseconds / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # likewise
