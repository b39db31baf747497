"""Answers that fit a schema, with random weights that are held to it."""

from __future__ import annotations

import datetime as dt
import enum
import json
import threading
from typing import Literal, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_pc_rag import ChatPcRag, PcRagLLM
from langchain_pc_rag.structured import json_schema_of
from pydantic import BaseModel, Field, field_validator
from pydantic.v1 import BaseModel as FirstBaseModel

from pc_rag.errors import ConfigError
from pc_rag.model.loading import wrap_model
from tests.support.corpora import opened
from tests.support.engines import scripted
from tests.support.tiny_models import tiny_model
from tests.support.tool_templates import TAGGED_TEMPLATE


class Point(BaseModel):
    """A place on a map."""

    x: int = Field(ge=0, le=9)
    y: int = Field(ge=0, le=9)


class PointDict(TypedDict):
    """A place on a map."""

    x: int
    y: int


class FirstPoint(FirstBaseModel):
    """A place, in Pydantic's first version."""

    x: int
    y: int


class Color(enum.Enum):
    """What one sees."""

    RED = "red"
    BLUE = "blue"


class Tree(BaseModel):
    """A tree of numbers."""

    value: int
    children: list[Tree] = []


class Visit(BaseModel):
    """Who came, when, and to what."""

    day: dt.date
    color: Color
    guest: str | None
    kind: Literal["short", "long"]
    place: Point | int


POINT_SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
"""Without a title."""
POINT_TOOL = {"type": "function", "function": {"name": "point", "parameters": POINT_SCHEMA}}
VISIT = (
    '{"day": "2024-02-29", "color": "blue", "guest": null, "kind": "long", '
    '"place": {"x": 1, "y": 2}}'
)


def _case(*case, id):  # noqa: A002 - pytest's word
    return pytest.param(case, id=id)


KINDS = [
    _case(Point, '{"x": 1, "y": 2}', Point(x=1, y=2), id="pydantic"),
    _case(FirstPoint, '{"x": 1, "y": 2}', FirstPoint(x=1, y=2), id="pydantic-v1"),
    _case(PointDict, '{"x": 1, "y": 2}', {"x": 1, "y": 2}, id="typed-dict"),
    _case(POINT_SCHEMA, '{"x": 1, "y": 2}', {"x": 1, "y": 2}, id="dict"),
    _case({"title": "P", **POINT_SCHEMA}, '{"x": 1, "y": 2}', {"x": 1, "y": 2}, id="titled"),
    _case(POINT_TOOL, '{"x": 1, "y": 2}', {"x": 1, "y": 2}, id="tool"),
    _case(Color, '"blue"', Color.BLUE, id="enum"),
    _case(list[int], "[3, 4]", [3, 4], id="list"),
    _case({"type": "array", "items": {"type": "integer"}}, "[3, 4]", [3, 4], id="dict-of-array"),
    _case(
        Tree,
        '{"value": 1, "children": [{"value": 2, "children": []}]}',
        Tree(value=1, children=[Tree(value=2)]),
        id="recursive",
    ),
    _case(
        Visit,
        VISIT,
        Visit(
            day=dt.date(2024, 2, 29),
            color=Color.BLUE,
            guest=None,
            kind="long",
            place=Point(x=1, y=2),
        ),
        id="fields",
    ),
    _case(Literal["yes", "no"], '"no"', "no", id="literal"),
    _case(int | None, "null", None, id="optional"),
]
"""A schema, an answer that fits it, and what that is for the caller."""


@pytest.fixture(scope="module")
def corpus():
    loaded = wrap_model(*tiny_model("llama"), chat_template=TAGGED_TEMPLATE)
    with opened(loaded=loaded) as corpus:
        yield corpus


@pytest.fixture(params=[ChatPcRag, PcRagLLM])
def llm(request, corpus):
    return request.param(corpus=corpus, max_tokens=200)


@pytest.fixture
def chat(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=400)


@pytest.fixture(params=["invoke", "stream", "ainvoke", "astream"])
def ask(request):
    """One of the four ways to an answer; the last piece of a stream."""

    async def ask_by(structured, prompt="Where?"):
        if request.param == "invoke":
            return structured.invoke(prompt)
        if request.param == "ainvoke":
            return await structured.ainvoke(prompt)
        if request.param == "stream":
            return list(structured.stream(prompt))[-1]
        return [piece async for piece in structured.astream(prompt)][-1]

    return ask_by


@pytest.mark.parametrize("schema", [Point, PointDict, Point.model_json_schema()])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_answer_fits_the_schema_when_output_is_structured(corpus, schema, method):
    """Random weights cannot leave the schema, by invoke and by stream."""
    llm = ChatPcRag(corpus=corpus, max_tokens=300, temperature=2.0, seed=3)
    structured = llm.with_structured_output(schema, method=method)
    for answer in (structured.invoke("Where?"), list(structured.stream("Where?"))[-1]):
        found = answer.model_dump() if isinstance(answer, BaseModel) else answer
        assert set(found) == {"x", "y"}
        assert all(isinstance(value, int) for value in found.values())


@pytest.mark.parametrize("case", KINDS)
async def test_answer_is_what_the_schema_stands_for_when_it_is_of_any_kind(chat, corpus, ask, case):
    """Classes, types, dictionaries: by every way."""
    schema, written, expected = case
    with scripted(corpus.engine, written):
        assert await ask(chat.with_structured_output(schema)) == expected


async def test_text_fits_the_schema_when_the_string_model_is_structured(corpus, ask):
    """As with the chat model, by every way."""
    llm = PcRagLLM(corpus=corpus, max_tokens=200)
    with scripted(corpus.engine, '{"x": 1, "y": 2}'):
        assert await ask(llm.with_structured_output(Point)) == Point(x=1, y=2)


@pytest.mark.parametrize("schema", [Point, PointDict, POINT_SCHEMA, POINT_TOOL, FirstPoint, Tree])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_cut_answer_is_an_error_when_tokens_run_out(chat, ask, schema, method):
    """Never mended: half an object is no object, by whatever way."""
    structured = chat.with_structured_output(schema, method=method, max_tokens=9)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        await ask(structured)


@pytest.mark.parametrize("schema", [Point, PointDict])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_cut_answer_is_told_when_raw_ones_are_asked_for(chat, schema, method):
    """With the message as it was, and the error instead of a value."""
    structured = chat.with_structured_output(schema, method=method, include_raw=True, max_tokens=9)
    raw = structured.invoke("Where?")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParserException)
    assert raw["raw"].response_metadata["finish_reason"] == "length"


def test_cut_text_is_an_error_when_the_string_model_runs_out_of_tokens(corpus):
    """As with the chat model."""
    structured = PcRagLLM(corpus=corpus, max_tokens=6).with_structured_output(Point)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        structured.invoke("Where?")
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        list(structured.stream("Where?"))


def test_answer_is_refused_when_it_does_not_fit_its_class(chat, corpus):
    """A rule that a JSON schema cannot say is held after the fact."""

    class Even(BaseModel):
        x: int

        @field_validator("x")
        @classmethod
        def _check(cls, value):
            if value % 2:
                message = "odd"
                raise ValueError(message)
            return value

    structured = chat.with_structured_output(Even)
    with scripted(corpus.engine, '{"x": 4}'):
        assert structured.invoke("Which?") == Even(x=4)
    with (
        scripted(corpus.engine, '{"x": 3}'),
        pytest.raises(OutputParserException, match=r"(?s)\{'x': 3\} does not fit.*odd"),
    ):
        structured.invoke("Which?")


def test_pieces_grow_when_plain_json_is_streamed(chat, corpus):
    """Nothing of a class is given out before it is whole."""
    with scripted(corpus.engine, '{"x": 1, "y": 2}'):
        plain = list(chat.with_structured_output(PointDict).stream("Where?"))
    with scripted(corpus.engine, '{"x": 1, "y": 2}'):
        whole = list(chat.with_structured_output(Point).stream("Where?"))
    assert plain == [{}, {"x": 1}, {"x": 1, "y": 2}]
    assert whole == [Point(x=1, y=2)]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_format_is_traced_when_output_is_structured(chat, method):
    """LangChain's tracers show the schema and the method of a structured call."""

    class Options(BaseCallbackHandler):
        def on_chat_model_start(self, serialized, messages, *, options, **_):
            self.seen = options

    handler = Options()
    chat.with_structured_output(Point, method=method).invoke("?", config={"callbacks": [handler]})
    told = handler.seen["ls_structured_output_format"]
    assert told["kwargs"] == {"method": method}
    assert (told["schema"]["title"], set(told["schema"]["properties"])) == ("Point", {"x", "y"})


def test_settings_are_bound_when_output_is_structured(llm):
    """Whatever a call takes, every call of it has; ``strict`` says nothing new."""
    structured = llm.with_structured_output(
        Point, include_raw=True, strict=True, template="map", max_tokens=150
    )
    engine = llm.host.engine
    before = _num_labelled(engine)
    with scripted(engine, '{"x": 1, "y": 2}'):
        assert structured.invoke("Where?")["parsed"] == Point(x=1, y=2)
    assert _num_labelled(engine) == before + 1


def _num_labelled(engine):
    groups = engine.stats.snapshot().groups
    return sum(group.num_requests for group in groups if group.template == "map")


def test_description_of_a_class_is_its_own_when_it_is_described():
    """What Pydantic says of a class, constraints and descriptions included."""
    described = json_schema_of(Point)
    assert described == Point.model_json_schema()
    assert described["properties"]["x"]["maximum"] == 9


def test_schema_is_refused_when_there_is_none_or_no_such_method(chat, corpus):
    """By name, with what would do."""
    text = PcRagLLM(corpus=corpus)
    with pytest.raises(ConfigError, match="method 'xml' is unknown"):
        chat.with_structured_output(Point, method="xml")
    with pytest.raises(ConfigError, match="needs a schema"):
        chat.with_structured_output()
    with pytest.raises(ConfigError, match="needs a chat model and a schema"):
        chat.with_structured_output(method="function_calling")
    with pytest.raises(ConfigError, match="needs a chat model and a schema"):
        text.with_structured_output(Point, method="function_calling")
    with pytest.raises(ConfigError, match="has no JSON schema"):
        chat.with_structured_output(threading.Lock)


def test_any_json_object_is_the_answer_when_a_call_asks_for_json(corpus):
    """JSON mode of a call, as OpenAI's clients ask for it."""
    llm = ChatPcRag(corpus=corpus, max_tokens=1500, temperature=3.0, seed=0)
    answer = llm.invoke("Say JSON.", response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.content), dict)


def test_any_json_object_is_the_answer_when_no_schema_is_given(chat, corpus):
    """JSON mode without a schema."""
    with scripted(corpus.engine, '{"a": [1]}'):
        assert chat.with_structured_output(method="json_mode").invoke("?") == {"a": [1]}


def test_response_format_is_refused_when_it_is_unknown(chat):
    """By name, with those that are known."""
    with pytest.raises(ConfigError, match="'yaml'"):
        chat.invoke("Hi", response_format={"type": "yaml"})


@pytest.mark.parametrize("schema", [Point, POINT_SCHEMA])
def test_agent_answers_in_its_format_when_the_template_knows_no_tools(schema):
    """The model's profile says that its output can be structured, so no tool has to stand in."""
    with opened() as plain:
        llm = ChatPcRag(corpus=plain, max_tokens=100)
        agent = create_agent(llm, tools=[], response_format=schema)
        with scripted(plain.engine, '{"x": 1, "y": 2}'):
            state = agent.invoke({"messages": [("user", "Where?")]})
    found = state["structured_response"]
    assert (found if isinstance(found, dict) else found.model_dump()) == {"x": 1, "y": 2}
