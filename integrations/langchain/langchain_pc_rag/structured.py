"""Answers that fit a schema, parsed whole or not at all."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast, is_typeddict

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser, JsonOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, PydanticUserError, TypeAdapter

from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.runnables import Runnable

    from langchain_pc_rag.settings import PcRagSettings

_METHODS = ("json_schema", "function_calling", "json_mode")
_NAME = "answer"
"""Of a schema that has none."""
_KEYWORDS = frozenset({"type", "properties", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"})
"""A mapping with one of these is a JSON schema; others are forms that LangChain knows."""

_NOTHING = object()
"""Before anything was streamed; ``None`` may be the answer."""


class WholeAnswerParser(BaseCumulativeTransformOutputParser[Any]):
    """Parses an answer to the end, and refuses one that was cut off.

    LangChain's own parsers mend what is missing at the end, so that an answer that ran out of
    tokens would look like a shorter one.

    Attributes:
        validate_answer: Turns plain JSON into what the caller asked for; ``None`` leaves it plain.
    """

    validate_answer: Callable[[Any], Any] | None = None

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The answer; while it streams, what there is of plain JSON.

        Raises:
            OutputParserException: The answer is not whole, or does not fit its class.
        """
        if partial:
            return None if self.validate_answer is not None else self._partial(result)
        value = self._whole(result)
        if self.validate_answer is None:
            return value
        try:
            return self.validate_answer(value)
        except ValueError as error:
            raise OutputParserException(
                f"the answer {value!r} does not fit its schema: {error}",
                llm_output=result[0].text,
            ) from error

    def parse(self, text: str) -> Any:
        """See ``parse_result``."""
        return self.parse_result([Generation(text=text)])

    @abstractmethod
    def _whole(self, result: list[Generation]) -> Any:
        """The answer, or an ``OutputParserException``."""

    def _partial(self, result: list[Generation]) -> Any:  # noqa: ARG002 - one of two parsers has some
        """What there is of an answer; ``None`` for nothing yet."""
        return None

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:  # noqa: A002 - LangChain's
        pieces: list[Any] = []

        def passing() -> Iterator[str | BaseMessage]:
            for piece in input:
                pieces.append(piece)
                yield piece

        last: Any = _NOTHING
        for last in super()._transform(passing()):
            yield last
        whole = self.parse_result([_generation(pieces)])
        if whole != last:
            yield whole

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:  # noqa: A002
        pieces: list[Any] = []

        async def passing() -> AsyncIterator[str | BaseMessage]:
            async for piece in input:
                pieces.append(piece)
                yield piece

        last: Any = _NOTHING
        async for last in super()._atransform(passing()):
            yield last
        whole = self.parse_result([_generation(pieces)])
        if whole != last:
            yield whole


def _generation(pieces: list[Any]) -> Generation:
    """A streamed answer as one."""
    if not pieces or isinstance(pieces[0], str):
        return Generation(text="".join(pieces))
    message = pieces[0]
    for piece in pieces[1:]:
        message += piece
    return ChatGeneration(message=message)


class JsonAnswerParser(WholeAnswerParser):
    """Parses an answer that is JSON."""

    def _partial(self, result: list[Generation]) -> Any:
        return JsonOutputParser().parse_result(result, partial=True)

    def _whole(self, result: list[Generation]) -> Any:
        text = result[0].text
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise OutputParserException(
                f"the answer is no whole JSON ({error}); it may have run out of tokens: raise "
                f"max_tokens. It was: {text[:200]!r}",
                llm_output=text,
            ) from error


class CallAnswerParser(WholeAnswerParser):
    """Takes the arguments of a tool call for the answer.

    Attributes:
        tool_name: The tool.
    """

    tool_name: str

    def _whole(self, result: list[Generation]) -> Any:
        generation = result[0]
        message: AIMessage | None = getattr(generation, "message", None)
        calls = message.tool_calls if message is not None else []
        for call in calls:
            if call["name"] == self.tool_name:
                return call["args"]
        invalid = [call["args"] for call in message.invalid_tool_calls] if message else []
        raise OutputParserException(
            f"the answer holds no whole call of {self.tool_name!r}; it may have run out of tokens: "
            f"raise max_tokens. It was: {invalid or generation.text!r}",
            llm_output=generation.text,
        )


def bind_structured(
    model: PcRagSettings,
    schema: Any,
    *,
    method: str,
    include_raw: bool,
    kwargs: dict[str, Any],
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """A model whose answers fit a schema; see ``ChatPcRag.with_structured_output``."""
    if method not in _METHODS:
        raise ConfigError(f"method {method!r} is unknown; use one of {', '.join(_METHODS)}")
    parser: WholeAnswerParser
    shown = {"kwargs": {"method": method}, "schema": _named(schema)}
    if method == "function_calling":
        bound, parser = _bound_tool(model, _named(schema), shown, kwargs)
    elif schema is None:
        if method != "json_mode":
            raise ConfigError(f"method {method!r} needs a schema; or use 'json_mode' for any JSON")
        bound = model.bind(response_format={"type": "json_object"}, **kwargs)
        parser = JsonAnswerParser()
    else:
        described = json_schema_of(schema)
        shown["schema"] = _traced(schema, described)
        wanted = {"name": described.get("title", _NAME), "schema": described}
        bound = model.bind(
            response_format={"type": "json_schema", "json_schema": wanted},
            ls_structured_output_format=shown,
            **kwargs,
        )
        parser = JsonAnswerParser(validate_answer=_validator_of(schema))
    return _with_raw(bound, parser) if include_raw else bound | parser


def _traced(schema: Any, described: dict[str, Any]) -> Any:
    """What traces show: the schema itself, or ours of a type that LangChain cannot convert."""
    try:
        convert_to_json_schema(schema)
    except (ValueError, TypeError):
        return _named(described)
    return schema


def _bound_tool(
    model: PcRagSettings, schema: Any, shown: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[Runnable[LanguageModelInput, Any], CallAnswerParser]:
    """A model that must call the tool whose arguments are the answer."""
    bind_tools = getattr(model, "bind_tools", None)
    if bind_tools is None or schema is None:
        raise ConfigError(
            "method 'function_calling' needs a chat model and a schema; use 'json_schema'"
        )
    tool = convert_to_openai_tool(schema)
    name = tool["function"]["name"]
    bound = bind_tools(
        [tool],
        tool_choice={"type": "function", "function": {"name": name}},
        ls_structured_output_format=shown,
        **kwargs,
    )
    return bound, CallAnswerParser(tool_name=name, validate_answer=_validator_of(schema))


def json_schema_of(schema: Any) -> dict[str, Any]:
    """The JSON schema that an answer is held to.

    Pydantic describes its own classes: LangChain's conversion loses what a class says of itself.

    Raises:
        ConfigError: Nothing that has a schema.
    """
    if isinstance(schema, dict):
        is_tool = schema.get("type") == "function"  # OpenAI's form; no type of JSON
        is_plain = bool(_KEYWORDS & schema.keys()) and not is_tool
        return dict(schema) if is_plain else convert_to_json_schema(_named(schema))
    if is_typeddict(schema):
        return convert_to_json_schema(schema)
    if is_basemodel_subclass(schema) and not issubclass(schema, BaseModel):
        return dict(schema.schema())  # Pydantic's first version
    try:
        return TypeAdapter(schema).json_schema()
    except PydanticUserError as error:
        raise ConfigError(
            f"schema {schema!r} has no JSON schema: {error}. Give a Pydantic class, a TypedDict, a "
            "JSON schema, or a type that Pydantic knows"
        ) from error


def _validator_of(schema: Any) -> Callable[[Any], Any] | None:
    """Turns plain JSON into what the schema stands for; ``None`` where that is plain JSON."""
    if isinstance(schema, dict) or is_typeddict(schema):
        return None
    if is_basemodel_subclass(schema) and not issubclass(schema, BaseModel):
        return cast("Callable[[Any], Any]", schema.parse_obj)  # Pydantic's first version
    adapter = TypeAdapter(schema)
    # As from JSON: there, dates and enums are strings.
    return lambda value: adapter.validate_json(json.dumps(value))


def _named(schema: Any) -> Any:
    """A JSON schema with the name that LangChain wants."""
    if isinstance(schema, dict) and not {"title", "name", "function"} & schema.keys():
        return {"title": _NAME, **schema}
    return schema


def _with_raw(
    bound: Runnable[LanguageModelInput, Any], parser: WholeAnswerParser
) -> Runnable[LanguageModelInput, Any]:
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")
