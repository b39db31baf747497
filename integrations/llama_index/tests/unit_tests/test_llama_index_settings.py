"""How a model is built, and what LlamaIndex plans by."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.rate_limiter import BaseRateLimiter
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.types import BaseOutputParser
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.config import EngineConfig
from pc_rag.errors import ConfigError
from pc_rag.model.loading import wrap_model
from pc_rag.serving import HostSettings
from pc_rag.serving import host as hosts
from tests.support.corpora import opened, recorded, tiny_engine
from tests.support.engines import scripted
from tests.support.llama_index_calls import ask, shown
from tests.support.tiny_models import tiny_model, tiny_tokenizer
from tests.support.tool_templates import TAGGED_TEMPLATE


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


# --- names and values


@pytest.mark.parametrize(
    ("given_settings", "named"),
    [
        ({"store": "x"}, "give one of corpus, engine, or a model name"),
        ({"model": "other"}, "is not the model that was given"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop strings must be non-empty"),
        ({"stop": 5}, "stop"),
        ({"engine": object()}, "engine"),
        ({"temprature": 1}, "temprature"),
        ({"context_window": 0}, "context_window"),
        ({"n": 2}, "n is 2"),
        ({"timeout": -1}, "timeout is -1"),
        ({"messages_to_prompt": lambda messages: "x"}, "give chat_template"),
        ({"completion_to_prompt": lambda prompt: f"[INST]{prompt}"}, "give chat_template"),
        ({"query_wrapper_prompt": PromptTemplate("<|USER|>{query_str}")}, "query_wrapper_prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_settings_are_refused_when_they_make_no_sense(corpus, given_settings, named):
    """At construction, by an error of ours that is no ``ValueError``, which LlamaIndex swallows."""
    with pytest.raises(ConfigError, match=named) as caught:
        PcRagLLM(corpus=corpus, **given_settings)
    assert not isinstance(caught.value, ValueError)
    assert (
        "PcRagLLM" in str(caught.value)
        or "must be" in str(caught.value)
        or named in str(caught.value)
    )


@pytest.mark.parametrize(
    ("given_settings", "name", "value"),
    [
        ({"model_name": "a-model"}, "model", "a-model"),
        ({"model": Path("folder") / "m"}, "model", str(Path("folder") / "m")),
        ({"store": Path("kv")}, "store", "kv"),
        ({"max_new_tokens": 3}, "max_tokens", 3),
        ({"stop": "x"}, "stop", ["x"]),
        ({"stop_sequences": ["x", "y"]}, "stop", ["x", "y"]),
    ],
)
def test_setting_is_ours_when_another_library_calls_it_otherwise(given_settings, name, value):
    """Names and forms of other models' constructors."""
    assert getattr(PcRagLLM(**given_settings), name) == value


@pytest.mark.parametrize("name", ["model", "store", "model_name"])
def test_name_is_refused_when_it_is_empty(name):
    """An unset variable of a shell script is no model."""
    with pytest.raises(ConfigError, match="is empty"):
        PcRagLLM(**{name: ""})


def test_host_is_opened_with_every_setting_when_they_are_given(tmp_path, monkeypatch):
    """None of them is lost; variables hold where none is given, and a bad one is refused."""
    config = EngineConfig(repair="link:2")
    opened_with = {
        "model": "m",
        "store": str(tmp_path),
        "dtype": "float16",
        "device": "cpu",
        "chat_template": "{{ x }}",
        "max_position": 512,
    }
    llm = PcRagLLM(**opened_with, engine_config=config)
    assert llm.host.settings == HostSettings(**opened_with, config=config)
    monkeypatch.setenv("PC_RAG_STORE", "from-variable")
    monkeypatch.setenv("PC_RAG_MODEL", "named-by-variable")
    monkeypatch.setenv("PC_RAG_REPAIR", "link:3")
    by_variables = PcRagLLM().host.settings
    assert (by_variables.store, by_variables.model) == ("from-variable", "named-by-variable")
    assert by_variables.config.repair == "link:3"
    monkeypatch.setenv("PC_RAG_REPAIR", "glue")
    with pytest.raises(ConfigError, match="PC_RAG_REPAIR"):
        PcRagLLM(model="m")


# --- LlamaIndex's own settings


class Exclaiming(BaseOutputParser):
    """Asks for a word, and puts a mark behind what comes."""

    def parse(self, output):
        return f"{output}!"

    def format(self, query):
        return f"{query} One word."


def test_output_is_parsed_when_the_model_has_a_parser(corpus):
    """LlamaIndex's ``output_parser`` shapes the prompt and the answer of ``predict``."""
    llm = PcRagLLM(corpus=corpus, output_parser=Exclaiming())
    with recorded(corpus.engine) as requests, scripted(corpus.engine, "yes"):
        assert llm.predict(PromptTemplate("Say {x}."), x="it") == "yes!"
    assert "Say it. One word." in shown(corpus, requests[0])


class Limiter(BaseRateLimiter):
    """Counts."""

    def __init__(self):
        self.num_sync = self.num_async = 0

    def acquire(self, num_tokens=0):
        self.num_sync += 1

    async def async_acquire(self, num_tokens=0):
        self.num_async += 1


async def test_limiter_is_asked_once_a_call_when_there_is_one(corpus):
    """LlamaIndex's ``rate_limiter`` is honoured by all eight ways."""
    limiter = Limiter()
    llm = PcRagLLM(corpus=corpus, max_tokens=1, rate_limiter=limiter)
    for way in ("complete", "chat", "stream_complete", "stream_chat"):
        await ask(llm, way, "Hi")
        await ask(llm, f"a{way}", "Hi")
    assert (limiter.num_sync, limiter.num_async) == (4, 4)


def test_model_is_the_default_when_settings_name_it(llm, monkeypatch):
    """``Settings.llm`` takes it, and synthesizers find it there."""
    monkeypatch.setattr(Settings, "_llm", None)
    Settings.llm = llm
    assert Settings.llm is llm
    assert get_response_synthesizer()._llm is llm
    manager = CallbackManager([])
    get_response_synthesizer(llm=llm, callback_manager=manager)
    assert llm.callback_manager is manager
    assert llm.complete("Hi").text != ""


# --- what LlamaIndex plans by


@pytest.fixture
def no_weights(monkeypatch):
    """Fails whoever loads weights."""

    def refuse(*_args, **_kwargs):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(hosts, "load_model", refuse)


@pytest.mark.usefixtures("no_weights")
def test_metadata_is_there_when_no_weights_are_loaded(tiny_folder):
    """Window, outputs, name, abilities and tokens come from the model's small files."""
    llm = PcRagLLM(model=str(tiny_folder), max_tokens=17)
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output) == (2048, 17)
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (True, False)
    assert metadata.model_name == str(tiny_folder)
    assert llm.tokenizer("abc") == [97, 98, 99]
    assert llm.prompt_helper().num_output == 17
    assert llm.to_payload() == {"class_name": "PcRagLLM", **metadata.model_dump()}
    assert not llm.host.is_open
    with_tools = PcRagLLM(model=str(tiny_folder), chat_template=TAGGED_TEMPLATE)
    assert with_tools.metadata.is_function_calling_model
    assert with_tools.metadata.num_output == 256


def test_metadata_stays_when_the_model_is_opened(tiny_folder):
    """Plans made before hold after."""
    with PcRagLLM(model=str(tiny_folder), max_tokens=1) as llm:
        before = llm.metadata
        llm.complete("Hi")
        assert llm.host.is_open
        assert llm.metadata == before


def test_window_is_smaller_when_it_is_set(corpus, tiny_folder):
    """It may shrink the model's, not grow it; the engine's own limit counts too."""
    assert PcRagLLM(corpus=corpus, context_window=500).metadata.context_window == 500
    assert PcRagLLM(corpus=corpus, context_window=9999).metadata.context_window == 2048
    config = EngineConfig(context_limit=700)
    llm = PcRagLLM(model=str(tiny_folder), engine_config=config)
    assert llm.metadata.context_window == 700


@pytest.fixture
def base_corpus():
    """A model without a chat template."""
    model, _ = tiny_model("llama")
    with opened(loaded=wrap_model(model, tiny_tokenizer(chat_template=None))) as corpus:
        yield corpus


async def test_prompt_stays_plain_when_the_model_is_a_base_model(base_corpus):
    """It is no chat model; a completion has nothing around it, and a chat is written out."""
    llm = PcRagLLM(corpus=base_corpus, max_tokens=2)
    assert not llm.metadata.is_chat_model
    with recorded(base_corpus.engine) as requests:
        await llm.acomplete("Once upon")
        llm.chat([ChatMessage(content="Hi")])
        llm.predict(PromptTemplate("Say {x}"), x="it")
    texts = [shown(base_corpus, request) for request in requests]
    assert texts == ["Once upon", "User: Hi\n\nAssistant:", "Say it"]


def test_prompts_are_as_asked_when_the_kind_of_model_is_given(corpus, base_corpus):
    """``is_chat_model`` overrides what the template says, both ways."""
    plain = PcRagLLM(corpus=corpus, is_chat_model=False, max_tokens=2)
    chatty = PcRagLLM(corpus=base_corpus, is_chat_model=True, max_tokens=2)
    assert (plain.metadata.is_chat_model, chatty.metadata.is_chat_model) == (False, True)
    for llm, expected in ((plain, "Hi"), (chatty, "User: Hi\n\nAssistant:")):
        with recorded(llm.open_corpus().engine) as requests:
            llm.complete("Hi")
        assert shown(llm.open_corpus(), requests[0]) == expected


CHAT_PROMPT = ChatPromptTemplate.from_messages(
    [("system", "You answer."), ("user", "Context: {context_str}\nQuestion: {query_str}")]
)
FEW_SHOT_PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You answer."),
        ("user", "Who?"),
        ("assistant", "He."),
        ("user", "Context: {context_str}\nQuestion: {query_str}"),
    ]
)
TEXT_PROMPT = PromptTemplate("Context: {context_str}\nQuestion: {query_str}")
WORDS = st.lists(st.text("abc é猫.\n", min_size=1, max_size=120), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def small_llm():
    """A model with a window that a few texts fill."""
    with tiny_engine(context_limit=600) as engine:
        yield PcRagLLM(engine=engine, max_tokens=4)


@pytest.mark.parametrize(
    "prompt", [CHAT_PROMPT, FEW_SHOT_PROMPT, TEXT_PROMPT], ids=["chat", "few-shot", "text"]
)
@pytest.mark.parametrize("system_prompt", [None, "Be brief and kind."])
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(texts=WORDS)
def test_packed_prompt_fits_when_the_helper_packs_it(small_llm, prompt, system_prompt, texts):
    """Prompts that LlamaIndex fills to the brim run: the chat template has its room."""
    llm = small_llm.model_copy(update={"system_prompt": system_prompt})
    helper = llm.prompt_helper(chunk_overlap_ratio=0.0)
    longest = max(helper.repack(prompt, texts * 10, padding=0, llm=llm), key=len)
    messages = llm._get_messages(prompt, context_str=longest, query_str="")
    usage = llm.chat(messages).raw["usage"]
    assert usage["prompt_tokens"] + llm.max_tokens <= 600


def test_packed_prompt_fills_the_window_when_there_is_enough_text(small_llm):
    """The room that is left is a few tokens, not a share of the window."""
    helper = small_llm.prompt_helper(chunk_overlap_ratio=0.0)
    (first, *_) = helper.repack(TEXT_PROMPT, ["a b c d e f"] * 200, padding=0, llm=small_llm)
    messages = small_llm._get_messages(TEXT_PROMPT, context_str=first, query_str="")
    usage = small_llm.chat(messages).raw["usage"]
    assert 600 - 60 <= usage["prompt_tokens"] + 4 <= 600


def test_helper_passes_options_on_when_they_are_given(llm):
    """As LlamaIndex's own takes them."""
    helper = llm.prompt_helper(chunk_overlap_ratio=0.25, chunk_size_limit=99, separator="|")
    assert (helper.chunk_overlap_ratio, helper.chunk_size_limit) == (0.25, 99)
    assert helper.separator == "|"
    assert helper._token_counter.get_string_tokens("abc") == 3
