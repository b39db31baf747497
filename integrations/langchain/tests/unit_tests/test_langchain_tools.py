"""Tools and structured output, with a model whose output is forced."""

from __future__ import annotations

import json
from typing import Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_pc_rag import ChatPcRag
from pydantic import BaseModel, Field

from pc_rag.errors import ConfigError, UnsupportedModelError
from pc_rag.model.loading import wrap_model
from tests.support.corpora import CAT, TEXTS, opened, recorded
from tests.support.engines import scripted
from tests.support.tiny_models import tiny_model
from tests.support.tool_templates import BARE_TEMPLATE, TAGGED_TEMPLATE

CALL = '<call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</call>'


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


@tool
def clock(zone: Literal["utc", "cet"]) -> str:
    """Tell the time."""
    return zone


class Point(BaseModel):
    """A place on a map."""

    x: int = Field(ge=0, le=9)
    y: int = Field(ge=0, le=9)


class PointDict(TypedDict):
    """A place on a map."""

    x: int
    y: int


@pytest.fixture(params=["tagged", "bare"])
def template(request):
    return {"tagged": TAGGED_TEMPLATE, "bare": BARE_TEMPLATE}[request.param]


def corpus_with(template):
    return opened(loaded=wrap_model(*tiny_model("llama"), chat_template=template))


@pytest.fixture
def corpus():
    with corpus_with(TAGGED_TEMPLATE) as corpus:
        corpus.add(TEXTS)
        yield corpus


@pytest.fixture
def llm(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=200)


def test_call_is_read_when_the_model_writes_one(corpus, llm):
    """Text before it stays text; the call has a name, arguments and an id."""
    with scripted(corpus.engine, f"Let me look.\n{CALL}"):
        answer = llm.bind_tools([weather]).invoke("How is Oslo?")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    assert call["id"]
    assert answer.content.strip() == "Let me look."
    assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_stream_gives_the_same_call_when_it_is_summed(corpus, llm):
    """Nothing of a call appears in the streamed text."""
    with scripted(corpus.engine, f"Let me look.\n{CALL}"):
        chunks = list(llm.bind_tools([weather]).stream("How is Oslo?"))
    total = sum(chunks[1:], start=chunks[0])
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [("weather", {"city": "Oslo"})]
    assert total.content.strip() == "Let me look."
    assert not any("<" in chunk.content for chunk in chunks)


def test_several_calls_are_read_when_the_model_writes_several(corpus, llm):
    """Each with an id of its own; with ``parallel_tool_calls=False`` the second is refused."""
    with scripted(corpus.engine, f"{CALL}\n{CALL}"):
        answer = llm.bind_tools([weather]).invoke("Oslo?")
    with scripted(corpus.engine, f"{CALL}\n{CALL}"):
        single = llm.bind_tools([weather], parallel_tool_calls=False).invoke("Oslo?")
    assert len({call["id"] for call in answer.tool_calls}) == 2
    assert len(single.tool_calls) == 1
    (refused,) = single.invalid_tool_calls
    assert "may hold 1 calls" in refused["error"]


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ('{"name": "weather", "arguments": {"town": "Oslo"}}', "city"),
        ('{"name": "wether", "arguments": {"city": "Oslo"}}', "wether"),
        ('{"name": "weather", "arguments": {"city": ', ""),
    ],
)
def test_call_is_invalid_with_a_reason_when_it_fits_no_tool(corpus, llm, written, named):
    """The application sees what was written and why it is no call."""
    with scripted(corpus.engine, f"<call>\n{written}\n</call>"):
        answer = llm.bind_tools([weather]).invoke("Oslo?")
    (invalid,) = answer.invalid_tool_calls
    assert answer.tool_calls == []
    assert named in invalid["error"]
    assert invalid["args"]


@pytest.mark.parametrize(
    "choice", ["any", "required", True, "clock", {"function": {"name": "clock"}}]
)
def test_model_calls_a_tool_when_it_must(template, choice):
    """Random weights, and still a call that fits its tool: it is held to the schema."""
    with corpus_with(template) as corpus:
        llm = ChatPcRag(corpus=corpus, max_tokens=900, temperature=2.0, seed=1)
        tools = [clock] if choice in ("any", "required", True) else [weather, clock]
        answer = llm.bind_tools(tools, tool_choice=choice).invoke("Hi")
        (call,) = answer.tool_calls
        assert call["name"] == "clock"
        assert call["args"]["zone"] in {"utc", "cet"}
        assert answer.content == ""


def test_no_call_is_read_when_none_is_allowed(corpus, llm):
    """The tools are not shown either."""
    with recorded(corpus.engine) as requests, scripted(corpus.engine, CALL):
        answer = llm.bind_tools([weather], tool_choice="none").invoke("Oslo?")
    shown = corpus.engine.loaded.tokenizer.decode(requests[0].plan.token_ids)
    assert answer.tool_calls == []
    assert answer.content == CALL
    assert "weather" not in shown


@pytest.mark.parametrize(
    ("choice", "named"),
    [("snow", "the tools given are 'weather'"), ({"type": "x"}, "tool_choice")],
)
def test_choice_is_refused_when_there_is_no_such_tool(llm, choice, named):
    """By name, with the tools there are."""
    with pytest.raises(ConfigError, match=named):
        llm.bind_tools([weather], tool_choice=choice).invoke("Hi")


def test_tool_answer_is_shown_with_hits_when_it_holds_a_chunk(corpus, llm):
    """The agent's way to context: a retriever's answer is recognised in its tool message."""
    call = {"name": "weather", "args": {"city": "Oslo"}, "id": "call_1"}
    messages = [
        HumanMessage("How is Oslo?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage(f"Source: a\nContent: {CAT}", tool_call_id="call_1"),
    ]
    with scripted(corpus.engine, "Rainy."):
        answer = llm.bind_tools([weather]).invoke(messages)
    modules = answer.response_metadata["pc_rag"]["modules"]
    assert [m["hit_kind"] for m in modules if m["label"] != "(prefix)"] == ["composed"]
    assert answer.content == "Rainy."


def test_tools_are_refused_when_the_template_knows_none():
    """The error names the capability that is missing."""
    with opened() as corpus, pytest.raises(UnsupportedModelError) as caught:
        ChatPcRag(corpus=corpus).bind_tools([weather]).invoke("Hi")
    assert caught.value.capability == "tools"


@pytest.mark.parametrize("schema", [Point, PointDict, Point.model_json_schema()])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_answer_fits_the_schema_when_output_is_structured(corpus, schema, method):
    """Random weights cannot leave the schema, by invoke and by stream."""
    llm = ChatPcRag(corpus=corpus, max_tokens=400, temperature=2.0, seed=3)
    structured = llm.with_structured_output(schema, method=method)
    for answer in (structured.invoke("Where?"), list(structured.stream("Where?"))[-1]):
        found = answer.model_dump() if isinstance(answer, BaseModel) else answer
        assert set(found) == {"x", "y"}
        assert all(isinstance(value, int) for value in found.values())


async def test_async_answer_fits_the_schema_when_output_is_structured(corpus):
    """The asynchronous twin of the above."""
    llm = ChatPcRag(corpus=corpus, max_tokens=200, temperature=2.0, seed=3)
    assert isinstance(await llm.with_structured_output(Point).ainvoke("Where?"), Point)


def test_cut_answer_is_an_error_when_tokens_run_out(corpus):
    """Never mended: half an object is no object."""
    llm = ChatPcRag(corpus=corpus, max_tokens=6)
    structured = llm.with_structured_output(PointDict)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        structured.invoke("Where?")
    raw = llm.with_structured_output(PointDict, include_raw=True).invoke("Where?")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)
    assert raw["raw"].response_metadata["finish_reason"] == "length"


def test_any_json_object_is_the_answer_when_a_call_asks_for_json(corpus):
    """JSON mode of a call, as OpenAI's clients ask for it."""
    llm = ChatPcRag(corpus=corpus, max_tokens=1500, temperature=3.0, seed=0)
    answer = llm.invoke("Say JSON.", response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.content), dict)


def test_format_is_refused_when_it_is_unknown(llm):
    """By name, with those that are known."""
    with pytest.raises(ConfigError, match="'yaml'"):
        llm.invoke("Hi", response_format={"type": "yaml"})
    with pytest.raises(ConfigError, match="method 'xml' is unknown"):
        llm.with_structured_output(Point, method="xml")
