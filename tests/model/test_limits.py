"""How many position IDs requests may use."""

from __future__ import annotations

import pytest
import torch

from pc_rag.errors import ConfigError, UnsupportedModelError
from pc_rag.model.detection.detect import detect
from pc_rag.model.detection.limits import position_limit
from pc_rag.model.loading import load_max_position, load_model, wrap_model
from tests.support.tiny_models import tiny_config, tiny_model


@pytest.mark.parametrize(
    ("name", "limit"),
    [("llama", 2048), ("mpt", 2048), ("bloom", 2048), ("opt", 2048), ("phi3", 1024)],
)
def test_limit_is_what_the_model_was_made_for(name, limit):
    """Positions, sequence length, BLOOM's unnamed 2048, LongRoPE's original length."""
    assert position_limit(tiny_config(name)) == limit
    model, tokenizer = tiny_model(name)
    assert detect(model).max_position == limit
    assert load_limits(model, tokenizer) == limit


def load_limits(model, tokenizer):
    model.eval()
    return wrap_model(model, tokenizer).max_position


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2", "phi3"])
def test_limit_is_lower_when_it_is_asked_for(name):
    """Of every encoding."""
    assert detect(tiny_model(name)[0], max_position=512).max_position == 512


def test_limit_is_higher_when_the_encoding_has_no_end():
    """ALiBi: more than the model was trained with, where it is asked for."""
    assert detect(tiny_model("bloom")[0], max_position=5000).max_position == 5000
    assert position_limit(tiny_config("falcon-rw"), 5000) == 5000


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "opt"])
def test_limit_is_refused_when_the_model_has_fewer_positions(name):
    """With both numbers."""
    with pytest.raises(ConfigError, match=r"max_position 4096 is more than the 20\d\d"):
        detect(tiny_model(name)[0], max_position=4096)


@pytest.mark.parametrize("name", ["gpt2", "gptj"])
def test_limit_is_refused_when_a_short_table_ends_before_it(name):
    """Also where the configuration does not show that there is one; the model is not run there."""
    model, _ = tiny_model(name, max_position_embeddings=1024)
    with pytest.raises(
        ConfigError, match=r"max_position 4096 is more than the 1024 .*" + name[:3].upper()
    ):
        detect(model, max_position=4096)


@pytest.mark.parametrize("asked", [3, 0, -1])
def test_limit_is_refused_when_it_is_no_length(asked):
    """Too few positions to see a model at two starts."""
    with pytest.raises(ConfigError, match=f"at least 4; got {asked}"):
        position_limit(tiny_config("llama"), asked)
    if asked > 0:
        config = tiny_config("llama", max_position_embeddings=asked)
        with pytest.raises(UnsupportedModelError, match="a length of 3 position IDs"):
            position_limit(config)


def test_limit_is_refused_when_nothing_names_it():
    """And taken from the user where they know."""
    config = tiny_config("llama", max_position_embeddings=0)
    with pytest.raises(UnsupportedModelError, match="names no length") as caught:
        position_limit(config)
    assert caught.value.capability == "context length"
    assert position_limit(config, 77) == 77


def test_long_factors_are_another_model_when_they_are_asked_for(tmp_path, monkeypatch):
    """LongRoPE: another fingerprint for the same files, whatever prompt ran last."""
    monkeypatch.setenv("PC_RAG_CACHE_DIR", str(tmp_path / "cache"))
    model, tokenizer = tiny_model("phi3")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    short = load_model(tmp_path / "model", device="cpu")
    long = load_model(tmp_path / "model", device="cpu", max_position=2048)
    lower = load_model(tmp_path / "model", device="cpu", max_position=1000)
    assert (short.max_position, long.max_position, lower.max_position) == (1024, 2048, 1000)
    assert short.fingerprint == lower.fingerprint != long.fingerprint
    assert load_max_position(tmp_path / "model") == 1024
    assert load_max_position(tmp_path / "model", max_position=2048) == 2048


@pytest.mark.parametrize("max_position", [None, 2048])
def test_fingerprint_is_the_same_when_the_owner_ran_a_long_prompt(max_position):
    """Transformers leaves the frequencies of the latest prompt in the model."""
    model, tokenizer = tiny_model("phi3")
    before = wrap_model(model, tokenizer, max_position=max_position)
    model(torch.ones(1, 1100, dtype=torch.long))
    after = wrap_model(model, tokenizer, max_position=max_position)
    assert before.fingerprint == after.fingerprint
