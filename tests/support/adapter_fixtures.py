"""Fixtures that the tests of every framework's adapter use."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from tests.support.cli import save_tiny_model
from tests.support.corpora import TEXTS, opened

WAIT_SECONDS = 10


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


@pytest.fixture
def waits_for_the_loop():
    """Makes a function wait until the event loop has run meanwhile."""

    def waiting(function):
        loop = asyncio.get_running_loop()

        def wait_first(*args, **kwargs):
            has_run = threading.Event()
            loop.call_soon_threadsafe(has_run.set)
            if not has_run.wait(WAIT_SECONDS):
                pytest.fail("the event loop was blocked")
            return function(*args, **kwargs)

        return wait_first

    return waiting
