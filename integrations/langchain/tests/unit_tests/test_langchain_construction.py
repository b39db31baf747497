"""How a model is built: names, values, and what is refused."""

from __future__ import annotations

import pytest
from langchain_pc_rag import ChatPcRag

from pc_rag.errors import ConfigError


@pytest.fixture
def llm(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=8)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"store": "x"}, "give one of corpus, engine, or a model name"),
        ({"model": "other"}, "is not the model that was given"),
        ({"temperature": -1}, "temperature must be"),
        ({"stop": [""]}, "stop strings must be non-empty"),
        ({"engine": object()}, "engine"),
    ],
)
def test_settings_are_refused_when_they_make_no_sense(corpus, settings, named):
    """At construction, before a model is loaded."""
    with pytest.raises((ConfigError, ValueError), match=named):
        ChatPcRag(corpus=corpus, **settings)


def test_setting_is_refused_when_its_name_is_misspelt(corpus, llm):
    """Neither the constructor nor a call ignores what it does not know."""
    with pytest.raises(ValueError, match="temprature"):
        ChatPcRag(corpus=corpus, temprature=1)
    with pytest.raises(ConfigError, match="temprature=1 is not a setting"):
        llm.invoke("Hi", temprature=1)
