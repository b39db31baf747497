"""The LLM: a LlamaIndex application changes one line and gets the hits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.llms.pc_rag.messages import (
    chat_piece,
    chat_response,
    completion_piece,
    completion_response,
    invalid_reasons,
    to_conversation,
    tool_selections,
    with_joined_lists,
)
from llama_index.llms.pc_rag.streams import apieces_of, arun, atold, pieces_of, run, told
from llama_index.llms.pc_rag.structured import StructuredPrediction

from pc_rag.errors import GenerationError
from pc_rag.model.conversation import check_text
from pc_rag.serving import begin_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.base.llms.types import (
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
    )
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.tools import BaseTool

    from pc_rag.model.conversation import TextPrompt
    from pc_rag.serving import ReplyStream


class PcRagLLM(StructuredPrediction):
    """A local model that reads the stored KV of the chunks in its prompts.

    Chunks are recognised by their text, whatever prompt they stand in. They come into the corpus
    through ``PromptCacheEncoder`` or ``open_corpus().add``. Earlier turns of a conversation are
    reused as they are, so each turn prefills only what is new.

    Every final response has ``raw``: ``model``, ``finish_reason``, ``ttft_seconds``, ``usage`` with
    ``prompt_tokens_details.cached_tokens``, and ``pc_rag``, the metrics of the request with the hit
    kind, tier and miss reason of each chunk. Every call emits a ``PromptCacheEvent``.

    ``complete`` of a prompt is ``chat`` with one message of the user, with the same tokens, where
    the model is a chat model; with ``formatted=True`` the text goes to the model as it is.

    Calls take ``stop``, ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty``, ``seed``, ``timeout``, ``model``, ``template``, ``reuse``,
    ``learn_prefix``, ``tools``, ``tool_choice``, ``parallel_tool_calls`` and ``response_format``.

    Example:
        ::

            llm = PcRagLLM(model="smollm2", store="store")
            llm.open_corpus().add([notice])
            llm.complete(f"Context: {notice} When does the ferry leave?")

    Raises:
        ConfigError: Settings are malformed or contradict each other.
    """

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return chat_response(run(self._begin_chat(messages, kwargs)))

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As ``chat``; pieces as they come. The prefill starts when the first is pulled."""
        pieces = pieces_of(lambda: self._begin_chat(messages, kwargs), chat_piece, chat_response)
        return told(llm_chat_callback, pieces, self, messages, **kwargs)

    @llm_completion_callback()
    def complete(
        self,
        prompt: str,
        formatted: bool = False,
        **kwargs: Any,
    ) -> CompletionResponse:
        """Answer a prompt; see the class for ``formatted``."""
        return completion_response(run(self._begin_completion(prompt, formatted, kwargs)))

    def stream_complete(
        self,
        prompt: str,
        formatted: bool = False,
        **kwargs: Any,
    ) -> CompletionResponseGen:
        """As ``complete``; pieces as they come."""
        pieces = pieces_of(
            lambda: self._begin_completion(prompt, formatted, kwargs),
            completion_piece,
            completion_response,
        )
        return told(llm_completion_callback, pieces, self, prompt, formatted=formatted, **kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As ``chat``; does not hold the event loop."""
        return chat_response(await arun(lambda: self._begin_chat(messages, kwargs)))

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As ``stream_chat``; does not hold the event loop."""
        pieces = apieces_of(lambda: self._begin_chat(messages, kwargs), chat_piece, chat_response)
        return await atold(llm_chat_callback, pieces, self, messages, **kwargs)

    @llm_completion_callback()
    async def acomplete(
        self,
        prompt: str,
        formatted: bool = False,
        **kwargs: Any,
    ) -> CompletionResponse:
        """As ``complete``; does not hold the event loop."""
        return completion_response(
            await arun(lambda: self._begin_completion(prompt, formatted, kwargs))
        )

    async def astream_complete(
        self,
        prompt: str,
        formatted: bool = False,
        **kwargs: Any,
    ) -> CompletionResponseAsyncGen:
        """As ``stream_complete``; does not hold the event loop."""
        pieces = apieces_of(
            lambda: self._begin_completion(prompt, formatted, kwargs),
            completion_piece,
            completion_response,
        )
        return await atold(
            llm_completion_callback, pieces, self, prompt, formatted=formatted, **kwargs
        )

    def _prepare_chat_with_tools(  # noqa: PLR0917 - LlamaIndex's
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002 - LlamaIndex passes more than is needed
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        given = {name: value for name, value in kwargs.items() if value is not None}
        chosen = {"tool_choice": "any"} if tool_required and tools else {}
        return {
            "messages": [*(chat_history or ()), *([user_msg] if user_msg else ())],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "parallel_tool_calls": allow_parallel_tool_calls,
            **chosen,
            **given,
        }

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002
    ) -> list[ToolSelection]:
        """The calls of tools in a response.

        Raises:
            GenerationError: There is none, and one was expected.
        """
        found = tool_selections(response)
        if not found and error_on_no_tool_call:
            raise GenerationError(
                f"the model called no tool; it said {response.message.content!r:.200}"
                f"{invalid_reasons(response)}. Ask with tool_required=True, or take an answer "
                "without a call (error_on_no_tool_call=False)"
            )
        return found

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        return super()._get_messages(prompt, **with_joined_lists(prompt_args))

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return super()._get_prompt(prompt, **with_joined_lists(prompt_args))

    def _begin_chat(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> ReplyStream:
        given = dict(kwargs)
        return self._begin(to_conversation(messages, given.pop("tools", None)), given)

    def _begin_completion(
        self,
        prompt: str,
        formatted: bool,
        kwargs: dict[str, Any],
    ) -> ReplyStream:
        if formatted or not self.metadata.is_chat_model:
            return self._begin(prompt, kwargs)
        check_text(prompt, "the prompt")  # a message would take something else for no text
        return self._begin_chat([ChatMessage(role=MessageRole.USER, content=prompt)], kwargs)

    def _begin(self, prompt: TextPrompt, given: dict[str, Any]) -> ReplyStream:
        return begin_call(self.host, prompt, given, self._defaults)
