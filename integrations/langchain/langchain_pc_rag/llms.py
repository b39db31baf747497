"""The string model: text in, text out, for chains that render prompts themselves."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

from langchain_pc_rag.messages import generation_info, usage_metadata
from langchain_pc_rag.settings import PcRagSettings
from langchain_pc_rag.structured import bind_structured
from pc_rag.serving import begun, texts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.runnables import Runnable
    from pydantic import BaseModel

    from pc_rag.serving import Reply


class PcRagLLM(PcRagSettings, BaseLLM):
    """A local text model that reads the stored KV of the chunks in its prompts.

    The prompt goes to the model as it is, without a chat template; for instruction-tuned models
    ``ChatPcRag`` is the better choice. Settings, calls and corpus are those of ``ChatPcRag``, save
    tools. Generations carry ``generation_info`` with ``finish_reason``, ``ttft_seconds``,
    ``usage`` and ``pc_rag``; results carry ``token_usage`` in ``llm_output``.

    Raises:
        ConfigError: Settings are malformed or contradict each other.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        replies = []
        for prompt in prompts:
            with self._stream_call(prompt, stop, kwargs) as stream:
                for text in stream:
                    if run_manager and self.streaming:
                        run_manager.on_llm_new_token(text, chunk=GenerationChunk(text=text))
            replies.append(stream.reply)
        return _result(replies)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        replies = []
        for prompt in prompts:
            stream = await begun(partial(self._stream_call, prompt, stop, kwargs))
            async with aclosing(texts(stream)) as pieces:
                async for text in pieces:
                    if run_manager and self.streaming:
                        chunk = GenerationChunk(text=text)
                        await run_manager.on_llm_new_token(text, chunk=chunk)
            replies.append(stream.reply)
        return _result(replies)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with self._stream_call(prompt, stop, kwargs) as stream:
            for text in stream:
                chunk = GenerationChunk(text=text)
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        last = GenerationChunk(text="", generation_info=_info(stream.reply))
        if run_manager:
            run_manager.on_llm_new_token("", chunk=last)
        yield last

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        stream = await begun(partial(self._stream_call, prompt, stop, kwargs))
        async with aclosing(texts(stream)) as pieces:
            async for text in pieces:
                chunk = GenerationChunk(text=text)
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        last = GenerationChunk(text="", generation_info=_info(stream.reply))
        if run_manager:
            await run_manager.on_llm_new_token("", chunk=last)
        yield last

    def with_structured_output(
        self, schema: dict[str, Any] | type, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers held to a schema; see ``ChatPcRag``, save ``method="function_calling"``.

        Raises:
            ConfigError: An unknown method, or one that needs tools.
        """
        kwargs.pop("strict", None)
        method = kwargs.pop("method", "json_schema")
        include_raw = kwargs.pop("include_raw", False)
        return bind_structured(self, schema, method=method, include_raw=include_raw, kwargs=kwargs)


def _info(reply: Reply) -> dict[str, Any]:
    return {**generation_info(reply), "usage": dict(usage_metadata(reply))}


def _result(replies: list[Reply]) -> LLMResult:
    usages = [usage_metadata(reply) for reply in replies]
    prompt_tokens = sum(usage["input_tokens"] for usage in usages)
    completion_tokens = sum(usage["output_tokens"] for usage in usages)
    return LLMResult(
        generations=[
            [Generation(text=reply.text, generation_info=_info(reply))] for reply in replies
        ],
        llm_output={
            "model_name": replies[0].model_name if replies else "",
            "token_usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        },
    )
