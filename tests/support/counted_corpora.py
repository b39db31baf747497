"""Corpora that count what is encoded, and note what is warmed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.corpus import Corpus
from tests.support.corpora import tiny_engine
from tests.support.engines import SpyStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future


@dataclass
class CountedCorpus:
    """A corpus with the store that its entries go to.

    Attributes:
        corpus: Without retrieval of its own.
        entries: Counts, and fails on request.
    """

    corpus: Corpus
    entries: SpyStore

    @property
    def num_encoded(self) -> int:
        """Entries that were stored so far, that of the corpus's prefix among them."""
        return self.entries.calls["put"]

    @property
    def stats(self):
        """The catalog's numbers."""
        return self.corpus.stats().catalog

    def chunks_in(self, text: str) -> list[str]:
        """Texts of the chunks that a question behind a text would be served with, in order."""
        decode = self.corpus.engine.loaded.tokenizer.decode
        plan = self.corpus.plan(f"{text} Who sat?").plan
        return [decode(part.token_ids) for part in plan.cached if part.label != "(prefix)"]


@contextmanager
def counted_corpus(**settings) -> Iterator[CountedCorpus]:
    """An empty corpus in memory over a tiny model."""
    entries = SpyStore()
    with (
        tiny_engine(entries, **settings) as engine,
        Corpus(engine, has_retrieval=False) as corpus,
    ):
        yield CountedCorpus(corpus, entries)


def warmings(corpus: Corpus) -> list[tuple[list[str], Future[int]]]:
    """What is warmed from now on: texts, and what they came to."""
    begun: list[tuple[list[str], Future[int]]] = []
    warm = corpus.warm

    def noted(texts) -> Future[int]:
        texts = list(texts)
        begun.append((texts, warm(texts)))
        return begun[-1][1]

    corpus.warm = noted
    return begun
