"""The chat model: a LangChain application changes one line and gets the hits."""

from __future__ import annotations

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
from langchain_pc_rag.settings import PcRagSettings
from langchain_pc_rag.structured import bind_structured
from pc_rag.serving import begun, texts, tool_choice_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models.model_profile import ModelProfile
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool
    from pydantic import BaseModel

    from pc_rag.serving import Reply, ReplyStream


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

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - core calls back
        **kwargs: Any,
    ) -> ChatResult:
        return _result(self._begin(messages, stop, kwargs).run())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        stream = await begun(lambda: self._begin(messages, stop, kwargs))
        async with aclosing(texts(stream)) as pieces:
            async for _ in pieces:
                pass
        return _result(stream.reply)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._begin(messages, stop, kwargs) as stream:
            for text in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        yield _last(stream.reply)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        stream = await begun(lambda: self._begin(messages, stop, kwargs))
        async with aclosing(texts(stream)) as pieces:
            async for text in pieces:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        yield _last(stream.reply)

    def _begin(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> ReplyStream:
        rest = dict(kwargs)
        conversation = to_conversation(messages, rest.pop("tools", None))
        return self._stream_call(conversation, stop, rest)

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
        tool_choice_of(tool_choice)
        bound = {"tools": [convert_to_openai_tool(tool) for tool in tools], **kwargs}
        return (
            self.bind(**bound)
            if tool_choice is None
            else self.bind(**bound, tool_choice=tool_choice)
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers that fit a schema, because they are held to it while they are generated.

        Args:
            schema: A Pydantic class, a TypedDict, a JSON schema, OpenAI's tool form, or any type
                that Pydantic knows, such as an enum or ``list[int]``; ``None`` under
                ``"json_mode"`` for any JSON object.
            include_raw: Give ``raw``, ``parsed`` and ``parsing_error`` instead.
            method: ``"json_schema"``, which works with every model; ``"function_calling"``, a tool
                that must be called; or ``"json_mode"``, the same as ``"json_schema"``: an answer
                is never freer than the schema given.
            strict: Taken for compatibility; the schema is always kept.
            **kwargs: Bound to every call.

        Raises:
            ConfigError: An unknown method, or no schema where it needs one.
        """
        del strict
        return bind_structured(self, schema, method=method, include_raw=include_raw, kwargs=kwargs)

    def _resolve_model_profile(self) -> ModelProfile | None:
        """What agents choose by; what the chat template knows shows only when it is loaded."""
        return {
            "text_inputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "pdf_inputs": False,
            "text_outputs": True,
            "structured_output": True,
        }

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of the prompt that these messages become, chat template included; 0 of none."""
        if not messages:
            return 0
        pieces = self.host.engine.chat_format.render(to_conversation(messages, tools))
        return sum(len(piece.token_ids) for piece in pieces)


def _result(reply: Reply) -> ChatResult:
    generation = ChatGeneration(
        message=to_ai_message(reply), generation_info=generation_info(reply)
    )
    return ChatResult(generations=[generation])


def _last(reply: Reply) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=last_chunk(reply), generation_info=generation_info(reply))
