"""The string model: text in, text out, for chains that render prompts themselves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

from langchain_pc_rag.messages import generation_info, usage_metadata
from langchain_pc_rag.settings import PcRagSettings, pulled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models.base import LangSmithParams

    from pc_rag.serving import Host, Reply


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
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        replies = []
        for prompt in prompts:
            host, stream = self._stream_call(prompt, stop, kwargs)
            with stream:
                for text in stream:
                    if run_manager and self.streaming:
                        run_manager.on_llm_new_token(text)
            replies.append((host, stream.reply))
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
            host, stream = await asyncio.to_thread(self._stream_call, prompt, stop, kwargs)
            async with aclosing(pulled(stream)) as texts:
                async for text in texts:
                    if run_manager and self.streaming:
                        await run_manager.on_llm_new_token(text)
            replies.append((host, stream.reply))
        return _result(replies)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        host, stream = self._stream_call(prompt, stop, kwargs)
        with stream:
            for text in stream:
                chunk = GenerationChunk(text=text)
                if run_manager:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        yield GenerationChunk(text="", generation_info=_info(host, stream.reply))

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        host, stream = await asyncio.to_thread(self._stream_call, prompt, stop, kwargs)
        async with aclosing(pulled(stream)) as texts:
            async for text in texts:
                chunk = GenerationChunk(text=text)
                if run_manager:
                    await run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk
        yield GenerationChunk(text="", generation_info=_info(host, stream.reply))

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of the model's own tokenizer."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.host.tokenizer.encode_text(text))


def _info(host: Host, reply: Reply) -> dict[str, Any]:
    return {**generation_info(host, reply), "usage": dict(usage_metadata(reply))}


def _result(replies: list[tuple[Host, Reply]]) -> LLMResult:
    generations = [
        [Generation(text=reply.text, generation_info=_info(host, reply))] for host, reply in replies
    ]
    usages = [usage_metadata(reply) for _, reply in replies]
    prompt_tokens = sum(usage["input_tokens"] for usage in usages)
    completion_tokens = sum(usage["output_tokens"] for usage in usages)
    return LLMResult(
        generations=generations,
        llm_output={
            "model_name": replies[0][0].model_name if replies else "",
            "token_usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        },
    )
