"""Starts and ends of runs, whatever kind of run they are."""

# ruff: noqa: ARG002 - LangChain passes more than is needed

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from langchain_core.documents import Document


class RunHandler(BaseCallbackHandler, ABC):
    """Turns LangChain's callbacks for chains, tools and retrievers into starts and ends of runs.

    Runs inline: its methods never wait, and a hop to another thread would stand in every time.
    """

    run_inline = True

    @abstractmethod
    def _start_run(
        self, run_id: UUID, parent_run_id: UUID | None, *, is_retriever: bool = False
    ) -> None:
        """A run that is no model call starts."""

    @abstractmethod
    def _end_run(self, run_id: UUID, result: object = None) -> None:
        """A run ended, with what it gave; with nothing after an error."""

    def _end_retriever(self, run_id: UUID, documents: Sequence[Document]) -> None:
        """A retriever ended."""
        self._end_run(run_id)

    @override
    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: dict[str, Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_run(run_id, parent_run_id)

    @override
    def on_chain_end(self, outputs: dict[str, Any], *, run_id: UUID, **kwargs: Any) -> None:
        self._end_run(run_id, outputs)

    @override
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_run(run_id)

    @override
    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_run(run_id, parent_run_id)

    @override
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_run(run_id, getattr(output, "artifact", None) or output)

    @override
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_run(run_id)

    @override
    def on_retriever_start(
        self,
        serialized: dict[str, Any],
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self._start_run(run_id, parent_run_id, is_retriever=True)

    @override
    def on_retriever_end(
        self,
        documents: Sequence[Document],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self._end_retriever(run_id, documents)

    @override
    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._end_run(run_id)
