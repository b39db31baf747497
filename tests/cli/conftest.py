from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from pc_rag.cli import opening
from tests.support.cli import Ran, run, save_tiny_model, word_embedder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a tiny model only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch, tmp_path_factory):
    """No cache folder, settings or embedder of this machine take part."""
    monkeypatch.setenv("PC_RAG_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("PC_RAG_STORE", raising=False)
    monkeypatch.setattr(opening, "default_embedder", word_embedder)


@dataclass(frozen=True)
class Workspace:
    """Some documents, a store beside them, and a model."""

    documents: Path
    store: Path
    model: Path

    def index(self, *options: object, path: object = None) -> Ran:
        path = self.documents if path is None else path
        defaults = ("--store", self.store, "--model", self.model, "--chunk-tokens", 100)
        return run("index", path, *defaults, *options)

    def run(self, command: str, *options: object) -> Ran:
        return run(command, *options, "--store", self.store)


def write_documents(folder):
    """Three readable documents and two files that cannot be read."""
    folder.mkdir()
    (folder / "cats.md").write_text(
        "# Cats\n\nCats sleep for most of the day, and hunt at dusk and dawn.\n\n"
        "A group of cats is called a clowder, and a group of kittens a kindle.\n"
    )
    (folder / "rivers.txt").write_text(
        "The Danube flows through ten countries, more than any other river.\n\n"
        "It rises in the Black Forest and ends in the Black Sea.\n"
    )
    (folder / "page.html").write_text(
        "<title>Bread</title><p>Bread is made of flour, water, salt and time.</p>"
        "<p>A sourdough starter replaces the yeast that is bought.</p>"
    )
    (folder / "image.bin").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    return folder


@pytest.fixture
def workspace(tmp_path, tiny_model_folder):
    """Documents of one's own, and no store yet."""
    return Workspace(write_documents(tmp_path / "documents"), tmp_path / "store", tiny_model_folder)


@pytest.fixture(scope="session")
def indexed_once(tmp_path_factory, tiny_model_folder):
    """Documents that no test changes, and their store, to be copied."""
    root = tmp_path_factory.mktemp("indexed")
    workspace = Workspace(write_documents(root / "documents"), root / "store", tiny_model_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "default_embedder", word_embedder)
        done = workspace.index()
    assert done.exit_code == 0, done.stderr
    return workspace


@pytest.fixture
def indexed(indexed_once, tmp_path):
    """A store of one's own over documents that no test changes."""
    store = shutil.copytree(indexed_once.store, tmp_path / "store")
    return replace(indexed_once, store=store)
