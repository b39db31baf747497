"""Corpora over a tiny model in memory, with an embedding that needs no model."""

from __future__ import annotations

import functools
import re
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus, Document, as_embedder
from pc_rag.engine import PromptCache
from pc_rag.model.loading import wrap_model
from pc_rag.model.sampling import GenerationConfig
from tests.support.tiny_models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pc_rag.engine import Request
    from pc_rag.model.loading import LoadedModel

DIM = 64

CAT = "The cat sat on the mat while rain fell on the roof of the old barn."
DOG = "A dog ran through the field and barked at every passing train."
FISH = "Small silver fish swim in the deep lake below the northern hills."
TEXTS = (CAT, DOG, FISH)

SHORT = GenerationConfig(max_new_tokens=8)
"""Enough tokens for a difference to show."""


def embed_words(texts: Sequence[str]) -> np.ndarray:
    """Bags of words, hashed: ``[num_texts, DIM]``. The same in every process."""
    vectors = np.zeros((len(texts), DIM), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in re.findall(r"\w+", text.lower()):
            vectors[row, zlib.crc32(word.encode()) % DIM] += 1
        vectors[row, 0] += 0.01  # no zero vector, not even of a text without words
    return vectors


EMBEDDING = as_embedder(embed_words, embedder_id="bag-of-words")


@functools.cache
def loaded_model(family: str = "llama", *, seed: int = 0, add_bos: bool = False) -> LoadedModel:
    """A tiny model; lent to many tests, changed by none."""
    return wrap_model(*tiny_model(family, seed=seed, add_bos=add_bos))


def tiny_engine(store=None, *, loaded: LoadedModel | None = None, **settings) -> PromptCache:
    """An engine over a tiny model.

    Args:
        store: A folder, a store, or ``None`` for memory.
        loaded: Another model than the default one.
        settings: Fields of ``EngineConfig``. The exact prefix cache is off unless set, so that
            what is read comes from entries.
    """
    chunk_tokens = settings.get("slot_tokens") or 200
    defaults = {"prefix_cache_bytes": 0, "chunk_tokens": chunk_tokens}
    config = EngineConfig(**defaults | settings)
    return PromptCache.from_pretrained(loaded or loaded_model(), store=store, config=config)


@contextmanager
def opened(
    folder=None, *, loaded=None, prompt_format=None, has_retrieval=True, **settings
) -> Iterator[Corpus]:
    """A corpus with its engine; entries and catalog below ``folder``, or in memory."""
    store = folder / "kv" if folder else None
    with (
        tiny_engine(store, loaded=loaded, **settings) as engine,
        Corpus(
            engine,
            folder / "catalog" if folder else None,
            embedding=EMBEDDING if has_retrieval else None,
            prompt_format=prompt_format,
            has_retrieval=has_retrieval,
        ) as corpus,
    ):
        yield corpus


def named(**texts: str) -> list[Document]:
    """Documents by id."""
    return [Document(text, id=name) for name, text in texts.items()]


def chunk_uses(result):
    """What became of the chunks of an answer or completion, the prefix left out."""
    metrics = getattr(result, "completion", result).metrics
    return [use for use in metrics.modules if use.label != "(prefix)"]


@contextmanager
def recorded(engine: PromptCache) -> Iterator[list[Request]]:
    """The requests that reach an engine, in order."""
    requests = []
    run = engine.run

    def record(request, *args, **keywords):
        requests.append(request)
        return run(request, *args, **keywords)

    engine.run = record
    try:
        yield requests
    finally:
        engine.run = run


def request_of(corpus: Corpus, question: str, k: int = 4) -> Request:
    """What a question asks the engine to run; nothing is run."""
    with recorded(corpus.engine) as requests:
        corpus.stream(question, k).stream.close()
    return requests[0]


def control_tokens(corpus: Corpus, request: Request) -> list[int]:
    """The control tokens of a prompt, in order."""
    control_ids = corpus.engine.loaded.tokenizer.control_ids
    return [token_id for token_id in request.plan.token_ids if token_id in control_ids]


def same_in_both_arms(ask) -> bool:
    """Whether ``ask(reuse=...)`` gives the same tokens; true where what is read is exact."""
    answers = [ask(reuse=reuse) for reuse in (True, False)]
    first, second = (getattr(answer, "completion", answer).token_ids for answer in answers)
    return first == second
