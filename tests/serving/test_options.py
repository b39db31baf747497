"""A call's settings under the names that frameworks give them."""

from __future__ import annotations

import pytest

from pc_rag.errors import ConfigError
from pc_rag.model.conversation import ChatMessage
from pc_rag.serving import CallDefaults, ToolChoice, begin_call, open_host, tool_choice_of
from pc_rag.serving.options import check_lent, is_no_op
from pc_rag.types import MissReason, Role
from tests.support.corpora import CAT
from tests.support.engines import scripted

PROMPT = [ChatMessage(Role.USER, f"Use this: {CAT} Who sat?")]


@pytest.fixture
def host(corpus):
    return open_host(corpus)


def reply_of(host, given=None, **defaults):
    return begin_call(host, PROMPT, given or {}, CallDefaults(**defaults)).run()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "abc"),
        ({"max_tokens": None}, "abc"),
        ({"max_tokens": 2}, "ab"),
        ({"max_new_tokens": 2}, "ab"),
        ({"max_completion_tokens": 1}, "a"),
        ({"max_tokens": 5, "stop": "c"}, "ab"),
        ({"max_tokens": 5, "stop_sequences": ["b"]}, "a"),
    ],
    ids=str,
)
def test_setting_is_the_calls_when_it_gives_one(host, corpus, given, text):
    """Under any of its names; ``None`` is as if it were not there, and nothing is modified."""
    before = dict(given)
    with scripted(corpus.engine, "abcdefgh"):
        assert reply_of(host, given, generation={"max_tokens": 3, "stop": None}).text == text
    assert given == before


def test_default_holds_when_the_call_says_nothing(host):
    """Label, arm and time; the call's own win."""
    defaults = {"template": "mail", "reuse": False, "generation": {"max_tokens": 1}}
    own = reply_of(host, **defaults).completion.metrics
    assert own.template == "mail"
    assert own.modules[0].miss_reason is MissReason.REUSE_OFF
    other = reply_of(host, {"template": "chat", "reuse": True}, **defaults).completion.metrics
    assert other.template == "chat"
    assert other.modules[0].is_hit


@pytest.mark.parametrize(
    "defaults",
    [
        {"generation": {"temprature": 1}},
        {"generation": {"temperature": -1}},
        {"generation": {"stop": [""]}},
        {"timeout_seconds": 0},
    ],
    ids=str,
)
def test_defaults_are_refused_when_they_make_no_sense(defaults):
    """Before any call."""
    with pytest.raises(ConfigError):
        CallDefaults(**defaults)


@pytest.mark.parametrize("given", [{"temprature": 1}, {"n": 2}, {"logprobs": True}], ids=str)
def test_call_is_refused_when_a_setting_is_unknown(host, given):
    """By its name, with the names there are."""
    with pytest.raises(ConfigError, match=r"is not a setting .*max_tokens.*tool_choice"):
        reply_of(host, given)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (ToolChoice.AUTO, None)),
        (False, (ToolChoice.AUTO, None)),
        ("auto", (ToolChoice.AUTO, None)),
        (True, (ToolChoice.ANY, None)),
        ("any", (ToolChoice.ANY, None)),
        ("required", (ToolChoice.ANY, None)),
        ("none", (ToolChoice.NONE, None)),
        ("clock", (ToolChoice.ANY, "clock")),
        ({"type": "function", "function": {"name": "clock"}}, (ToolChoice.ANY, "clock")),
        ({"name": "clock"}, (ToolChoice.ANY, "clock")),
    ],
    ids=str,
)
def test_choice_is_understood_when_a_framework_words_it(choice, expected):
    """In OpenAI's words and in LangChain's."""
    assert tool_choice_of(choice) == expected


@pytest.mark.parametrize(
    "choice",
    [3, "", {}, {"type": "function"}, {"function": "clock"}, {"function": {"name": 3}}, ["any"]],
    ids=str,
)
def test_choice_is_refused_when_it_is_none_of_these(choice):
    """By an error that lists them; no ``AttributeError`` escapes."""
    with pytest.raises(ConfigError, match="use 'auto', 'any', 'none'"):
        tool_choice_of(choice)


@pytest.mark.parametrize("name", ["n", "logprobs", "presence_penalty", "stream_usage"])
def test_setting_is_a_no_op_only_at_its_neutral_value(name):
    """Other values, and other names, are no no-ops."""
    neutral = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "stream_usage": True}[name]
    assert is_no_op(name, neutral)
    assert is_no_op(name, None)
    assert not is_no_op(name, 7)
    assert not is_no_op("temperature", neutral)


def test_model_is_told_once_what_it_runs_on():
    """A lent corpus or engine, or settings to open one; never two of them."""
    check_lent("M", lent=[], own=["store", "dtype"])
    check_lent("M", lent=["corpus"], own=[])
    for lent, own in ((["engine", "corpus"], []), (["corpus"], ["store"])):
        with pytest.raises(ConfigError, match=r"M: give one of .*; got corpus, "):
            check_lent("M", lent=lent, own=own)
