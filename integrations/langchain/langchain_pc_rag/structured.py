"""Answers that fit a schema, parsed."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.runnables import RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.output_parsers import BaseOutputParser
    from langchain_core.outputs import Generation
    from langchain_core.runnables import Runnable
    from pydantic import BaseModel

_METHODS = ("json_schema", "function_calling", "json_mode")


class WholeJsonParser(JsonOutputParser):
    """Parses JSON, partly while it streams, and refuses a whole answer that was cut off.

    LangChain's own parser mends what is missing at the end, so that an answer that ran out of
    tokens would look like one that lacks fields.
    """

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """See ``JsonOutputParser``."""
        if partial:
            return super().parse_result(result, partial=True)
        text = result[0].text
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise OutputParserException(
                f"the answer is no whole JSON ({error}); it may have run out of tokens: raise "
                f"max_tokens. It was: {text[:200]!r}",
                llm_output=text,
            ) from error


def bind_structured(
    model: BaseChatModel,
    schema: dict[str, Any] | type,
    *,
    method: str,
    include_raw: bool,
    kwargs: dict[str, Any],
) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
    """A model whose answers fit a schema; see ``ChatPcRag.with_structured_output``."""
    if method not in _METHODS:
        raise ConfigError(f"method {method!r} is unknown; use one of {', '.join(_METHODS)}")
    shown = {"kwargs": {"method": method}, "schema": schema}
    if method == "function_calling":
        tool = convert_to_openai_tool(schema)
        bound = model.bind_tools(
            [tool],
            tool_choice=tool["function"]["name"],
            ls_structured_output_format=shown,
            **kwargs,
        )
        parser = _tool_parser(schema, tool["function"]["name"])
    else:
        described = convert_to_json_schema(schema)
        bound = model.bind(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": described.get("title", "answer"), "schema": described},
            },
            ls_structured_output_format=shown,
            **kwargs,
        )
        parser = _text_parser(schema)
    return _with_raw(bound, parser) if include_raw else bound | parser


def _tool_parser(schema: dict[str, Any] | type, name: str) -> BaseOutputParser[Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _text_parser(schema: dict[str, Any] | type) -> BaseOutputParser[Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return WholeJsonParser()


def _with_raw(
    bound: Runnable[LanguageModelInput, Any], parser: BaseOutputParser[Any]
) -> Runnable[LanguageModelInput, Any]:
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")
