"""Models are loaded once, shared by who needs them, and given back."""

from __future__ import annotations

import pytest
from langchain_pc_rag import ChatPcRag

from pc_rag.errors import ConfigError
from tests.support.corpora import CAT, tiny_engine
from tests.support.langchain_calls import context_messages, modules


@pytest.fixture
def llm(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=8)


def test_model_is_loaded_once_when_settings_are_equal(tiny_folder):
    """Objects of equal settings share one model; building one loads nothing."""
    first, second = (ChatPcRag(model=str(tiny_folder), max_tokens=n) for n in (1, 2))
    assert not first.host.is_open
    first.invoke("Hi")
    assert second.host is first.host
    assert second.host.is_open
    assert ChatPcRag(model=str(tiny_folder), dtype="bfloat16").host is not first.host
    first.close()
    assert first.invoke("Hi").content != ""
    first.close()


def test_store_outlives_the_model_when_it_is_a_folder(tiny_folder, tmp_path):
    """A second object of the same store gets hits for chunks that the first one added."""
    messages = context_messages(CAT)
    for name in ("first", "second"):
        llm = ChatPcRag(model=str(tiny_folder), store=str(tmp_path), max_tokens=1)
        if name == "first":
            llm.open_corpus().add([CAT])
        (module,) = modules(llm.invoke(messages))
        assert module["hit_kind"] == "composed"
        llm.close()


def test_other_model_answers_when_a_call_names_it(tiny_folder, other_folder):
    """``model`` of a call runs that model, and says so."""
    llm = ChatPcRag(model=str(tiny_folder), max_tokens=12)
    own, other = llm.invoke("Hi"), llm.invoke("Hi", model=str(other_folder))
    assert own.response_metadata["model_name"] == str(tiny_folder)
    assert other.response_metadata["model_name"] == str(other_folder)
    assert own.content != other.content
    llm.close()


def test_other_model_is_refused_when_the_corpus_was_given(llm):
    """There are no settings to open another one with."""
    with pytest.raises(ConfigError, match="other-model"):
        llm.invoke("Hi", model="other-model")


def test_engine_is_lent_when_it_is_given(tiny_folder):
    """Closing the chat model leaves the engine open."""
    with tiny_engine() as engine:
        llm = ChatPcRag(engine=engine, max_tokens=2)
        assert llm.invoke("Hi").content != ""
        llm.close()
        assert engine.generate("Hi").text != ""
