"""Text as it is generated: a stream that can be closed at any token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pc_rag.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from pc_rag.engine.completion import Completion
    from pc_rag.engine.generation import Generation


class CompletionStream:
    """Text as it is generated. An iterator and a context manager.

    Prefill starts at the first ``next``. Closing the stream, or leaving its ``with`` block, stops
    the generation before its next token and gives everything back. It may be pulled from several
    threads, one after the other, and closed by any thread at any time: a ``next`` that runs
    meanwhile ends the stream once its token is computed. One that nobody holds any more is closed
    as well; where the garbage collector had to find it, what it held comes back with the engine's
    next request, or when its ``stats`` are read.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pieces = generation.run()
        self._is_started = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self._is_started = True
        return next(self._pieces)

    def close(self) -> None:
        """Stop. A stream that ended already, or was closed before, is left as it is."""
        self._generation.cancel()
        try:
            self._pieces.close()  # also keeps one that never started from starting later
        except ValueError as error:
            if "already executing" not in str(error):
                raise
            return  # another thread is in ``next``, which ends the stream
        if not self._is_started:
            self._generation.cancel_unstarted()

    @property
    def completion(self) -> Completion:
        """The answer so far, complete once the stream has ended or was closed.

        Raises:
            GenerationError: The stream has neither ended nor been closed, or it failed.
        """
        self._generation.end_others()  # this one too may have been ended by the collector
        completion = self._generation.completion
        if completion is None:
            raise GenerationError(
                "the stream has no completion: it has not ended, or it failed. Exhaust or close it "
                "first; after an error run the prompt again"
            )
        return completion

    def when_completed(self, callback: Callable[[], None]) -> None:
        """Have it called once the stream has its completion; never for one that failed.

        That is now for a stream that ended or was closed. It is later where a ``next`` of another
        thread runs, which ends the stream, or where the garbage collector closed it.

        Args:
            callback: Called once, by any thread, with no lock held. Raises nothing.
        """
        self._generation.when_completed(callback)
        self._generation.end_others()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
