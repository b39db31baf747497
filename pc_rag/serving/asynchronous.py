"""Calls from an event loop: everything that computes runs in a thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pc_rag.serving.finishing import started

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from pc_rag.serving.reply import ReplyStream


async def begun(begin: Callable[[], ReplyStream]) -> ReplyStream:
    """Begin a call in a thread: the first one loads the model, and each tokenises its prompt.

    A stream that comes when its task was cancelled meanwhile is closed.
    """
    beginning = started(asyncio.to_thread(begin))
    try:
        return await asyncio.shield(beginning)
    except asyncio.CancelledError:
        beginning.add_done_callback(_close_late)
        raise


def _close_late(beginning: asyncio.Future[ReplyStream]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().close()


async def texts(stream: ReplyStream) -> AsyncGenerator[str]:
    """A reply's text, computed in threads: the event loop goes on meanwhile.

    A task that is cancelled, or a consumer that leaves, ends the generation within a token.

    Args:
        stream: The reply.
    """
    pull: asyncio.Task[str | None] | None = None
    try:
        while True:
            pull = started(asyncio.to_thread(next, stream, None))
            piece = await asyncio.shield(pull)
            if piece is None:
                return
            yield piece
    finally:
        stream.close()
        if pull is not None and not pull.done():
            pull.add_done_callback(_left)


def _left(pull: asyncio.Task[str | None]) -> None:
    """A token that nobody waits for any more is computed."""
    if not pull.cancelled():
        pull.exception()  # retrieved, so that asyncio does not report it as overlooked
