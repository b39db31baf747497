"""``CacheHitHandler``: how often a chain's prompts were served from the cache, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from typing_extensions import override

from langchain_pc_rag.callbacks.responses import (
    METRICS_KEY,
    first_generation,
    is_replay,
    metadata_value,
)
from langchain_pc_rag.callbacks.run_handler import RunHandler
from pc_rag.serving.runs import (
    RETRIEVER,
    CacheHitRuns,
    CallOutcome,
    FoundDocument,
    is_cancellation,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import LLMResult

    from pc_rag.metrics import CacheStats


class CacheHitHandler(CacheHitRuns, RunHandler):
    """Counts cache hits of every model call, and of every run of a chain.

    ``chain.invoke(question, config={"callbacks": [handler]})``, then ``print(handler.report())``.
    Attach it to the outermost run, so that it sees retrieval too. It works with ``invoke``,
    ``batch``, ``stream`` and their async forms, from any number of threads, and in agents.

    A response that LangChain's own response cache replays carries the metrics of the request that
    made it; it is counted as replayed and nothing else. A stream whose consumer left is one
    cancelled request. Calls of other models bring no metrics; they are counted as unreported.

    Memory is bounded: numbers are sums, and the reports of the latest runs are kept. It never
    waits, so async chains call it on their event loop (``run_inline``).

    Args:
        max_runs: Latest finished runs whose reports are kept.
        stats: Takes the metrics; one of its own by default.

    Attributes:
        stats: Sums by template and tenant: hit rates, miss reasons, tokens and seconds saved.

    Raises:
        ConfigError: ``max_runs`` is below 1.
    """

    def __init__(self, *, max_runs: int = 256, stats: CacheStats | None = None) -> None:
        super().__init__(
            owner="CacheHitHandler", carrier="response_metadata", max_runs=max_runs, stats=stats
        )

    @property
    def num_replayed(self) -> int:
        """Answers of LangChain's response cache: no hits of ours, and no requests."""
        return self.calls[CallOutcome.REPLAYED]

    @override
    def _start_run(
        self, run_id: UUID, parent_run_id: UUID | None, *, is_retriever: bool = False
    ) -> None:
        self.start_run(run_id, parent_run_id, mark=RETRIEVER if is_retriever else None)

    @override
    def _end_run(self, run_id: UUID, result: object = None) -> None:
        """Documents that a function or a tool returns may stand in for a retriever's."""
        self.end_run(run_id, _found_documents(result))

    @override
    def _end_retriever(self, run_id: UUID, documents: Sequence[Document]) -> None:
        self.add_retrieved(run_id, _found_documents(documents))
        self.end_run(run_id)

    @override
    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self.start_call(run_id, parent_run_id, [_text_of(each) for each in messages])

    @override
    def on_llm_start(
        self,
        serialized: dict[str, Any],
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self.start_call(run_id, parent_run_id, prompts)

    @override
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        generation = first_generation(response)
        if is_replay(generation):
            self.end_call(run_id, CallOutcome.REPLAYED)
            return
        self.end_call_with(run_id, metadata_value(generation, METRICS_KEY))

    @override
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if not is_cancellation(error):
            self.end_call(run_id, CallOutcome.FAILED)
            return
        # Metrics come with the last piece: they are here where the consumer left right behind it.
        generation = first_generation(kwargs.get("response"))
        metrics = self.metrics_of(metadata_value(generation, METRICS_KEY))
        if metrics is None:
            self.end_call(run_id, CallOutcome.CANCELLED)
        else:
            self.end_call(run_id, CallOutcome.REPORTED, metrics)


def _found_documents(result: object) -> list[FoundDocument]:
    """The documents of a list."""
    if not isinstance(result, (list, tuple)):
        return []
    return [
        FoundDocument(each.page_content.strip(), str(each.id or each.metadata.get("source") or ""))
        for each in result
        if isinstance(each, Document)
    ]


def _text_of(messages: Sequence[BaseMessage]) -> str:
    """What messages say, content blocks joined."""
    blocks = [
        block if isinstance(block, str) else block.get("text") or ""
        for message in messages
        for block in ([message.content] if isinstance(message.content, str) else message.content)
    ]
    return "\n".join(map(str, blocks))
