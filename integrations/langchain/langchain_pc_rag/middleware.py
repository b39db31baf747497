"""Middleware of agents: retrieval in the system message, and chunks in tools' answers."""

# ruff: noqa: ARG002 - LangChain passes more than is needed

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, cast

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from typing_extensions import TypedDict

from langchain_pc_rag._checks import check_corpus
from langchain_pc_rag.chunks import (
    ContentBlock,
    chunk_texts,
    format_chunks,
    join_blocks,
    mark_chunks,
    text_block,
)
from pc_rag.errors import MissingDependencyError, require

require(
    "langchain.agents.middleware",
    feature="PromptCacheMiddleware",
    extra="agents",
    distribution="langchain-pc-rag",
)

from langchain.agents.middleware import AgentMiddleware, AgentState  # noqa: E402 - behind its gate
from langchain.agents.middleware.types import PrivateStateAttr  # noqa: E402

if len(AgentMiddleware.__parameters__) < 3:  # type: ignore[attr-defined]  # noqa: PLR2004 - state, context, response
    _found = importlib.metadata.version("langchain")
    raise MissingDependencyError(
        f"PromptCacheMiddleware (of langchain >= 1.2.10, and {_found} is installed)",
        "agents",
        "langchain-pc-rag",
    )

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from langchain.agents.middleware import ModelRequest, ModelResponse, ToolCallRequest
    from langchain_core.messages import AnyMessage
    from langchain_core.prompts import BasePromptTemplate
    from langchain_core.runnables import Runnable
    from langgraph.runtime import Runtime
    from langgraph.types import Command

    from pc_rag.corpus import Corpus

_SEPARATOR = "\n\n"


class RetrievedContext(TypedDict):
    """What was retrieved for a user's message."""

    message_id: str | None
    """The message."""
    blocks: list[ContentBlock]
    """The documents as content blocks, with the keys of their chunks."""


class PromptCacheState(AgentState[Any]):
    """The state of an agent, with what was retrieved for the user's latest message."""

    pc_rag_context: NotRequired[Annotated[RetrievedContext, PrivateStateAttr]]


class PromptCacheMiddleware(AgentMiddleware[PromptCacheState, Any, Any]):
    """Lets an agent's model read stored keys and values instead of prefilling documents.

    With a retriever, documents for the user's latest message stand in the system message, behind
    the agent's own and ``system_prompt``. They are retrieved once a user's turn, whatever the
    number of model calls in it, and brought near the model meanwhile. With or without one, the
    documents that a tool returns as its artifact (``create_retriever_tool(...,
    response_format="content_and_artifact")``) are named in its answer, where they stand in it
    verbatim.

    Args:
        corpus: Holds the keys and values of the documents' texts.
        retriever: From a question to documents.
        system_prompt: What the model is told before the documents.
        separator: Between two documents.
        document_prompt: Writes a document; see ``format_chunks``.

    Raises:
        ConfigError: No corpus.
        MissingDependencyError: On import: the package ``langchain`` is not installed, or too old.
    """

    state_schema = PromptCacheState
    tools = ()

    def __init__(
        self,
        corpus: Corpus,
        retriever: Runnable[str, list[Document]] | None = None,
        *,
        system_prompt: str = "",
        separator: str = _SEPARATOR,
        document_prompt: BasePromptTemplate[str] | None = None,
    ) -> None:
        super().__init__()
        check_corpus(type(self).__name__, corpus)
        self.corpus = corpus
        self.retriever = retriever
        self.system_prompt = system_prompt
        self.separator = separator
        self.document_prompt = document_prompt

    def before_model(self, state: PromptCacheState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """Retrieve for the user's latest message, unless that was done."""
        question = self._new_question(state)
        if question is None or self.retriever is None:
            return None
        return self._retrieved(question, self.retriever.invoke(question.text))

    async def abefore_model(
        self, state: PromptCacheState, runtime: Runtime[Any]
    ) -> dict[str, Any] | None:
        """As ``before_model``."""
        question = self._new_question(state)
        if question is None or self.retriever is None:
            return None
        return self._retrieved(question, await self.retriever.ainvoke(question.text))

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        """Call the model with the documents in the system message."""
        return handler(self._with_context(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """As ``wrap_model_call``."""
        return await handler(self._with_context(request))

    def wrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]],
    ) -> ToolMessage | Command[Any]:
        """Name the chunks in a tool's answer."""
        return self._with_chunks(handler(request))

    async def awrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]],
    ) -> ToolMessage | Command[Any]:
        """As ``wrap_tool_call``."""
        return self._with_chunks(await handler(request))

    def _new_question(self, state: PromptCacheState) -> HumanMessage | None:
        """The user's latest message, if nothing was retrieved for it yet."""
        question = _latest_question(state["messages"])
        context = state.get("pc_rag_context")
        if question is None or (context is not None and context["message_id"] == question.id):
            return None
        return question

    def _retrieved(self, question: HumanMessage, documents: list[Document]) -> dict[str, Any]:
        blocks = format_chunks(
            documents, separator=self.separator, document_prompt=self.document_prompt
        )
        self.corpus.warm(chunk_texts(blocks))
        context = RetrievedContext(message_id=question.id, blocks=blocks)
        return {"pc_rag_context": context}

    def _with_context(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        state = cast("PromptCacheState", request.state)
        context = state.get("pc_rag_context")
        retrieved = context["blocks"] if context is not None else []
        told = [text_block(self.system_prompt)] if self.system_prompt else []
        if not told and not retrieved:
            return request
        system = request.system_message
        before = system.content if system is not None else ""
        if isinstance(before, str):
            before = [text_block(before)] if before else []
        # The blocks of others may say more than text: they stay as they are.
        between = [text_block(_SEPARATOR)] if before else []
        ours = join_blocks([told, retrieved], separator=_SEPARATOR)
        content = [*before, *between, *ours]
        return request.override(system_message=SystemMessage(content=content))

    def _with_chunks(self, answer: ToolMessage | Command[Any]) -> ToolMessage | Command[Any]:
        if not isinstance(answer, ToolMessage) or not isinstance(answer.content, str):
            return answer
        blocks = mark_chunks(answer.content, _documents_in(answer.artifact))
        texts = chunk_texts(blocks)
        if not texts:
            return answer
        self.corpus.warm(texts)
        return answer.model_copy(update={"content": blocks})


def _latest_question(messages: Sequence[AnyMessage]) -> HumanMessage | None:
    return next((each for each in reversed(messages) if isinstance(each, HumanMessage)), None)


def _documents_in(artifact: object) -> list[Document]:
    """The documents of a tool's artifact; none where it is something else."""
    if isinstance(artifact, list) and all(isinstance(each, Document) for each in artifact):
        return artifact
    return []
