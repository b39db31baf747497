"""Answers that fit a class, with random weights that are held to it."""

from __future__ import annotations

import asyncio
import gc
from typing import Literal

import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.pc_rag import PcRagLLM
from pydantic import BaseModel, Field, field_validator

from pc_rag.errors import ConfigError, GenerationError, MissingDependencyError
from pc_rag.model.loading import wrap_model
from tests.support.corpora import CAT, DOG, opened, recorded
from tests.support.engines import scripted
from tests.support.llama_index_calls import heard, shown
from tests.support.tiny_models import tiny_model
from tests.support.tool_templates import TAGGED_TEMPLATE


class Point(BaseModel):
    """A place on a map."""

    x: int = Field(ge=0, le=9)
    y: int = Field(ge=0, le=9)


class Visit(BaseModel):
    """Who came, and to what."""

    guest: str | None
    kind: Literal["short", "long"]
    place: Point


class Even(BaseModel):
    """Has a rule that no JSON schema says."""

    x: int

    @field_validator("x")
    @classmethod
    def _check(cls, value):
        if value % 2:
            message = "odd"
            raise ValueError(message)
        return value


POINT = '{"x": 1, "y": 2}'
PROMPT = PromptTemplate("Where is {what}?")
WAYS = ("structured_predict", "stream_structured_predict")
WAYS += tuple(f"a{way}" for way in WAYS)


@pytest.fixture
def corpus():
    model, tokenizer = tiny_model("llama", max_position_embeddings=8192)
    loaded = wrap_model(model, tokenizer, chat_template=TAGGED_TEMPLATE)
    with opened(loaded=loaded) as corpus:
        corpus.add([CAT, DOG])
        yield corpus


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=300)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


async def predicted(llm, way, output_cls=Point, prompt=PROMPT, *, llm_kwargs=None, **arguments):
    """All the objects that one of the four ways gives."""
    arguments = arguments or {"what": "it"}
    begun = getattr(llm, way)(output_cls, prompt, llm_kwargs=llm_kwargs, **arguments)
    if way.startswith("a"):
        begun = await begun
    if "stream" not in way:
        return [begun]
    return [each async for each in begun] if way.startswith("a") else list(begun)


@pytest.mark.parametrize("output_cls", [Point, Visit])
async def test_answer_fits_the_class_when_it_is_predicted(corpus, way, output_cls):
    """Random weights cannot leave the schema; settings of the call reach the engine."""
    llm = PcRagLLM(corpus=corpus, max_tokens=9)
    settings = {"temperature": 2.0, "seed": 3, "max_tokens": 900, "stop": None}
    *_, found = await predicted(llm, way, output_cls, llm_kwargs=settings)
    assert type(found) is output_cls


async def test_fields_come_one_by_one_when_the_answer_is_streamed(corpus, llm):
    """Partial objects, then the whole one; the same by both streams."""
    for way in WAYS[1::2]:
        with scripted(corpus.engine, POINT):
            *partial, last = await predicted(llm, way)
        assert last == Point(x=1, y=2)
        seen = [(getattr(each, "x", None), getattr(each, "y", None)) for each in partial]
        assert seen[0] == (None, None)
        assert (1, None) in seen


async def test_cut_answer_is_an_error_when_tokens_run_out(llm, way):
    """By one that LlamaIndex does not swallow, and never mended."""
    with pytest.raises(GenerationError, match=r"(?s)ended by 'length'.*max_tokens") as caught:
        await predicted(llm, way, Visit, llm_kwargs={"max_tokens": 9})
    assert not isinstance(caught.value, ValueError)


async def test_answer_is_refused_when_it_breaks_a_rule_of_its_class(corpus, llm, way):
    """A rule that a schema cannot say is held after the fact."""
    with scripted(corpus.engine, '{"x": 4}'):
        assert (await predicted(llm, way, Even))[-1] == Even(x=4)
    with scripted(corpus.engine, '{"x": 3}'), pytest.raises(GenerationError, match="odd"):
        await predicted(llm, way, Even)


async def test_prompt_is_llama_indexs_when_an_answer_is_structured(corpus, way):
    """With the system prompt, the arguments and recognised chunks; no schema is written into it."""
    llm = PcRagLLM(corpus=corpus, max_tokens=300, system_prompt="Be exact.")
    template = ChatPromptTemplate.from_messages([("user", "Context: {context}\nWhere?")])
    with recorded(corpus.engine) as requests, scripted(corpus.engine, POINT), heard() as events:
        await predicted(llm, way, prompt=template, context=CAT)
    text = shown(corpus, requests[0])
    assert text.startswith("<|im_start|>system\nBe exact.<|im_end|>\n")
    assert f"Context: {CAT}\nWhere?<|im_end|>" in text
    (told,) = events.of("PromptCacheEvent")
    assert any(use.is_hit for use in told.request_metrics.modules)
    assert events.names[0] == "LLMStructuredPredictStartEvent"
    assert events.names[-1] == "LLMStructuredPredictEndEvent"


async def test_lists_are_joined_when_an_argument_is_one(corpus, llm, way):
    """As in plain prediction: chunks stand verbatim."""
    with recorded(corpus.engine) as requests, scripted(corpus.engine, POINT):
        await predicted(llm, way, what=[CAT, DOG])
    assert f"{CAT}\n{DOG}" in shown(corpus, requests[0])


async def test_words_about_tools_are_left_out_when_no_tool_is_used(corpus, llm, way):
    """LlamaIndex's own programs take them, so callers give them."""
    words = {"tool_choice": "required", "tool_required": True, "allow_parallel_tool_calls": False}
    with scripted(corpus.engine, POINT):
        assert (await predicted(llm, way, llm_kwargs=words))[-1] == Point(x=1, y=2)
    assert len(words) == 3


async def test_stream_is_closed_when_its_consumer_leaves(corpus, llm):
    """Pitfall 26: one request, cancelled."""
    with scripted(corpus.engine, POINT):
        stream = llm.stream_structured_predict(Point, PROMPT, what="it")
        next(stream)
        stream.close()
    assert corpus.engine.stats.snapshot().total.requests["cancelled"] == 1
    with scripted(corpus.engine, POINT):
        stream = await llm.astream_structured_predict(Point, PROMPT, what="it")
        await anext(stream)
        await stream.aclose()
        del stream
        gc.collect()
        for _ in range(5):  # LlamaIndex leaves ours to asyncio, which closes it in a task
            await asyncio.sleep(0)
    assert corpus.engine.stats.snapshot().total.requests["cancelled"] == 2


# --- StructuredLLM


@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat", "astream_chat"])
async def test_answer_is_an_object_when_the_model_is_a_structured_one(corpus, llm, way):
    """``as_structured_llm``: text and object, by every way that LlamaIndex has."""
    structured = llm.as_structured_llm(Point)
    with scripted(corpus.engine, POINT):
        begun = getattr(structured, way)([ChatMessage(content='Where? {"a": 1}')])
        if way == "achat":
            found = await begun
        elif way == "astream_chat":
            found = [each async for each in await begun][-1]
        else:
            found = begun if way == "chat" else list(begun)[-1]
    assert found.raw == Point(x=1, y=2)
    assert Point.model_validate_json(found.message.content) == Point(x=1, y=2)


async def test_completion_is_an_object_when_the_model_is_a_structured_one(corpus, llm):
    """Its ``complete`` is a chat."""
    structured = llm.as_structured_llm(Point)
    for ask in (structured.complete, structured.acomplete):
        with scripted(corpus.engine, POINT):
            found = ask("Where?")
            found = await found if ask == structured.acomplete else found
        assert found.raw == Point(x=1, y=2)


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize"])
def test_query_is_answered_by_an_object_when_the_engine_wants_one(corpus, llm, mode):
    """``output_cls`` of a query engine; a cut answer is an error, no empty response."""
    nodes = [TextNode(text=text) for text in (CAT, DOG)]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    engine = index.as_query_engine(
        llm=llm.as_structured_llm(Point), response_mode=mode, similarity_top_k=1
    )
    with scripted(corpus.engine, POINT):
        assert engine.query("Where?").response == Point(x=1, y=2)
    short = PcRagLLM(corpus=corpus, max_tokens=5).as_structured_llm(Point)
    engine = index.as_query_engine(llm=short, response_mode=mode, similarity_top_k=1)
    with pytest.raises(GenerationError, match="max_tokens"):
        engine.query("Where?")


# --- other modes, formats, refusals


async def test_tool_is_called_when_the_mode_says_so(corpus):
    """``pydantic_program_mode`` is LlamaIndex's: the class as a tool, forced by grammar."""
    llm = PcRagLLM(
        corpus=corpus, max_tokens=300, pydantic_program_mode=PydanticProgramMode.FUNCTION, seed=1
    )
    for way in ("structured_predict", "astructured_predict"):
        (found,) = await predicted(llm, way)
        assert isinstance(found, Point)


def test_text_is_parsed_when_the_mode_says_so(corpus):
    """The class is written into the prompt, as LlamaIndex does it for other models."""
    llm = PcRagLLM(corpus=corpus, max_tokens=300, pydantic_program_mode=PydanticProgramMode.LLM)
    with recorded(corpus.engine) as requests, scripted(corpus.engine, POINT):
        assert llm.structured_predict(Point, PROMPT, what="it") == Point(x=1, y=2)
    assert '"properties"' in shown(corpus, requests[0])


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_answer_is_json_when_a_call_wants_that_format(corpus, ask):
    """``response_format`` in OpenAI's words, by every way of calling."""
    llm = PcRagLLM(corpus=corpus, max_tokens=300, temperature=2.0, seed=3)
    schema = {"name": "point", "schema": Point.model_json_schema()}
    wanted = {"type": "json_schema", "json_schema": schema}
    prompt = "Where?" if ask == "complete" else [ChatMessage(content="Where?")]
    answer = getattr(llm, ask)(prompt, response_format=wanted)
    text = answer.text if ask == "complete" else answer.message.content
    assert Point.model_validate_json(text)
    plain = getattr(llm, ask)(prompt, response_format={"type": "text"}, max_tokens=3)
    assert plain.raw["usage"]["completion_tokens"] == 3


def test_format_and_forced_tool_are_refused_together(llm):
    """An answer cannot be held to both."""
    tool = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(ConfigError, match="tool_choice or a response format"):
        llm.chat(
            [ChatMessage(content="Hi")],
            tools=[tool],
            tool_choice="any",
            response_format={"type": "json_object"},
        )


async def test_extra_is_named_when_it_is_not_installed(llm, way, monkeypatch):
    """A cause that can be mended, not an empty response."""
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match="structured"):
        await predicted(llm, way)


async def test_fields_are_those_of_the_call_when_a_program_streams_it(corpus):
    """LlamaIndex's streaming programs find the call where they look for it."""
    llm = PcRagLLM(
        corpus=corpus, max_tokens=300, pydantic_program_mode=PydanticProgramMode.FUNCTION
    )
    for way in WAYS[1::2]:
        with scripted(corpus.engine, f'<call>\n{{"name": "Point", "arguments": {POINT}}}\n</call>'):
            *_, last = await predicted(llm, way)
        assert last == Point(x=1, y=2)


def test_query_is_answered_when_llama_index_filters_answers(corpus):
    """``structured_answer_filtering`` runs a program of its own: a tool, forced by grammar."""
    llm = PcRagLLM(corpus=corpus, max_tokens=900, temperature=2.0, seed=5)
    synthesizer = get_response_synthesizer(
        llm=llm, response_mode="refine", structured_answer_filtering=True
    )
    with heard() as events:
        str(synthesizer.synthesize("Where?", [NodeWithScore(node=TextNode(text=CAT))]))
    (told,) = events.of("PromptCacheEvent")
    assert told.finish_reason == "tool_calls"
