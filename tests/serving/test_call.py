"""Settings by the names that frameworks use, and what a call is held to."""

from __future__ import annotations

import pytest

from pc_rag.errors import ConfigError
from pc_rag.model.conversation import ChatMessage, Conversation, ToolSpec
from pc_rag.model.grammar import Grammar
from pc_rag.model.sampling import GenerationConfig
from pc_rag.serving import Call, ToolChoice, generation_config
from pc_rag.types import Role

TOOL = ToolSpec("clock", parameters={"type": "object", "properties": {"zone": {"type": "string"}}})
ASKED = Conversation((ChatMessage(Role.USER, "Hi"),), (TOOL,))


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "max_completion_tokens"])
def test_length_has_any_of_its_names_when_a_framework_sets_it(name):
    """Each library calls it otherwise."""
    assert generation_config({name: 3}).max_new_tokens == 3


def test_later_settings_win_when_both_say_something():
    """And nothing given leaves what was there."""
    config = generation_config(
        {"temperature": 0.5, "stop": "a", "seed": 1}, {"temperature": 0.7, "stop": None}
    )
    assert config == GenerationConfig(temperature=0.7, stop=("a",), seed=1)


@pytest.mark.parametrize("stop", ["a", ["a"], ("a",)])
def test_stop_is_one_string_or_several_when_it_is_given(stop):
    """Never a string taken for its letters."""
    assert generation_config({"stop": stop}).stop == ("a",)


def test_stop_is_refused_when_it_is_no_text():
    """By what was given."""
    with pytest.raises(ConfigError, match="stop is 5"):
        generation_config({"stop": 5})


def test_setting_is_refused_when_it_is_unknown():
    """With those that are known."""
    with pytest.raises(ConfigError, match=r"logprobs=True is not a setting.*temperature"):
        generation_config({"logprobs": True})


@pytest.mark.parametrize(
    ("response_format", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar.json()),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}},
            Grammar.json({"type": "string"}),
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object", "properties": {"x": {}}}},
            },
            Grammar.json(
                {"type": "object", "properties": {"x": {}}, "additionalProperties": False}
            ),
        ),
    ],
)
def test_answer_is_held_to_a_format_when_one_is_asked_for(response_format, grammar):
    """OpenAI's words for it; an object holds what its schema names."""
    assert generation_config({"response_format": response_format}).grammar == grammar


@pytest.mark.parametrize("given", ["json", {"type": "json_schema"}, {"type": "xml"}, {}])
def test_format_is_refused_when_it_says_nothing(given):
    """The message repeats it and tells the three forms."""
    with pytest.raises(ConfigError, match="response_format"):
        generation_config({"response_format": given})


@pytest.mark.parametrize("timeout", [0, -1.0, "3"])
def test_time_is_refused_when_it_is_not_positive(timeout):
    """No call could succeed."""
    with pytest.raises(ConfigError, match="timeout"):
        Call(prompt="Hi", timeout_seconds=timeout)


def test_tools_are_hidden_when_none_may_be_called():
    """The model neither sees nor calls them; the given conversation stays as it is."""
    call = Call(prompt=ASKED, tool_choice=ToolChoice.NONE)
    assert call.tools == ()
    assert call.shown_prompt() == Conversation(ASKED.messages)
    assert Call(prompt=ASKED).shown_prompt() is ASKED
    assert Call(prompt="Hi").tools == ()


@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_forced_call_is_refused_when_there_is_no_such_tool(tools):
    """The message names both."""
    asked = Conversation(ASKED.messages, tools)
    call = Call(prompt=asked, tool_choice=ToolChoice.ANY, tool_name="none")
    with pytest.raises(ConfigError, match="a call of 'none', but the tools given are"):
        call.held_config(None)


def test_forced_call_is_refused_when_another_grammar_is_given():
    """A reply cannot fit both."""
    call = Call(
        prompt=ASKED,
        tool_choice=ToolChoice.ANY,
        config=GenerationConfig(grammar=Grammar.choice(["a"])),
    )
    with pytest.raises(ConfigError, match="another grammar"):
        call.held_config(None)
