"""Model objects: what they are opened with, without any framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from pc_rag.errors import ConfigError
from pc_rag.serving import ModelObject, translated
from tests.support.corpora import opened


class Plain(ModelObject):
    """The settings as plain attributes."""

    model = "smollm2"
    store = corpus = engine = engine_config = chat_template = max_position = None
    dtype = device = "auto"
    max_tokens = temperature = top_p = top_k = min_p = repetition_penalty = seed = None
    stop = timeout = template = reuse = None
    learn_prefix = False
    _held = _default_config = None

    def __init__(self, **given):
        vars(self).update(translated("Plain", given))
        self._check_model()

    def _is_changed(self, name):
        return getattr(self, name) != getattr(Plain, name)


@pytest.fixture
def corpus():
    with opened(has_retrieval=False) as corpus:
        yield corpus


def test_settings_are_ours_when_other_models_name_them():
    """Names, one string, a path, and what changes nothing; the caller's are left alone."""
    given = {"model_name": Path("m"), "stop_sequences": "x", "max_new_tokens": 3, "n": 1}
    assert translated("Plain", given) == {"model": "m", "stop": ["x"], "max_tokens": 3}
    assert set(given) == {"model_name", "stop_sequences", "max_new_tokens", "n"}


@pytest.mark.parametrize("order", [("model", "model_name"), ("model_name", "model")])
def test_setting_is_refused_when_two_names_of_it_differ(order):
    """Neither is dropped in silence; twice the same is no contradiction."""
    with pytest.raises(ConfigError, match=r"model is given twice.*leave one out"):
        translated("Plain", dict(zip(order, ("a", "b"), strict=True)))
    assert translated("Plain", dict.fromkeys(order, "a")) == {"model": "a"}


@pytest.mark.parametrize("order", [("model", "model_name"), ("model_name", "model")])
def test_setting_is_taken_when_its_other_name_is_none(order):
    """Wrappers pass all names there are, most of them unset."""
    for given in (("a", None), (None, "a")):
        assert translated("Plain", dict(zip(order, given, strict=True))) == {"model": "a"}
    assert translated("Plain", {"store": None}) == {"store": None}


@pytest.mark.parametrize("name", ["model", "store"])
def test_name_is_refused_when_it_is_empty(name):
    """An empty path would be the working folder."""
    with pytest.raises(ConfigError, match=f"Plain: {name} is empty"):
        translated("Plain", {name: ""})


def test_lent_corpus_gives_the_model_its_name(corpus):
    """It stays open when the object is closed, and cannot be pickled."""
    with Plain(corpus=corpus) as plain:
        assert plain.model == corpus.engine.loaded.name
        assert plain.open_corpus() is corpus
        with pytest.raises(ConfigError, match="cannot be pickled"):
            plain._check_picklable()
    assert plain.open_corpus() is corpus
    corpus.add(["A dog barks at every train that passes the field."])


@pytest.mark.parametrize(
    ("settings", "fault"),
    [({"model": "other"}, "is not the model"), ({"store": "kv"}, "give one of")],
)
def test_lent_corpus_is_refused_when_settings_contradict_it(corpus, settings, fault):
    """A model is told once what it runs on."""
    with pytest.raises(ConfigError, match=fault):
        Plain(corpus=corpus, **settings)


def test_host_is_shared_when_settings_are_equal(tmp_path):
    """Nothing is loaded for it; another store is another host."""
    first, second = Plain(store=str(tmp_path)), Plain(store=str(tmp_path))
    assert first.host is second.host
    assert first.host is not Plain().host
    assert not first.host.is_open


def test_fault_is_found_at_once_when_a_setting_is_out_of_range():
    """Not at the first call."""
    with pytest.raises(ConfigError, match="max_new_tokens"):
        Plain(max_tokens=0)
