"""LangChain models that say what they are told, on a clock that only they move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import (
    ChatGeneration,
    ChatGenerationChunk,
    ChatResult,
    Generation,
    GenerationChunk,
    LLMResult,
)
from langchain_core.retrievers import BaseRetriever

from tests.support.uses import TEXTS

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Speech:
    """What both kinds of models share."""

    def _advance(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.advance(seconds)

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"model_name": self.model_name, "finish_reason": "stop"}
        info["ttft_seconds"] = self.own_ttft
        if self.metrics is not None:
            info["pc_rag"] = self.metrics.to_dict()
        elif self.malformed is not None:
            info["pc_rag"] = self.malformed
        return info

    def _say(self) -> Iterator[str]:
        """The pieces, the first after ``prefill`` seconds, the others after ``step`` each."""
        for number, piece in enumerate(self.pieces):
            self._advance(self.prefill if number == 0 else self.step)
            if number == self.fail_at:
                message = "the model failed"
                raise ZeroDivisionError(message)
            yield piece

    def _usage(self) -> dict[str, Any] | None:
        if self.num_output_tokens is None:
            return None
        count = self.num_output_tokens
        return {"input_tokens": 50, "output_tokens": count, "total_tokens": 50 + count}


class SpeakingChat(_Speech, BaseChatModel):
    """A chat model that streams ``pieces``, and then its numbers on an empty last chunk."""

    pieces: tuple[Any, ...] = ("Nor", "way", ".")
    metrics: Any = None
    malformed: Any = None
    clock: Any = None
    prefill: float = 2.0
    step: float = 0.5
    fail_at: int = -1
    own_ttft: float | None = None
    num_output_tokens: int | None = None
    model_name: str = "speaker"

    @property
    def _llm_type(self) -> str:
        return "speaking"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        content = "".join(self._say())
        message = AIMessage(content, usage_metadata=self._usage())
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info=self._info())]
        )

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        for piece in self._say():
            yield ChatGenerationChunk(message=AIMessageChunk(piece))
        last = AIMessageChunk("", usage_metadata=self._usage(), chunk_position="last")
        yield ChatGenerationChunk(message=last, generation_info=self._info())


class SilentChat(SpeakingChat):
    """The same without streaming."""

    _stream = BaseChatModel._stream


class ToolCallingChat(SpeakingChat):
    """Calls the tool ``search`` first, and answers once it has a result."""

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        if messages[-1].type == "tool":
            yield from super()._stream(messages)
            return
        self._advance(self.prefill)
        yield ChatGenerationChunk(message=AIMessageChunk(""))
        self._advance(self.step)
        call = {"name": "search", "args": '{"query": "x"}', "id": "1", "index": 0}
        yield ChatGenerationChunk(message=AIMessageChunk("", tool_call_chunks=[call]))
        yield ChatGenerationChunk(
            message=AIMessageChunk("", chunk_position="last"), generation_info=self._info()
        )

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        if messages[-1].type == "tool":
            return super()._generate(messages)
        self._advance(self.prefill)
        call = {"name": "search", "args": {"query": "x"}, "id": "1", "type": "tool_call"}
        message = AIMessage("", tool_calls=[call])
        return ChatResult(
            generations=[ChatGeneration(message=message, generation_info=self._info())]
        )


class SpeakingLLM(_Speech, BaseLLM):
    """A string model that streams ``pieces``, and then its numbers on an empty last chunk."""

    pieces: tuple[str, ...] = ("Nor", "way", ".")
    metrics: Any = None
    malformed: Any = None
    clock: Any = None
    prefill: float = 2.0
    step: float = 0.5
    fail_at: int = -1
    own_ttft: float | None = None
    num_output_tokens: int | None = None
    model_name: str = "string-speaker"

    @property
    def _llm_type(self) -> str:
        return "speaking-llm"

    def _generate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        answers = [
            [Generation(text="".join(self._say()), generation_info=self._info())] for _ in prompts
        ]
        output = None
        if self.num_output_tokens is not None:
            output = {"token_usage": {"completion_tokens": self.num_output_tokens}}
        return LLMResult(generations=answers, llm_output=output)

    def _stream(
        self, prompt: str, stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[GenerationChunk]:
        for piece in self._say():
            chunk = GenerationChunk(text=piece)
            if run_manager:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        last = GenerationChunk(text="", generation_info=self._info())
        if run_manager:
            run_manager.on_llm_new_token("", chunk=last)
        yield last


class ListRetriever(BaseRetriever):
    """Gives the same texts for every question, after ``seconds``."""

    texts: tuple[str, ...] = TEXTS
    clock: Any = None
    seconds: float = 1.0
    has_failed: bool = False

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if self.clock is not None:
            self.clock.advance(self.seconds)
        if self.has_failed:
            message = "the index is gone"
            raise OSError(message)
        return [Document(f" {text}\n", metadata={"source": text[:4]}) for text in self.texts]


class RetrieverOfRetrievers(BaseRetriever):
    """Asks another retriever, and keeps its first document."""

    inner: Any

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.inner.invoke(query, config={"callbacks": run_manager.get_child()})[:1]
