"""Tools, with a model whose output is forced."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_pc_rag import ChatPcRag

from pc_rag.errors import ConfigError, UnsupportedModelError
from pc_rag.model.loading import wrap_model
from tests.support.corpora import CAT, TEXTS, opened, recorded
from tests.support.engines import scripted
from tests.support.langchain_calls import prompt_text, summed
from tests.support.tiny_models import tiny_model
from tests.support.tool_templates import BARE_TEMPLATE, TAGGED_TEMPLATE, XML_TEMPLATE

CALL = '<call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</call>'


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


@tool
def clock(zone: Literal["utc", "cet"]) -> str:
    """Tell the time."""
    return zone


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


def test_nothing_of_a_call_is_streamed_as_text_when_the_model_writes_one(corpus, llm):
    """Calls come whole, with the last piece."""
    with scripted(corpus.engine, f"Let me look.\n{CALL}"):
        *pieces, last = llm.bind_tools([weather]).stream("How is Oslo?")
    assert "".join(piece.content for piece in pieces).strip() == "Let me look."
    assert not any("<" in piece.content or piece.tool_call_chunks for piece in pieces)
    assert [chunk["name"] for chunk in last.tool_call_chunks] == ["weather"]


BROKEN = '<call>\n{"name": "weather", "arguments": {"city": "Oslo\n</call>'
"""Mending its JSON would give a call that the model did not make."""
CUT = '<call>\n{"name": "weather", "arguments": {"city": "Oslo"'
UNKNOWN = CALL.replace("weather", "snow")
MISFIT = CALL.replace("city", "town")


@pytest.mark.parametrize(
    ("written", "num_valid", "num_invalid"),
    [
        (CALL, 1, 0),
        (f"{CALL}\n{CALL.replace('Oslo', 'Lima')}\n{CALL}", 3, 0),
        (BROKEN, 0, 1),
        (CUT, 0, 1),
        (UNKNOWN, 0, 1),
        (f"{CALL}\n{MISFIT}\n{CALL}\n{UNKNOWN}", 2, 2),
        (f"{CALL}\n{CUT}", 1, 1),
    ],
)
def test_summed_stream_agrees_with_invoke_when_calls_are_valid_or_not(
    corpus, llm, written, num_valid, num_invalid
):
    """An invalid call is never mended into a valid one, and its reason stands with the answer."""
    bound = llm.bind_tools([weather])
    with scripted(corpus.engine, written):
        invoked = bound.invoke("Oslo?", max_tokens=400)
    with scripted(corpus.engine, written):
        pieces = list(bound.stream("Oslo?", max_tokens=400))
    streamed = summed(pieces)
    num_calls = num_valid + num_invalid
    assert [chunk["index"] for chunk in pieces[-1].tool_call_chunks] == list(range(num_calls))
    for answer in (invoked, streamed):
        ids = [call["id"] for call in answer.tool_calls]
        assert all(ids)
        assert len(set(ids)) == num_valid
    calls = [(call["name"], call["args"]) for call in streamed.tool_calls]
    assert calls == [(call["name"], call["args"]) for call in invoked.tool_calls]
    assert len(invoked.invalid_tool_calls) == num_invalid
    raws = [call["args"] for call in invoked.invalid_tool_calls]
    assert [json.loads(call["args"]) for call in streamed.invalid_tool_calls] == raws
    reasons = [
        {"args": call["args"], "error": call["error"]} for call in invoked.invalid_tool_calls
    ]
    assert all(reason["error"] for reason in reasons)
    for answer in (invoked, streamed):
        assert answer.response_metadata.get("invalid_tool_calls", []) == reasons
        assert answer.content == ""


@pytest.mark.parametrize("way", ["invoke", "stream"])
@pytest.mark.parametrize("written", [BROKEN, UNKNOWN])
def test_model_sees_what_it_wrote_when_its_call_was_invalid(corpus, llm, way, written):
    """Else it could not do better in its next turn."""
    bound = llm.bind_tools([weather])
    with scripted(corpus.engine, f"Look:\n{written}"):
        answer = bound.invoke("Oslo?") if way == "invoke" else summed(bound.stream("Oslo?"))
    messages = [HumanMessage("Oslo?"), answer, HumanMessage("That failed. Try again.")]
    (invalid,) = answer.response_metadata["invalid_tool_calls"]
    shown = prompt_text(corpus, lambda: bound.invoke(messages, max_tokens=1))
    turn = shown.split("<|im_start|>assistant\n")[1].partition("<|im_end|>")[0]
    assert turn.startswith("Look:\n")
    assert invalid["args"] in turn


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


@pytest.mark.parametrize("choice", [None, "any"])
def test_tools_are_refused_when_the_template_writes_calls_otherwise(choice):
    """Calls that cannot be read would stand in the answer as text, and none would be forced."""
    with corpus_with(XML_TEMPLATE) as corpus:
        llm = ChatPcRag(corpus=corpus, max_tokens=4).bind_tools([weather], tool_choice=choice)
        with pytest.raises(UnsupportedModelError, match="otherwise than as JSON"):
            llm.invoke("Hi")


def test_tools_are_refused_when_the_template_knows_none():
    """The error names the capability that is missing."""
    with opened() as corpus, pytest.raises(UnsupportedModelError) as caught:
        ChatPcRag(corpus=corpus).bind_tools([weather]).invoke("Hi")
    assert caught.value.capability == "tools"
