"""Models are loaded once, shared by who needs them, and given back."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from langchain_core.runnables import ConfigurableField
from langchain_pc_rag import ChatPcRag, PcRagLLM

from pc_rag.config import EngineConfig
from pc_rag.errors import ConfigError, StoreError
from tests.support.corpora import CAT, tiny_engine
from tests.support.engines import scripted
from tests.support.langchain_calls import context_messages, modules, text_of


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


@pytest.fixture(params=[ChatPcRag, PcRagLLM])
def kind(request):
    return request.param


def pickled(llm):
    return pickle.loads(pickle.dumps(llm))


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda llm: llm.model_copy(),
    "deep_model_copy": lambda llm: llm.model_copy(deep=True),
}


@pytest.mark.parametrize("how", COPIES)
def test_copy_shares_the_model_when_the_corpus_is_lent(kind, corpus, how):
    """Nothing lent is copied, and the copy answers the same."""
    llm = kind(corpus=corpus, max_tokens=4)
    expected = text_of(llm.invoke("Hi"))
    copied = COPIES[how](llm)
    assert copied.corpus is corpus
    assert copied.host.engine is corpus.engine
    assert text_of(copied.invoke("Hi")) == expected


@pytest.mark.parametrize("how", [*COPIES, "pickle"])
@pytest.mark.parametrize("is_used", [True, False])
def test_copy_answers_the_same_when_the_model_is_a_folder(kind, tiny_folder, how, is_used):
    """It shares the model, and either may be closed first."""
    llm = kind(model=str(tiny_folder), max_tokens=4, seed=5)
    if is_used:
        llm.invoke("Hi")
    copied = COPIES.get(how, pickled)(llm)
    assert copied.asdict() == llm.asdict()
    assert copied.host is llm.host
    expected = text_of(llm.invoke("Hi"))
    llm.close()
    assert copied.host.is_open
    assert text_of(copied.invoke("Hi")) == expected
    copied.close()
    assert not copied.host.is_open


@pytest.mark.parametrize("lent", ["corpus", "engine"])
def test_pickle_is_refused_when_something_is_lent(kind, corpus, lent):
    """No other process can have it."""
    llm = kind(**{lent: corpus if lent == "corpus" else corpus.engine})
    with pytest.raises(ConfigError, match="lent corpus or engine cannot be pickled"):
        pickle.dumps(llm)


@pytest.mark.parametrize("how", ["model_copy", "assignment"])
def test_other_model_answers_when_the_name_is_changed_after_use(
    kind, tiny_folder, other_folder, how
):
    """The name says what answers; the first object's model stays open for it."""
    settings = {"max_tokens": 12}
    with kind(model=str(other_folder), **settings) as other:
        expected = text_of(other.invoke("Hi"))
    llm = kind(model=str(tiny_folder), **settings)
    own = text_of(llm.invoke("Hi"))
    if how == "assignment":
        changed = llm
        changed.model = str(other_folder)
    else:
        changed = llm.model_copy(update={"model": str(other_folder)})
    assert text_of(changed.invoke("Hi")) == expected != own
    assert changed.host.model_name == str(other_folder)
    if changed is not llm:
        assert text_of(llm.invoke("Hi")) == own
    changed.close()
    llm.close()


def test_field_is_configured_when_a_call_says_so(kind, corpus, tiny_folder):
    """``configurable_fields`` builds objects anew, from what was lent too."""
    folder = kind(model=str(tiny_folder), max_tokens=50)
    for llm in (kind(corpus=corpus, max_tokens=50), folder):
        chain = llm.configurable_fields(max_tokens=ConfigurableField(id="length"))
        with scripted(llm.host.engine, "abcdefgh"):
            answer = chain.invoke("Hi", config={"configurable": {"length": 3}})
        assert text_of(answer) == "abc"
    folder.close()


def test_other_model_is_configured_when_a_call_names_it(kind, tiny_folder, other_folder):
    """The name of the model is a field as any other."""
    llm = kind(model=str(tiny_folder), max_tokens=12)
    chain = llm.configurable_fields(model=ConfigurableField(id="model"))
    with kind(model=str(other_folder), max_tokens=12) as other:
        config = {"configurable": {"model": str(other_folder)}}
        assert text_of(chain.invoke("Hi", config=config)) == text_of(other.invoke("Hi"))
    llm.close()


def test_model_is_closed_when_its_context_ends(kind, tiny_folder):
    """The corpus with it, so that memory and files come back; the object may be used again."""
    with kind(model=str(tiny_folder), max_tokens=1) as llm:
        first = text_of(llm.invoke("Hi"))
        host, corpus = llm.host, llm.open_corpus()
    assert not host.is_open
    with pytest.raises(StoreError):
        corpus.stats()
    with llm:
        assert text_of(llm.invoke("Hi")) == first
        assert llm.open_corpus() is not corpus


def test_documents_stay_when_one_of_two_equal_objects_is_closed(tiny_folder):
    """They are in memory only, and the other object still answers from them."""
    first, second = (ChatPcRag(model=str(tiny_folder), max_tokens=n) for n in (1, 2))
    first.open_corpus().add([CAT])
    first.close()
    first.close()
    (module,) = modules(second.invoke(context_messages(CAT)))
    assert module["hit_kind"] == "composed"
    second.close()
    assert not second.host.is_open


def test_other_model_is_opened_alike_when_a_call_names_it(kind, tiny_folder, other_folder):
    """With the same device, dtype and capacities; and it is given back with the first."""
    config = EngineConfig(repair="link:2", chunk_tokens=99)
    llm = kind(
        model=str(tiny_folder), dtype="bfloat16", device="cpu", engine_config=config, max_tokens=1
    )
    llm.invoke("Hi", model=str(other_folder))
    sibling = llm.host.sibling(str(other_folder))
    assert sibling.settings == replace(llm.host.settings, model=str(other_folder))
    assert sibling.is_open
    engine = sibling.engine
    assert engine.config.chunk_tokens == 99
    assert str(engine.loaded.model.dtype) == "torch.bfloat16"
    llm.close()
    assert not sibling.is_open
