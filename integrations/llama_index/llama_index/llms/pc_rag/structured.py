"""Answers that fit a Pydantic class, because they are held to its schema while generated."""

from __future__ import annotations

from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, cast

from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.pc_rag.messages import with_joined_lists
from llama_index.llms.pc_rag.settings import PcRagSettings
from llama_index_instrumentation import get_dispatcher
from pydantic import BaseModel, ValidationError

from pc_rag.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from llama_index.core.base.llms.types import ChatMessage, ChatResponse
    from llama_index.core.llms import LLM
    from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
    from llama_index.core.types import Model

dispatcher = get_dispatcher(__name__)

_OF_TOOLS = frozenset({"tool_choice", "tool_required", "allow_parallel_tool_calls"})
"""Settings of calls that LlamaIndex's programs take for their own, as the class is their tool."""


class StructuredPrediction(PcRagSettings):
    """LlamaIndex's structured prediction, by grammar: it works with every model."""

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of a class; the answer is held to its schema (extra ``structured``).

        With another ``pydantic_program_mode`` than the default, as LlamaIndex does it.

        Raises:
            GenerationError: The answer was cut off, or does not fit the class.
        """
        if not self._has_grammar_mode:
            other: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return other
        program = GrammarProgram(self, output_cls, prompt, llm_kwargs)
        _tell_start(output_cls, prompt, prompt_args)
        found = program.run(prompt_args)
        dispatcher.event(LLMStructuredPredictEndEvent(output=found))
        return cast("Model", found)

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """As ``structured_predict``; does not hold the event loop."""
        if not self._has_grammar_mode:
            other: Model = await super().astructured_predict(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return other
        program = GrammarProgram(self, output_cls, prompt, llm_kwargs)
        _tell_start(output_cls, prompt, prompt_args)
        found = await program.arun(prompt_args)
        dispatcher.event(LLMStructuredPredictEndEvent(output=found))
        return cast("Model", found)

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if not self._has_grammar_mode:
            return super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        return GrammarProgram(self, output_cls, prompt, llm_kwargs).stream(prompt_args)

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not self._has_grammar_mode:
            return await super()._structured_astream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
        return GrammarProgram(self, output_cls, prompt, llm_kwargs).astream(prompt_args)

    @property
    def _has_grammar_mode(self) -> bool:
        return self.pydantic_program_mode is PydanticProgramMode.DEFAULT


def _tell_start(
    output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
) -> None:
    dispatcher.event(
        LLMStructuredPredictStartEvent(
            output_cls=output_cls, template=prompt, template_args=prompt_args
        )
    )


class GrammarProgram:
    """Runs a prompt of which the answer is an object of a class.

    Args:
        llm: Takes ``response_format``.
        output_cls: The class.
        prompt: The prompt.
        llm_kwargs: Given to every call of the model.
    """

    def __init__(
        self,
        llm: LLM,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None,
    ) -> None:
        self._llm = llm
        self._output_cls = output_cls
        self._prompt = prompt
        schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
        response_format = {"type": "json_schema", "json_schema": schema}
        given = {name: value for name, value in (llm_kwargs or {}).items() if name not in _OF_TOOLS}
        self._kwargs = {**given, "response_format": response_format}

    def run(self, prompt_args: dict[str, Any]) -> BaseModel:
        """The object.

        Raises:
            GenerationError: The answer was cut off, or does not fit the class.
            MissingDependencyError: The extra ``structured`` is not installed.
        """
        return self._parsed(self._llm.chat(self._messages(prompt_args), **self._kwargs))

    async def arun(self, prompt_args: dict[str, Any]) -> BaseModel:
        """As ``run``; does not hold the event loop."""
        return self._parsed(await self._llm.achat(self._messages(prompt_args), **self._kwargs))

    def stream(self, prompt_args: dict[str, Any]) -> Generator[BaseModel, None, None]:
        """Objects with the fields that are there so far, the whole one last."""
        last = None
        stream = self._llm.stream_chat(self._messages(prompt_args), **self._kwargs)
        with closing(stream):
            for last in stream:
                if last.delta:
                    yield self._partial(last)
        if last is not None:
            yield self._parsed(last)

    async def astream(self, prompt_args: dict[str, Any]) -> AsyncGenerator[BaseModel, None]:
        """As ``stream``; does not hold the event loop."""
        last = None
        stream = await self._llm.astream_chat(self._messages(prompt_args), **self._kwargs)
        async with aclosing(stream):
            async for last in stream:
                if last.delta:
                    yield self._partial(last)
        if last is not None:
            yield self._parsed(last)

    def _messages(self, prompt_args: dict[str, Any]) -> list[ChatMessage]:
        return self._llm._extend_messages(  # noqa: SLF001 - LlamaIndex's own way to the system prompt
            self._prompt.format_messages(llm=self._llm, **with_joined_lists(prompt_args))
        )

    def _partial(self, response: ChatResponse) -> BaseModel:
        found = process_streaming_objects(response, self._output_cls, flexible_mode=True)
        return found[0] if isinstance(found, list) else found

    def _parsed(self, response: ChatResponse) -> BaseModel:
        text = response.message.content or ""
        try:
            return self._output_cls.model_validate_json(text)
        except ValidationError as error:
            raise GenerationError(
                f"the answer does not fit {self._output_cls.__name__} (it ended by "
                f"{(response.raw or {}).get('finish_reason')!r}): {text!r:.200}; {error}. Allow "
                "more tokens (max_tokens) where it was cut off"
            ) from error
