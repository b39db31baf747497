"""Running the command line on a tiny model in a folder, without network."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from typer.testing import CliRunner

from pc_rag.cli import app
from pc_rag.corpus import CallableEmbedder
from tests.support.tiny_models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUM_CHUNKS = 6
"""Chunks of the documents in ``tests/cli/conftest.py`` at 100 tokens a chunk."""

_NUM_BUCKETS = 64


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)


def run(*arguments: object) -> Ran:
    """Run ``pc-rag`` with these arguments; an exception that passes its edge fails the test."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    return Ran(result.exit_code, result.stdout, result.stderr)


def bag_of_words(texts: Sequence[str]) -> np.ndarray:
    """Texts as counts of hashed words: texts that share words lie near each other."""
    vectors = np.full((len(texts), _NUM_BUCKETS), 1e-3, dtype=np.float32)
    for row, text in enumerate(texts):
        for word in re.findall(r"\w+", text.lower()):
            vectors[row, zlib.crc32(word.encode()) % _NUM_BUCKETS] += 1
    return vectors


def word_embedder() -> CallableEmbedder:
    """``bag_of_words`` as the default embedder."""
    return CallableEmbedder(bag_of_words, embedder_id="bag-of-words")


def save_tiny_model(folder: Path, *, family: str = "llama", seed: int = 0) -> Path:
    """A tiny model with its tokenizer, as ``save_pretrained`` writes them."""
    model, tokenizer = tiny_model(family, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
