"""Fixtures that the tests of every framework's adapter use."""

from __future__ import annotations

import pytest
import torch

from tests.support.cli import save_tiny_model
from tests.support.corpora import TEXTS, opened


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a tiny model only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def quiet_machine(request, monkeypatch, tmp_path_factory):
    """No cache folder or settings of this machine take part, save where a real model is run."""
    if request.node.get_closest_marker("slow") is None:
        cache = tmp_path_factory.getbasetemp() / "cache"
        monkeypatch.setenv("PC_RAG_CACHE_DIR", str(cache))
    monkeypatch.delenv("PC_RAG_STORE", raising=False)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model folder as ``save_pretrained`` writes it."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """A model of the same shapes with other weights."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def corpus():
    """Three chunks on a tiny model, with the exact prefix cache."""
    with opened(prefix_cache_bytes=1 << 26) as corpus:
        corpus.add(TEXTS)
        yield corpus
