"""Bringing entries near before they are asked for, in the background."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, NewChunk
from pc_rag.corpus.prefixes import recipe_table
from pc_rag.corpus.recognition import ChunkPart
from pc_rag.engine.background import MAX_PENDING, BackgroundWork
from pc_rag.errors import PromptError

__all__ = ["MAX_PENDING", "Warmer"]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from pc_rag.corpus.chunk_entries import ChunkEntries, WantedEntry
    from pc_rag.corpus.lookup import ChunkLookup
    from pc_rag.corpus.prefix_set import PrefixSet
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.corpus.scaffolds import Scaffolds
    from pc_rag.engine import PromptCache


class Warmer:
    """Brings the entries of chunks into the nearest tier, one call after the other. Thread-safe.

    One thread works, entry by entry: it holds the lease of one entry at a time, and the model for
    the encoding of one, so a request that runs meanwhile waits for one chunk at most.

    Args:
        engine: Whose store and model.
        lookup: Finds chunks in texts.
        entries: The entries of chunks.
        prefixes: What chunks are encoded behind.
        scaffolds: Chunks that are encoded together.
    """

    def __init__(
        self,
        engine: PromptCache,
        lookup: ChunkLookup,
        entries: ChunkEntries,
        *,
        prefixes: PrefixSet,
        scaffolds: Scaffolds,
    ) -> None:
        self._engine = engine
        self._lookup = lookup
        self._entries = entries
        self._prefixes = prefixes
        self._scaffolds = scaffolds
        self._background = BackgroundWork[int](
            "pc-rag-warm", when_closed="the corpus is closed; open it again to warm its chunks"
        )

    def warm(self, texts: Iterable[str]) -> Future[int]:
        """See ``Corpus.warm``."""
        wanted = _as_texts(texts)
        return self._background.submit(wanted, lambda: self._run(wanted))

    def close(self) -> None:
        """Cancel what waits, and end what runs behind its next chunk. Idempotent."""
        self._background.close()

    def _run(self, texts: Iterable[str]) -> int:
        chunks = {chunk_id: text for each in texts for chunk_id, text in self._found_in(each)}
        if chunks:
            self._warm_prefixes(self._prefixes.served)
        num_warmed = 0
        for chunk_id, text in chunks.items():
            if self._background.is_ending:
                break
            self._warm_chunk(chunk_id, text)
            num_warmed += 1
        self._scaffolds.bring_near(chunks.keys(), is_ending=lambda: self._background.is_ending)
        return num_warmed

    def _found_in(self, text: str) -> Iterator[tuple[ChunkId, str]]:
        """Ids and texts of the chunk that a text is, or of those that a prompt of it would read."""
        whole = self._lookup.find_whole(text)
        if whole is not None:
            yield whole, text.strip()
            return
        for each in self._lookup.find(text):
            chunk_id = ChunkId(each.chunk_id)
            if each.part is ChunkPart.WHOLE:
                yield chunk_id, text[each.start : each.end]
            elif each.part is ChunkPart.HEAD and self._entries.head(each) is not None:
                # A tail is computed, whatever is stored.
                chunk = self._entries.stored(chunk_id)
                if chunk is not None:
                    yield chunk_id, chunk.text

    def _warm_prefixes(self, prefixes: Sequence[CorpusPrefix]) -> None:
        recipes = recipe_table((), prefixes)
        for key in recipes:
            with self._engine.source.acquire([key], recipes):
                pass

    def _warm_chunk(self, chunk_id: ChunkId, text: str) -> None:
        chunk = NewChunk(text, self._entries.tokens_of(chunk_id, text))
        served = self._prefixes.served
        encoded_ids = {prefix.record.id for prefix in self._prefixes.encoded}
        for wanted in self._entries.wanted([chunk], served):
            if not self._engine.source.missing([wanted.recipe]):
                recipes = recipe_table([wanted.recipe], [wanted.prefix])
                with self._engine.source.acquire([wanted.record.key], recipes):
                    pass  # a lease brings the entry near, and giving it back leaves it there
            elif wanted.prefix.record.id in encoded_ids:
                self._encode(wanted)
        self._entries.remove_gone([chunk], served, self._prefixes.served)

    def _encode(self, wanted: WantedEntry) -> None:
        recipes = recipe_table([wanted.recipe], [wanted.prefix])
        for encoded in self._engine.source.encode([wanted.record.key], recipes):
            if encoded.refusal is not None:
                raise encoded.refusal
        self._entries.record([wanted.record])


def _as_texts(texts: object) -> frozenset[str]:
    """What ``Corpus.warm`` was given, as a set of texts.

    Raises:
        PromptError: It is a single text, or no collection of texts.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        what = "text" if isinstance(texts, str) else type(texts).__name__
        raise PromptError(f"warm: got a single {what}; pass a list of texts")
    wanted = list(texts)
    for number, each in enumerate(wanted):
        if not isinstance(each, str):
            raise PromptError(
                f"warm: text {number} is a {type(each).__name__}; pass a list of texts"
            )
    return frozenset(wanted)
