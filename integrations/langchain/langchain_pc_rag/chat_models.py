"""The chat model: a LangChain application changes one line and gets the hits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict

from langchain_pc_rag.messages import (
    generation_info,
    last_chunk,
    to_ai_message,
    to_conversation,
)
from langchain_pc_rag.settings import PcRagSettings, pulled
from langchain_pc_rag.structured import bind_structured
from pc_rag.errors import ConfigError
from pc_rag.serving import ToolChoice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool
    from pydantic import BaseModel

    from pc_rag.serving import Host, Reply, ReplyStream


class ChatPcRag(PcRagSettings, BaseChatModel):
    """A local chat model that reads the stored KV of the chunks in its prompts.

    Chunks are recognised by their text, whatever prompt they stand in, or named by content blocks
    (see ``format_chunks``). They come into the corpus through ``PromptCacheIndex``,
    ``PromptCacheVectorStore``, or ``open_corpus().add``. Earlier turns of a conversation are reused
    as they are, so each turn prefills only what is new.

    Every message has ``usage_metadata`` (``cache_read``, ``cache_creation``), and in
    ``response_metadata``: ``model_name``, ``finish_reason``, ``ttft_seconds``, and ``pc_rag``, the
    metrics of the request with the hit kind, tier and miss reason of each chunk.

    Calls take ``stop``, ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty``, ``seed``, ``timeout``, ``model``, ``template``, ``reuse``,
    ``learn_prefix``, ``tools``, ``tool_choice``, ``parallel_tool_calls`` and ``response_format``.

    Example:
        ::

            llm = ChatPcRag(model="smollm2", store="store")
            llm.open_corpus().add([notice])
            llm.invoke(f"Context: {notice} When does the ferry leave?")

    Raises:
        ConfigError: Settings are malformed or contradict each other.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    @property
    def _llm_type(self) -> str:
        return "pc-rag"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "pc-rag"
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - core calls back
        **kwargs: Any,
    ) -> ChatResult:
        host, stream = self._begin(messages, stop, kwargs)
        with stream:
            for _ in stream:
                pass
        return _result(host, stream.reply)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        host, stream = await self._abegin(messages, stop, kwargs)
        async for _ in pulled(stream):
            pass
        return _result(host, stream.reply)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        host, stream = self._begin(messages, stop, kwargs)
        with stream:
            for text in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        yield _last(host, stream.reply)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        host, stream = await self._abegin(messages, stop, kwargs)
        async with aclosing(pulled(stream)) as texts:
            async for text in texts:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        yield _last(host, stream.reply)

    def _begin(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[Host, ReplyStream]:
        rest = dict(kwargs)
        conversation = to_conversation(messages, rest.pop("tools", None))
        return self._stream_call(conversation, stop, rest)

    async def _abegin(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[Host, ReplyStream]:
        """In a thread: the first call loads the model, and planning tokenises."""
        return await asyncio.to_thread(self._begin, messages, stop, kwargs)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools; its chat template has to know them.

        Args:
            tools: In any form that LangChain knows.
            tool_choice: ``"auto"`` (the default), ``"none"``, ``"any"`` (also ``"required"`` and
                ``True``), the name of a tool, or OpenAI's ``{"type": "function", ...}``. A call
                that must be made is held to the tool's schema (extra ``structured``).
            **kwargs: Bound to every call, such as ``parallel_tool_calls=False``.

        Raises:
            ConfigError: An unknown ``tool_choice``.
        """
        bound = {"tools": [convert_to_openai_tool(tool) for tool in tools], **kwargs}
        choice = _tool_choice(tool_choice)
        return self.bind(**bound) if choice is None else self.bind(**bound, tool_choice=choice)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers that fit a schema, because they are held to it while they are generated.

        Args:
            schema: A Pydantic class, a TypedDict, a JSON schema, or OpenAI's tool form.
            include_raw: Give ``raw``, ``parsed`` and ``parsing_error`` instead.
            method: ``"json_schema"``, which works with every model; ``"function_calling"``, a tool
                that must be called; or ``"json_mode"``, the same as ``"json_schema"``: an answer
                is never freer than the schema given.
            strict: Taken for compatibility; the schema is always kept.
            **kwargs: Bound to every call.

        Raises:
            ConfigError: An unknown method.
        """
        del strict
        return bind_structured(self, schema, method=method, include_raw=include_raw, kwargs=kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.host.tokenizer.encode_text(text))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that these messages become, chat template included."""
        pieces = self.host.engine.chat_format.render(to_conversation(messages, tools))
        return sum(len(piece.token_ids) for piece in pieces)


def _result(host: Host, reply: Reply) -> ChatResult:
    info = generation_info(host, reply)
    return ChatResult(
        generations=[ChatGeneration(message=to_ai_message(reply), generation_info=info)]
    )


def _last(host: Host, reply: Reply) -> ChatGenerationChunk:
    return ChatGenerationChunk(
        message=last_chunk(reply), generation_info=generation_info(host, reply)
    )


def _tool_choice(choice: dict[str, Any] | str | bool | None) -> str | None:  # noqa: FBT001 - LangChain's
    """What LangChain and OpenAI call a choice, in our words; ``None`` leaves it open."""
    if choice is None or choice is False:
        return None
    if choice is True:
        return ToolChoice.ANY
    if isinstance(choice, str):
        return ToolChoice.ANY if choice == "required" else choice
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise ConfigError(
            f"tool_choice {choice!r} is unknown; use 'auto', 'any', 'none' or the name of a tool"
        )
    return name
