"""Tools: calls that are read, forced and refused, and LlamaIndex's agents on top of them."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.react.output_parser import ReActOutputParser
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.agent.workflow.workflow_events import ToolCallResult
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.pc_rag import PcRagLLM
from pydantic import BaseModel

from pc_rag.errors import ConfigError, GenerationError, UnsupportedModelError
from pc_rag.model.loading import wrap_model
from tests.support.corpora import CAT, opened, recorded
from tests.support.engines import scripted
from tests.support.llama_index_calls import heard, shown
from tests.support.tiny_models import tiny_model
from tests.support.tool_templates import (
    BARE_TEMPLATE,
    DEAF_TEMPLATE,
    TAGGED_TEMPLATE,
    XML_TEMPLATE,
)

CALL = '<call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</call>'


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def clock(zone: str) -> str:
    """Tell the time."""
    return f"noon in {zone}"


class ClockArguments(BaseModel):
    """Of which zone."""

    zone: Literal["utc", "cet"]


WEATHER = FunctionTool.from_defaults(weather)
CLOCK = FunctionTool.from_defaults(clock, fn_schema=ClockArguments)


def corpus_with(template):
    model, tokenizer = tiny_model("llama", max_position_embeddings=8192)
    return opened(
        loaded=wrap_model(model, tokenizer, chat_template=template), prefix_cache_bytes=1 << 26
    )


@pytest.fixture
def corpus():
    with corpus_with(TAGGED_TEMPLATE) as corpus:
        corpus.add([CAT])
        yield corpus


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=300)


SYNC, ASYNC = "chat_with_tools", "achat_with_tools"
WITH_TOOLS = (SYNC, ASYNC, f"stream_{SYNC}", "astream_chat_with_tools")


async def asked(llm, way, tools, message="How is Oslo?", **options):
    """All the responses of one of the four ways to ask with tools."""
    begun = getattr(llm, way)(tools, user_msg=message, **options)
    if way.startswith("a"):
        begun = await begun
    if "stream" not in way:
        return [begun]
    return [piece async for piece in begun] if way.startswith("a") else list(begun)


@pytest.fixture(params=WITH_TOOLS)
def way(request):
    return request.param


def calls_of(llm, response, **options):
    found = llm.get_tool_calls_from_response(response, **options)
    return [(call.tool_name, call.tool_kwargs) for call in found]


async def test_call_is_read_when_the_model_writes_one(corpus, llm, way):
    """Text before it stays text; the call has a name, arguments and an id of its own."""
    with recorded(corpus.engine) as requests, scripted(corpus.engine, f"Let me look.\n{CALL}"):
        said = await asked(llm, way, [WEATHER, CLOCK])
    last = said[-1]
    assert calls_of(llm, last) == [("weather", {"city": "Oslo"})]
    (block,) = [b for b in last.message.blocks if isinstance(b, ToolCallBlock)]
    assert block.tool_call_id.startswith("call_")
    assert last.message.content.strip() == "Let me look."
    assert last.raw["finish_reason"] == "tool_calls"
    assert "Tell the weather of a city." in shown(corpus, requests[0])
    for piece in said[:-1]:
        assert "<" not in piece.message.content
        assert calls_of(llm, piece, error_on_no_tool_call=False) == []
    if "stream" in way:
        assert "".join(piece.delta for piece in said) == last.message.content


async def test_model_calls_a_tool_when_it_must(way):
    """Random weights, and still a call that fits its tool: it is held to the schema."""
    for template in (TAGGED_TEMPLATE, BARE_TEMPLATE):
        with corpus_with(template) as corpus:
            llm = PcRagLLM(corpus=corpus, max_tokens=900, temperature=2.0, seed=1)
            *_, last = await asked(llm, way, [CLOCK], tool_required=True)
            ((name, arguments),) = calls_of(llm, last)
            assert name == "clock"
            assert arguments["zone"] in {"utc", "cet"}
            assert not last.message.content


@pytest.mark.parametrize("choice", ["clock", {"type": "function", "function": {"name": "clock"}}])
async def test_named_tool_is_called_when_a_call_chooses_it(llm, way, choice):
    """``tool_choice`` of a call wins over the model's wish."""
    *_, last = await asked(llm, way, [WEATHER, CLOCK], tool_choice=choice)
    ((name, _),) = calls_of(llm, last)
    assert name == "clock"


async def test_second_call_is_refused_when_only_one_is_allowed(corpus, llm, way):
    """``allow_parallel_tool_calls`` is LlamaIndex's word; one call is its default."""
    for allowed, num_calls in ((True, 2), (False, 1)):
        with scripted(corpus.engine, f"{CALL}\n{CALL}"):
            *_, last = await asked(llm, way, [WEATHER], allow_parallel_tool_calls=allowed)
        assert calls_of(llm, last) == [("weather", {"city": "Oslo"})] * num_calls
        ids = {call.tool_id for call in llm.get_tool_calls_from_response(last)}
        assert len(ids) == num_calls
        assert not last.message.content
    (refused,) = last.raw["invalid_tool_calls"]
    assert "may hold 1 calls" in refused["error"]


UNKNOWN = CALL.replace("weather", "snow")
BROKEN = '<call>\n{"name": "weather", "arguments": {"city": "Oslo\n</call>'


@pytest.mark.parametrize(
    ("written", "named"),
    [(UNKNOWN, "snow"), (CALL.replace("city", "town"), "city"), (BROKEN, ""), (CALL[:40], "")],
    ids=["unknown", "misfit", "broken", "cut"],
)
async def test_text_stays_when_a_call_is_none(corpus, llm, way, written, named):
    """What the model wrote is the answer, with the reason; the next turn shows it to the model."""
    with scripted(corpus.engine, f"Look:\n{written}"):
        said = await asked(llm, way, [WEATHER])
    last = said[-1]
    (invalid,) = last.raw["invalid_tool_calls"]
    json.dumps(last.raw)
    assert last.message.content.startswith("Look:")
    assert last.message.content.endswith(invalid["args"])
    assert invalid["args"].strip()
    if "stream" in way:
        assert "".join(piece.delta for piece in said) == last.message.content
    assert calls_of(llm, last, error_on_no_tool_call=False) == []
    with pytest.raises(GenerationError, match="called no tool") as caught:
        llm.get_tool_calls_from_response(last)
    assert named in str(caught.value)
    assert invalid["error"] in str(caught.value)
    history = [ChatMessage(content="Oslo?"), last.message, ChatMessage(content="Again.")]
    with recorded(corpus.engine) as requests:
        llm.chat(history, max_tokens=1)
    assert invalid["args"] in shown(corpus, requests[0])


@pytest.mark.parametrize("options", [{}, {"tool_required": True}, {"tool_choice": "auto"}], ids=str)
async def test_model_answers_when_there_is_no_tool(corpus, llm, way, options):
    """An empty list is no tool: nothing is shown, and nothing can be required."""
    with scripted(corpus.engine, "Fine."):
        *_, last = await asked(llm, way, [], **options)
    assert last.message.content == "Fine."


async def test_choice_is_refused_when_there_is_no_such_tool(llm, way):
    """By name, with the tools there are."""
    with pytest.raises(ConfigError, match="the tools given are 'weather'"):
        await asked(llm, way, [WEATHER], tool_choice="snow")


async def test_conversation_goes_before_the_message_when_both_are_given(corpus, llm, way):
    """History, then the question, as text or as a message."""
    history = [ChatMessage(role="system", content="Be kind."), ChatMessage(content="Hello.")]
    for message in ("How?", ChatMessage(content="How?")):
        with recorded(corpus.engine) as requests, scripted(corpus.engine, "Fine."):
            await asked(llm, way, [WEATHER], message, chat_history=history)
        text = shown(corpus, requests[0])
        assert text.index("Be kind.") < text.index("Hello.\n\nHow?")
    assert len(history) == 2


def test_round_is_complete_when_call_and_answer_come_back(corpus, llm):
    """The response's own message, then the tool's: the template shows both."""
    with scripted(corpus.engine, CALL):
        response = llm.chat_with_tools([WEATHER], user_msg="Oslo?")
    (call,) = llm.get_tool_calls_from_response(response)
    history = [
        ChatMessage(content="Oslo?"),
        response.message,
        ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id}),
    ]
    with recorded(corpus.engine) as requests, scripted(corpus.engine, "It is sunny."):
        answer = llm.chat_with_tools([WEATHER], chat_history=history)
    assert f"{CALL}<|im_end|>" in shown(corpus, requests[0])
    assert "<result>\nsunny\n</result>" in shown(corpus, requests[0])
    assert answer.message.content == "It is sunny."


async def test_tool_is_run_when_the_model_calls_it(corpus, llm):
    """``predict_and_call`` and its twin give the tool's output."""
    with scripted(corpus.engine, CALL):
        assert llm.predict_and_call([WEATHER], user_msg="Oslo?").response == "sunny in Oslo"
    with scripted(corpus.engine, CALL):
        found = await llm.apredict_and_call([WEATHER], user_msg="Oslo?")
    assert found.response == "sunny in Oslo"
    with scripted(corpus.engine, "No."), pytest.raises(GenerationError, match=r"said 'No\.'"):
        llm.predict_and_call([WEATHER], user_msg="Oslo?")
    with scripted(corpus.engine, "No."):
        found = llm.predict_and_call([WEATHER], user_msg="Oslo?", error_on_no_tool_call=False)
    assert found.response == "No."


# --- templates without tools


@pytest.mark.parametrize("template", [DEAF_TEMPLATE, XML_TEMPLATE], ids=["deaf", "xml"])
async def test_tools_are_refused_when_the_template_does_not_know_them(template, way):
    """The metadata say so, and a call that tries is told what is missing."""
    with corpus_with(template) as corpus:
        llm = PcRagLLM(corpus=corpus, max_tokens=4)
        assert not llm.metadata.is_function_calling_model
        with pytest.raises(UnsupportedModelError) as caught:
            await asked(llm, way, [WEATHER])
    assert caught.value.capability.startswith("tools")


THOUGHT = 'Thought: I need a tool.\nAction: weather\nAction Input: {"city": "Oslo"}'
ANSWER = "Thought: I can answer.\nAnswer: It is sunny."


@pytest.mark.parametrize("streaming", [True, False])
async def test_react_agent_answers_when_the_template_knows_no_tools(streaming):
    """It writes its tools into the prompt, and works with every model."""
    with corpus_with(DEAF_TEMPLATE) as corpus:
        llm = PcRagLLM(corpus=corpus, max_tokens=200)
        agent = ReActAgent(tools=[WEATHER], llm=llm, streaming=streaming)
        with recorded(corpus.engine) as requests, turns(corpus.engine, THOUGHT, ANSWER):
            response = await agent.run("How is Oslo?")
    assert str(response) == "It is sunny."
    assert "sunny in Oslo" in shown(corpus, requests[1])


def test_tool_is_run_by_text_when_the_template_knows_no_tools():
    """``predict_and_call`` falls back to LlamaIndex's own way."""
    with corpus_with(DEAF_TEMPLATE) as corpus:
        llm = PcRagLLM(corpus=corpus, max_tokens=200)
        with scripted(corpus.engine, THOUGHT):
            found = llm.predict_and_call(
                [WEATHER],
                user_msg="Oslo?",
                react_chat_formatter=ReActChatFormatter(),
                output_parser=ReActOutputParser(),
            )
    assert found.response == "sunny in Oslo"


# --- agents


class turns:  # noqa: N801 - used as a context manager
    """Lets the model give several answers, one a request."""

    def __init__(self, engine, *texts):
        self._engine, self._texts = engine, list(texts)

    def __enter__(self):
        self._run = self._engine.run
        self._open = None

        def run(*args, **kwargs):
            self._close()
            self._open = scripted(self._engine, self._texts.pop(0))
            self._open.__enter__()
            return self._run(*args, **kwargs)

        self._engine.run = run
        return self

    def _close(self):
        if self._open is not None:
            self._open.__exit__(None, None, None)

    def __exit__(self, *_):
        self._close()
        self._engine.run = self._run


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
async def test_function_agent_answers_when_its_model_calls_a_tool(corpus, llm, streaming, parallel):
    """A whole run: question, call, tool, answer; each turn reuses what the turn before computed."""
    agent = FunctionAgent(
        tools=[WEATHER],
        llm=llm,
        system_prompt="You tell the weather.",
        streaming=streaming,
        allow_parallel_tool_calls=parallel,
    )
    with (
        recorded(corpus.engine) as requests,
        heard() as events,
        turns(corpus.engine, f"I look.\n{CALL}", "It is sunny."),
    ):
        handler = agent.run("How is Oslo?")
        streamed = [event async for event in handler.stream_events()]
        response = await handler
    assert str(response) == "It is sunny."
    (result,) = [event for event in streamed if isinstance(event, ToolCallResult)]
    assert result.tool_output.content == "sunny in Oslo"
    assert "<result>\nsunny in Oslo\n</result>" in shown(corpus, requests[1])
    assert "You tell the weather." in shown(corpus, requests[0])
    if streaming:
        deltas = [event.delta for event in streamed if isinstance(event, AgentStream)]
        assert "".join(deltas) == "I look.It is sunny."
    first, second = events.of("PromptCacheEvent")
    assert first.finish_reason == "tool_calls"
    assert second.request_metrics.num_cache_read_tokens >= first.metrics["prompt_tokens"] - 2
    assert response.raw["finish_reason"] == "stop"


async def test_function_agent_calls_first_what_it_is_told_to(corpus, llm):
    """``initial_tool_choice`` forces the first call by grammar, and only that."""
    agent = FunctionAgent(tools=[WEATHER, CLOCK], llm=llm, initial_tool_choice="clock")
    with recorded(corpus.engine) as requests:
        handler = agent.run("What time is it?", max_iterations=2, early_stopping_method="generate")
        results = [e async for e in handler.stream_events() if isinstance(e, ToolCallResult)]
        await handler
    assert results[0].tool_name == "clock"
    assert results[0].tool_output.content in {"noon in utc", "noon in cet"}
    assert len(requests) >= 2


async def test_workflow_runs_when_two_agents_hand_over(corpus, llm):
    """``AgentWorkflow`` with its own hand-over tool."""
    hand_over = json.dumps(
        {"name": "handoff", "arguments": {"to_agent": "teller", "reason": "weather"}}
    )
    greeter = FunctionAgent(
        name="greeter", description="Greets.", llm=llm, can_handoff_to=["teller"]
    )
    teller = FunctionAgent(name="teller", description="Tells.", llm=llm, tools=[WEATHER])
    workflow = AgentWorkflow(agents=[greeter, teller], root_agent="greeter")
    with turns(corpus.engine, f"<call>\n{hand_over}\n</call>", CALL, "Sunny."):
        response = await workflow.run("How is Oslo?")
    assert str(response) == "Sunny."
    assert response.current_agent_name == "teller"


async def test_workflow_picks_the_agent_that_the_model_can_run(llm):
    """Of plain functions: one that calls functions, or one that writes them."""
    workflow = AgentWorkflow.from_tools_or_functions([weather], llm=llm)
    assert type(next(iter(workflow.agents.values()))) is FunctionAgent
    with corpus_with(DEAF_TEMPLATE) as corpus:
        deaf = PcRagLLM(corpus=corpus)
        workflow = AgentWorkflow.from_tools_or_functions([weather], llm=deaf)
        assert type(next(iter(workflow.agents.values()))) is ReActAgent


async def test_agent_raises_when_the_model_fails(corpus, llm):
    """The model's error, not an empty answer."""
    agent = FunctionAgent(tools=[WEATHER], llm=llm)
    with scripted(corpus.engine, "abc", fail_at=1), pytest.raises(ZeroDivisionError):
        await agent.run("How is Oslo?")


async def test_agent_gives_an_object_when_it_is_asked_for_one(corpus, llm):
    """``output_cls`` of an agent: the run, and then an answer held to the class."""
    agent = FunctionAgent(tools=[WEATHER], llm=llm, output_cls=ClockArguments)
    with turns(corpus.engine, CALL, "It is sunny.", '{"zone": "utc"}'):
        response = await agent.run("How is Oslo, and in which zone?")
    assert response.get_pydantic_model(ClockArguments) == ClockArguments(zone="utc")
