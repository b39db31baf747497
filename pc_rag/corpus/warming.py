"""Bringing entries near before they are asked for, in the background."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, NewChunk
from pc_rag.corpus.prefixes import recipe_table
from pc_rag.errors import PromptError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pc_rag.corpus.chunk_entries import ChunkEntries, WantedEntry
    from pc_rag.corpus.lookup import ChunkLookup
    from pc_rag.corpus.prefix_set import PrefixSet
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache

MAX_PENDING = 32
"""Calls that may wait. What came longest ago is least likely to be of use still."""


class Warmer:
    """Brings the entries of chunks into the nearest tier, one call after the other. Thread-safe.

    One thread works, entry by entry: it holds the lease of one entry at a time, and the model for
    the encoding of one, so a request that runs meanwhile waits for one chunk at most.

    Args:
        engine: Whose store and model.
        lookup: Finds chunks in texts.
        entries: The entries of chunks.
        prefixes: What chunks are encoded behind.
    """

    def __init__(
        self,
        engine: PromptCache,
        lookup: ChunkLookup,
        entries: ChunkEntries,
        prefixes: PrefixSet,
    ) -> None:
        self._engine = engine
        self._lookup = lookup
        self._entries = entries
        self._prefixes = prefixes
        self._lock = Lock()
        self._pending: dict[frozenset[str], Future[int]] = {}
        self._is_draining = False
        self._is_closed = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="pc-rag-warm")

    def warm(self, texts: Iterable[str]) -> Future[int]:
        """See ``Corpus.warm``."""
        if isinstance(texts, str):
            raise PromptError("warm: got a single text; pass a list of texts")
        wanted = frozenset(texts)
        with self._lock:
            if self._is_closed:
                raise StoreError("the corpus is closed; open it again to warm its chunks")
            pending = self._pending.get(wanted)
            if pending is not None and not pending.cancelled():
                return pending
            self._pending.pop(wanted, None)
            while len(self._pending) >= MAX_PENDING:
                self._pending.pop(next(iter(self._pending))).cancel()
            self._pending[wanted] = begun = Future[int]()
            if not self._is_draining:
                self._is_draining = True
                self._background.submit(self._drain)
            return begun

    def close(self) -> None:
        """Cancel what waits, and end what runs behind its next chunk. Idempotent."""
        with self._lock:
            self._is_closed = True
            for pending in self._pending.values():
                pending.cancel()
            self._pending.clear()
        self._background.shutdown()

    def _drain(self) -> None:
        """Do what waits, oldest first, until nothing does."""
        while True:
            with self._lock:
                if not self._pending:
                    self._is_draining = False
                    return
                texts = next(iter(self._pending))
                future = self._pending.pop(texts)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._run(texts))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks the future
                future.set_exception(error)

    def _run(self, texts: Iterable[str]) -> int:
        chunks = {chunk_id: text for each in texts for chunk_id, text in self._chunks_in(each)}
        if chunks:
            self._warm_prefixes(self._prefixes.served)
        num_warmed = 0
        for chunk_id, text in chunks.items():
            if self._is_closed:
                break
            self._warm_chunk(chunk_id, text)
            num_warmed += 1
        return num_warmed

    def _chunks_in(self, text: str) -> list[tuple[ChunkId, str]]:
        whole = self._lookup.find_whole(text)
        if whole is not None:
            return [(whole, text.strip())]
        found = self._lookup.find(text)
        return [(ChunkId(each.chunk_id), text[each.start : each.end]) for each in found]

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
