"""Work that a cancellation does not leave half done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_T = TypeVar("_T")

_running: set[asyncio.Task[Any]] = set()  # the event loop itself holds tasks weakly


async def tidied(work: Coroutine[Any, Any, _T]) -> _T:
    """Await work that tidies up when it is cancelled, and let it do so undisturbed.

    The work hears of the first cancellation only. The caller waits until it has tidied up; one
    who is cancelled once more no longer waits, and the work still ends.
    """
    task = started(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise


async def ended(work: Coroutine[Any, Any, _T]) -> _T:
    """Await what runs in a thread, which goes on when the task is cancelled.

    The task's cancellation surfaces when the thread is done, whose own error is then dropped.
    """
    task = started(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def started(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Start work that ends whether or not anybody waits for it."""
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task
