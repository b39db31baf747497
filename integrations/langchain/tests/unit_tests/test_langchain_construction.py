"""How a model is built: names, values, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage
from langchain_pc_rag import ChatPcRag, PcRagLLM

from pc_rag.config import EngineConfig
from pc_rag.errors import ConfigError, GenerationTimeoutError
from pc_rag.serving import HostSettings
from tests.support.engines import scripted
from tests.support.langchain_calls import prompt_text, text_of


@pytest.fixture
def llm(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=8)


@pytest.fixture(params=[ChatPcRag, PcRagLLM])
def kind(request):
    return request.param


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


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"model_name": "a-model"}, "model", "a-model"),
        ({"model": Path("folder") / "m"}, "model", str(Path("folder") / "m")),
        ({"model_name": Path("m")}, "model", "m"),
        ({"store": Path("kv")}, "store", "kv"),
        ({"max_new_tokens": 3}, "max_tokens", 3),
        ({"max_completion_tokens": 3}, "max_tokens", 3),
        ({"stop": "x"}, "stop", ["x"]),
        ({"stop_sequences": ["x", "y"]}, "stop", ["x", "y"]),
        ({"stop_sequences": "x"}, "stop", ["x"]),
    ],
)
def test_setting_is_ours_when_another_library_calls_it_otherwise(kind, given, name, value):
    """Names and forms of other models' constructors."""
    assert getattr(kind(**given), name) == value


NO_OPS = [
    {"n": 1},
    {"n": None},
    {"logprobs": False},
    {"logprobs": None},
    {"presence_penalty": 0},
    {"frequency_penalty": 0.0},
    {"stream_usage": True},
]
REFUSED = [
    {"n": 2},
    {"logprobs": True},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 1},
    {"stream_usage": False},
]


@pytest.mark.parametrize("setting", NO_OPS, ids=str)
def test_setting_is_taken_when_it_changes_nothing(kind, corpus, setting):
    """By the constructor and by a call: a changed line may leave the others as they are."""
    llm = kind(corpus=corpus, max_tokens=2, **setting)
    assert llm.invoke("Hi", **setting) is not None


@pytest.mark.parametrize("setting", REFUSED, ids=str)
def test_setting_is_refused_when_it_would_change_something(kind, corpus, setting):
    """It is not ignored in silence."""
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        kind(corpus=corpus, **setting)
    with pytest.raises(ConfigError, match=f"{name}=.* is not a setting"):
        kind(corpus=corpus).invoke("Hi", **setting)


@pytest.mark.parametrize(
    "setting",
    [{"strict": True}, {"stream": True}, {"ls_structured_output_format": {}}],
    ids=str,
)
def test_word_is_ignored_when_frameworks_add_it_to_calls(corpus, setting):
    """Agents bind ``strict``, clients send ``stream``, tracers name formats."""
    assert PcRagLLM(corpus=corpus, max_tokens=2).invoke("Hi", **setting) != ""
    assert ChatPcRag(corpus=corpus, max_tokens=2)._generate([HumanMessage("Hi")], **setting)


@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
def test_stop_is_the_calls_when_it_has_either_name(kind, corpus, name):
    """By a call's own words, also as one string."""
    llm = kind(corpus=corpus)
    for stop in ("c", ["c"]):
        with scripted(corpus.engine, "abcd"):
            assert text_of(llm.bind(**{name: stop}).invoke("Hi")) == "ab"


@pytest.mark.parametrize("how", ["constructor", "call"])
@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_call_fails_when_its_time_is_over(kind, corpus, how, way):
    """The error says how long was allowed, and the next call works."""
    llm = kind(corpus=corpus, max_tokens=4, timeout=1e-9 if how == "constructor" else 100)
    settings = {"timeout": 1e-9} if how == "call" else {}
    with pytest.raises(GenerationTimeoutError, match="timeout of 1e-09 s"):
        list(getattr(llm, way)("Hi", **settings))
    assert llm.invoke("Hi", timeout=100) is not None


@pytest.mark.parametrize("name", ["model", "store", "model_name"])
def test_name_is_refused_when_it_is_empty(kind, name):
    """An unset variable of a shell script is no model."""
    with pytest.raises(ConfigError, match="is empty"):
        kind(**{name: ""})


def test_host_is_opened_with_every_setting_when_they_are_given(kind, tmp_path):
    """None of them is lost on the way."""
    config = EngineConfig(repair="link:2")
    llm = kind(
        model="m",
        store=str(tmp_path),
        dtype="float16",
        device="cpu",
        chat_template="{{ x }}",
        max_position=512,
        engine_config=config,
    )
    assert llm.host.settings == HostSettings(
        model="m",
        store=str(tmp_path),
        dtype="float16",
        device="cpu",
        chat_template="{{ x }}",
        max_position=512,
        config=config,
    )


def test_capacities_are_the_variables_when_none_are_given(kind, monkeypatch):
    """``PC_RAG_*`` are honoured; a configuration that is given wins, and a bad one is refused."""
    monkeypatch.setenv("PC_RAG_REPAIR", "link:3")
    monkeypatch.setenv("PC_RAG_CHUNK_TOKENS", "77")
    config = kind(model="m").host.settings.config
    assert (config.repair, config.chunk_tokens) == ("link:3", 77)
    own = EngineConfig(repair="link:1")
    assert kind(model="m", engine_config=own).host.settings.config == own
    monkeypatch.setenv("PC_RAG_REPAIR", "glue")
    with pytest.raises(ConfigError, match="PC_RAG_REPAIR"):
        kind(model="m")


def test_chat_template_is_the_given_one_when_a_folder_has_its_own(tiny_folder):
    """It takes the place of the model's."""
    template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
    with ChatPcRag(model=str(tiny_folder), chat_template=template, max_tokens=1) as llm:
        corpus = llm.open_corpus()
        assert prompt_text(corpus, lambda: llm.invoke("Hi")) == "[user]Hi"


def test_traces_name_us_when_they_ask(kind, corpus):
    """Provider, model, stops: a call's, else the object's."""
    llm = kind(corpus=corpus, stop=["x"], temperature=0.5, max_tokens=7)
    params = llm._get_ls_params()
    assert params["ls_provider"] == "pc-rag"
    assert params["ls_model_name"] == corpus.engine.loaded.name
    assert (params["ls_temperature"], params["ls_max_tokens"]) == (0.5, 7)
    assert params["ls_stop"] == ["x"]
    assert llm._get_ls_params(stop=["y"])["ls_stop"] == ["y"]


def test_tokens_are_counted_otherwise_when_a_function_is_given(kind, corpus):
    """LangChain's own hook is kept."""
    llm = kind(corpus=corpus, custom_get_token_ids=lambda text: [7] * len(text.split()))
    assert llm.get_token_ids("two words") == [7, 7]
    assert llm.get_num_tokens("two words") == 2
    assert kind(corpus=corpus).get_token_ids("abc") == [97, 98, 99]
