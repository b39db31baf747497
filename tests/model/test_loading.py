"""Loading by folder and from memory, and how a failure is explained."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartConfig, RwkvConfig
from transformers.utils import logging as transformers_logging

from pc_rag.engine import PromptCache
from pc_rag.errors import ConfigError, ModelError, UnsupportedModelError
from pc_rag.model import weights_memo
from pc_rag.model.chat import ChatFormat
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.loading import load_model, wrap_model
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PC_RAG_CACHE_DIR", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model")


def save(path, **options):
    model, tokenizer = tiny_model("llama", **options)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def counted(monkeypatch):
    calls = []

    def count(model):
        calls.append(model)
        return original(model)

    original = weights_memo.digest_weights
    monkeypatch.setattr(weights_memo, "digest_weights", count)
    return calls


def test_folder_gives_the_model_that_was_saved(folder):
    """The result holds what a caller needs; saving does not change the fingerprint."""
    loaded = load_model(folder, device="cpu")
    model, tokenizer = tiny_model("llama")
    assert (loaded.architecture, loaded.max_position) == ("LlamaForCausalLM", 2048)
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.name == str(folder)
    assert not loaded.model.training
    assert loaded.tokenizer.eos_ids == {259}
    assert loaded.fingerprint == wrap_model(model, tokenizer).fingerprint


def test_every_end_token_is_known_when_the_generation_config_lists_several():
    """Ids come from generation config, config and tokenizer."""
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = [256, 258]
    assert wrap_model(model, tokenizer).tokenizer.eos_ids == {256, 258, 259}


def test_dtype_is_as_asked_when_named(folder):
    """Names and torch dtypes; another dtype is another fingerprint."""
    half = load_model(folder, dtype="bfloat16", device="cpu")
    assert half.dtype is torch.bfloat16
    assert load_model(folder, dtype=torch.bfloat16, device="cpu").fingerprint == half.fingerprint
    assert load_model(folder, device="cpu").fingerprint != half.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of 'auto', 'float32'"),
        ({"dtype": torch.int64}, "torch.int64"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_setting_is_refused_when_unknown(folder, options, message):
    """The message says what is allowed."""
    with pytest.raises(ConfigError, match=message):
        load_model(folder, **options)


def test_device_is_refused_when_torch_sees_none(folder, monkeypatch):
    """CUDA on a machine without it is a setting's fault, said at once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA"):
        load_model(folder, device="cuda:0")
    assert load_model(folder).device.type == "cpu"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this torch has the device")
def test_device_is_refused_when_torch_was_built_without_it(folder):
    """Its own error is wrapped: which device, and what to do."""
    with pytest.raises(ModelError, match=r"cannot be moved to device 'mps'.*device='cpu'"):
        load_model(folder, device="mps")


def test_digest_is_computed_once_when_the_files_stay(folder, counted):
    """A second load, in any process, reads it from the cache."""
    first = load_model(folder, device="cpu")
    second = load_model(folder, device="cpu")
    assert first.fingerprint == second.fingerprint
    assert len(counted) == 1


def test_digest_is_computed_anew_when_one_weight_changes_in_place(folder, counted):
    """Same size, same modification time: the change is still seen."""
    first = load_model(folder, device="cpu")
    path = folder / "model.safetensors"
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load_model(folder, device="cpu").fingerprint != first.fingerprint
    assert len(counted) == 2


def test_digest_is_computed_when_its_cache_is_damaged(folder, cache, counted):
    """A cut-off cache file costs time, nothing else."""
    first = load_model(folder, device="cpu")
    for memo in (cache / "digests").iterdir():
        memo.write_text('{"a": ')
    assert load_model(folder, device="cpu").fingerprint == first.fingerprint
    assert len(counted) == 2


def test_fingerprint_differs_when_the_folder_holds_another_model(folder):
    """A model replaced at the same path is another one."""
    first = load_model(folder, device="cpu")
    shutil.rmtree(folder)
    save(folder, seed=1)
    assert load_model(folder, device="cpu").fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/folder/of/mine", "cannot load"),
        ("no-such-owner/no-such-model", "once while online"),
        ("./nowhere", "no model folder or .gguf file at"),
        ("nowhere.gguf", "no GGUF file at"),
    ],
)
def test_failure_is_explained_when_nothing_is_there(name, message):
    """The message names what was tried and what to do."""
    with pytest.raises(ModelError, match=message):
        load_model(name, device="cpu")


def test_failure_is_explained_when_the_folder_is_no_model(tmp_path):
    """A folder without config.json is told from a missing one."""
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no-such-type"}, "not a causal language model"),
        ({"hidden_size": "wide"}, "not a causal language model"),
    ],
)
def test_failure_is_explained_when_the_configuration_is_unknown(folder, changes, message):
    """An architecture that transformers lacks, or a malformed value."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        load_model(folder, device="cpu")


def test_failure_is_explained_when_weights_have_another_size(folder):
    """What torch raises is not the user's to read."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    with pytest.raises(ModelError, match="not a causal language model"):
        load_model(folder, device="cpu")


def test_model_is_in_its_own_mode_when_it_is_refused():
    """Module by module."""
    model, tokenizer = tiny_model("llama")
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    model.model.layers[0].self_attn.k_proj.weight.data.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match="not finite"):
        wrap_model(model, tokenizer)
    assert [module.training for module in model.modules()] == before


def test_failure_is_explained_when_weights_are_damaged(folder):
    """A truncated file is named with the model, not as a foreign exception."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load"):
        load_model(folder, device="cpu")


def test_model_is_refused_when_a_weight_is_missing(folder):
    """It would be filled with random numbers, and every answer would be noise."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 weights.*model\.norm\.weight"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("config", [BartConfig(), RwkvConfig()], ids=["bart", "rwkv"])
def test_unsupported_model_is_refused_before_its_weights_are_read(tmp_path, config):
    """The folder holds no weights at all, and the reason is still the architecture."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is not supported"):
        load_model(tmp_path, device="cpu")


def test_progress_bars_come_back_when_loading_is_over(folder, capfd):
    """Loading is silent, and what the host has set is as before, also after a failure."""
    transformers_logging.enable_progress_bar()
    load_model(folder, device="cpu")
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers_logging.is_progress_bar_enabled()
    with pytest.raises(ModelError):
        load_model("no-such-owner/no-such-model", device="cpu")
    assert transformers_logging.is_progress_bar_enabled()


def test_chat_template_takes_the_place_of_the_models_when_it_is_given(folder):
    """Base models have none; it is part of the fingerprint, and a lent tokenizer keeps its own."""
    template = "{% for m in messages %}{{ m.role + '> ' + m.content }}{% endfor %}"
    own = load_model(folder, device="cpu")
    loaded = load_model(folder, device="cpu", chat_template=template)
    pieces = ChatFormat(loaded.tokenizer).render([ChatMessage("user", "hi")])
    assert "".join(piece.text for piece in pieces) == "user> hi"
    assert loaded.fingerprint != own.fingerprint
    model, tokenizer = tiny_model("llama")
    before = tokenizer.chat_template
    wrapped = wrap_model(model, tokenizer, chat_template=template)
    assert wrapped.fingerprint == loaded.fingerprint
    assert tokenizer.chat_template == before


@pytest.mark.parametrize(
    ("template", "named"), [(" ", "blank"), ("a\n{% for %}", "not Jinja: line 2")]
)
def test_chat_template_is_refused_when_it_is_not_jinja(folder, template, named):
    """Before any weight is read, with the line."""
    with pytest.raises(ConfigError, match=named):
        load_model(folder, device="cpu", chat_template=template)
    model, tokenizer = tiny_model("llama")
    with pytest.raises(ConfigError, match=named):
        wrap_model(model, tokenizer, chat_template=template)


def test_chat_template_is_accepted_when_it_marks_generated_text():
    """As templates for training do; transformers renders them."""
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    )
    model, tokenizer = tiny_model("llama")
    loaded = wrap_model(model, tokenizer, chat_template=template)
    pieces = ChatFormat(loaded.tokenizer).render([ChatMessage("user", "hi")])
    assert "".join(piece.text for piece in pieces) == "hi"


def test_chat_template_is_refused_when_the_model_is_loaded_already(folder):
    """It would change a fingerprint that was taken."""
    loaded = load_model(folder, device="cpu")
    with pytest.raises(ConfigError, match="load_model or wrap_model"):
        PromptCache.from_pretrained(loaded, chat_template="{{ messages[0].content }}")
    engine = PromptCache.from_pretrained(
        folder, device="cpu", chat_template="{{ messages[0].content }}"
    )
    with engine:
        assert engine.chat_format.render([ChatMessage("user", "hi")])[0].text == "hi"
