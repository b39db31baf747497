"""How a model is copied, shared and given back."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace

import pytest
from llama_index.core.rate_limiter import TokenBucketRateLimiter
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.config import EngineConfig
from pc_rag.errors import ConfigError, StoreError
from tests.support.corpora import CAT, tiny_engine
from tests.support.llama_index_calls import modules, text_of


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


# --- copies


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda llm: llm.model_copy(),
    "deep_model_copy": lambda llm: llm.model_copy(deep=True),
}
REBUILT = {
    "pickle": lambda llm: pickle.loads(pickle.dumps(llm)),
    "dict": lambda llm: PcRagLLM.from_dict(llm.to_dict()),
    "json": lambda llm: PcRagLLM.from_json(llm.to_json()),
}


@pytest.mark.parametrize("how", COPIES)
def test_copy_shares_the_model_when_the_corpus_is_lent(corpus, how):
    """Nothing lent is copied, and the copy answers the same."""
    llm = PcRagLLM(corpus=corpus, max_tokens=4)
    expected = llm.complete("Hi").text
    copied = COPIES[how](llm)
    assert copied.corpus is corpus
    assert copied.host.engine is corpus.engine
    assert copied.complete("Hi").text == expected


@pytest.mark.parametrize("how", [*COPIES, *REBUILT])
@pytest.mark.parametrize("is_used", [True, False])
def test_copy_answers_the_same_when_the_model_is_a_folder(tiny_folder, how, is_used):
    """It has every setting, shares the model, and either may be closed first."""
    llm = PcRagLLM(
        model=str(tiny_folder),
        engine_config=EngineConfig(repair="link:2"),
        max_tokens=4,
        seed=5,
        stop=["x"],
        system_prompt="Be brief.",
        context_window=900,
    )
    if is_used:
        llm.complete("Hi")
    copied = {**COPIES, **REBUILT}[how](llm)
    assert copied.to_dict() == llm.to_dict()
    assert copied.host is llm.host
    expected = llm.complete("Hi").text
    llm.close()
    assert copied.host.is_open
    assert copied.complete("Hi").text == expected
    copied.close()
    assert not copied.host.is_open


@pytest.mark.parametrize("lent", ["corpus", "engine"])
def test_pickle_is_refused_when_something_is_lent(corpus, lent):
    """No other process can have it."""
    llm = PcRagLLM(**{lent: corpus if lent == "corpus" else corpus.engine})
    with pytest.raises(ConfigError, match="lent corpus or engine cannot be pickled"):
        pickle.dumps(llm)


def test_pickle_leaves_out_what_belongs_to_this_process(tiny_folder):
    """A rate limiter holds a lock."""
    limiter = TokenBucketRateLimiter(requests_per_minute=60)
    llm = PcRagLLM(model=str(tiny_folder), rate_limiter=limiter, max_tokens=3)
    restored = pickle.loads(pickle.dumps(llm))
    assert (restored.rate_limiter, restored.max_tokens) == (None, 3)


def test_serialised_form_is_json_when_a_corpus_is_lent(llm):
    """Indexes persist their settings; nothing live goes along."""
    data = json.loads(llm.to_json())
    assert data["class_name"] == "PcRagLLM"
    assert data["model"] == llm.model
    assert not {"corpus", "engine", "callback_manager"} & set(data)


# --- sharing and closing


def test_model_is_loaded_once_when_settings_are_equal(tiny_folder):
    """Objects of equal settings share one model; building one loads nothing."""
    first, second = (PcRagLLM(model=str(tiny_folder), max_tokens=n) for n in (1, 2))
    assert not first.host.is_open
    first.complete("Hi")
    assert second.host is first.host
    assert second.host.is_open
    assert PcRagLLM(model=str(tiny_folder), dtype="bfloat16").host is not first.host
    first.close()
    assert second.host.is_open
    second.close()
    assert not second.host.is_open
    assert first.complete("Hi").text != ""
    first.close()


def test_model_is_closed_when_its_context_ends(tiny_folder):
    """The corpus with it; the object may be used again."""
    with PcRagLLM(model=str(tiny_folder), max_tokens=1) as llm:
        first = llm.complete("Hi").text
        host, corpus = llm.host, llm.open_corpus()
    assert not host.is_open
    with pytest.raises(StoreError):
        corpus.stats()
    with llm:
        assert llm.complete("Hi").text == first


def test_engine_is_lent_when_it_is_given():
    """Closing the model leaves the engine open."""
    with tiny_engine() as engine:
        llm = PcRagLLM(engine=engine, max_tokens=2)
        assert llm.complete("Hi").text != ""
        llm.close()
        assert engine.generate("Hi").text != ""


def test_store_outlives_the_model_when_it_is_a_folder(tiny_folder, tmp_path):
    """Pitfall 43: a second object of the same store gets hits for chunks of the first."""
    for name in ("first", "second"):
        with PcRagLLM(model=str(tiny_folder), store=tmp_path, max_tokens=1) as llm:
            if name == "first":
                llm.open_corpus().add([CAT])
            (module,) = modules(llm.complete(f"Use {CAT} now"))
            assert module["hit_kind"] == "composed"


def test_other_model_answers_when_a_call_or_an_assignment_names_it(tiny_folder, other_folder):
    """``model`` of a call runs that model, opened alike; and a changed field is heeded."""
    llm = PcRagLLM(model=str(tiny_folder), dtype="bfloat16", device="cpu", max_tokens=12)
    own, other = llm.complete("Hi"), llm.complete("Hi", model=str(other_folder))
    assert (own.raw["model"], other.raw["model"]) == (str(tiny_folder), str(other_folder))
    assert own.text != other.text
    sibling = llm.host.sibling(str(other_folder))
    assert sibling.settings == replace(llm.host.settings, model=str(other_folder))
    llm.model = str(other_folder)
    assert text_of(llm.complete("Hi")) == other.text
    llm.close()
