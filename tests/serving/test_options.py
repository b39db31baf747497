"""A call's settings under the names that frameworks give them."""

from __future__ import annotations

import pytest

from pc_rag.errors import ConfigError
from pc_rag.serving.call import ToolChoice
from pc_rag.serving.options import CallDefaults, check_lent, is_no_op, tool_choice_of

NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (ToolChoice.AUTO, None)),
        (False, (ToolChoice.AUTO, None)),
        ("auto", (ToolChoice.AUTO, None)),
        (True, (ToolChoice.ANY, None)),
        ("required", (ToolChoice.ANY, None)),
        ("none", (ToolChoice.NONE, None)),
        ("weather", (ToolChoice.ANY, "weather")),
        (NAMED, (ToolChoice.ANY, "weather")),
        ({"name": "weather"}, (ToolChoice.ANY, "weather")),
    ],
    ids=str,
)
def test_choice_is_said_in_our_words_when_a_framework_names_it(choice, expected):
    """Every form that frameworks and hosted models have."""
    assert tool_choice_of(choice) == expected


@pytest.mark.parametrize(
    "choice", [{"function": "weather"}, {"function": ["weather"]}, {}, "", 3, {"name": 3}], ids=str
)
def test_choice_is_refused_when_it_is_none_of_the_forms(choice):
    """By an error of ours that names the forms, whatever stands where the name should."""
    with pytest.raises(ConfigError, match="tool_choice"):
        tool_choice_of(choice)


def test_settings_of_others_are_passed_over_only_when_they_change_nothing():
    """One answer is what a call gives; two are not."""
    assert is_no_op("n", 1)
    assert is_no_op("n", None)
    assert not is_no_op("n", 2)
    assert not is_no_op("max_tokens", 1)


def test_defaults_are_refused_when_a_setting_is_unknown():
    """When the model object is made, not at its first call."""
    CallDefaults(generation={"max_tokens": 3, "top_k": None})
    with pytest.raises(ConfigError, match="max_token"):
        CallDefaults(generation={"max_token": 3})


@pytest.mark.parametrize(
    ("lent", "own"), [(("corpus", "engine"), ()), (("corpus",), ("model", "store"))]
)
def test_model_object_is_refused_when_it_is_told_twice_what_it_runs_on(lent, own):
    """What was lent decides all that the others would."""
    with pytest.raises(ConfigError, match="Chat: give one of"):
        check_lent("Chat", lent=lent, own=own)
    check_lent("Chat", lent=lent[:1], own=())
    check_lent("Chat", lent=(), own=own)
