"""Finding chunks: by meaning, for a question, and by their text, in a prompt."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, chunk_id_of
from pc_rag.corpus.recognition import Recognized, Recognizer
from pc_rag.corpus.reports import RetrievedChunk
from pc_rag.corpus.retrieval import VectorIndex
from pc_rag.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.embedding import Embedder
    from pc_rag.corpus.publishing import Published

_EMBED_BATCH = 256
"""Chunks embedded and stored at once: what a broken-off run leaves to be done again."""

_FEW_CHUNKS = 256
"""Up to this many texts are read one by one; more by one pass over the catalog."""


class ChunkLookup:
    """The live chunks of a catalog, searchable; follows changes by any process. Thread-safe.

    A change costs a comparison of ids, and the work for the chunks that came or went; additions by
    ``published`` cost the latter only. The embedder is made when something is to be embedded.

    Args:
        catalog: Knows the chunks and keeps their vectors.
        embedder: Makes the embedder; ``None`` where chunks are found by their text only.
    """

    def __init__(self, catalog: Catalog, embedder: Callable[[], Embedder] | None) -> None:
        self._catalog = catalog
        self._make_embedder = embedder
        self._embedder: Embedder | None = None
        self._index: VectorIndex | None = None
        self._indexed: set[ChunkId] = set()
        self._index_generation = -1
        self._index_lock = Lock()
        self._recognizer = Recognizer()
        self._recognized: set[ChunkId] = set()
        self._recognizer_generation = -1
        self._recognizer_lock = Lock()

    def find(self, text: str) -> tuple[Recognized, ...]:
        """The chunks that stand in a text verbatim, and heads and tails of chunks between them."""
        if self._catalog.generation() != self._recognizer_generation:
            self._follow()
        return self._recognizer.find(text)

    def find_whole(self, text: str) -> ChunkId | None:
        """The live chunk whose text this is, save whitespace at its ends; short ones too."""
        if self._catalog.generation() != self._recognizer_generation:
            self._follow()
        chunk_id = chunk_id_of(text.strip())
        return chunk_id if chunk_id in self._recognized else None

    def search(
        self, question: str, *, k: int, where: Mapping[str, str] | None = None
    ) -> tuple[RetrievedChunk, ...]:
        """The ``k`` chunks nearest in meaning, best first; none where ``k`` is less than 1.

        Raises:
            ConfigError: Chunks are not found by meaning here.
            MissingDependencyError: There is no embedder.
        """
        if self._make_embedder is None:
            raise ConfigError(
                "the corpus was opened with has_retrieval=False: its chunks are not embedded. Pass "
                "chunks that were retrieved elsewhere in a prompt to generate or stream_prompt, or "
                "open the corpus with has_retrieval=True"
            )
        if k < 1:
            return ()
        embedder, index = self._indexed_all(self._make_embedder)
        if index is None:
            return ()
        vector = embedder([question])[0]
        allowed = self._catalog.chunks_where(where) if where else None
        scored = index.search(vector, k, allowed=allowed)
        found = (self._retrieved(ChunkId(each.id), each.score, where) for each in scored)
        return tuple(chunk for chunk in found if chunk is not None)

    def published(self, published: Published) -> None:
        """Take in chunks that this process has just published.

        Without an embedder they are recognised all the same; a search says what is missing.
        """
        with self._recognizer_lock:
            if published.follows == self._recognizer_generation:
                self._recognizer.add_all(published.chunks)
                self._recognized.update(chunk_id for chunk_id, _ in published.chunks)
                self._recognizer_generation = published.generation
        make_embedder = self._make_embedder
        if make_embedder is not None:
            with suppress(MissingDependencyError):
                self._index_published(published, make_embedder)

    def _index_published(self, published: Published, make_embedder: Callable[[], Embedder]) -> None:
        with self._index_lock:
            embedder = self._get_embedder(make_embedder)
            if self._index is not None and published.follows == self._index_generation:
                new = [chunk for chunk in published.chunks if chunk[0] not in self._indexed]
                self._embed(embedder, new)
                self._index_generation = published.generation
                return
        self._indexed_all(make_embedder)

    def _indexed_all(
        self, make_embedder: Callable[[], Embedder]
    ) -> tuple[Embedder, VectorIndex | None]:
        """The index over all live chunks; ``None`` where there never were any."""
        with self._index_lock:
            embedder = self._get_embedder(make_embedder)
            if self._catalog.generation() != self._index_generation:
                self._refresh_index(embedder)
            return embedder, self._index

    def _get_embedder(self, make_embedder: Callable[[], Embedder]) -> Embedder:
        if self._embedder is None:
            self._embedder = make_embedder()
        return self._embedder

    def _refresh_index(self, embedder: Embedder) -> None:
        """Bring the index up to date with the catalog. The lock is held."""
        # Asked first: what changes while we read is read again next time, never missed.
        generation = self._catalog.generation()
        self._embed(embedder, self._catalog.vectors.missing(embedder.id))
        live = self._catalog.chunks_where({})
        if self._index is not None:
            self._index.remove(self._indexed - live)
            self._indexed &= live
        if not live <= self._indexed:
            stored = self._catalog.vectors.load(embedder.id)
            rows = [row for row, i in enumerate(stored.chunk_ids) if i not in self._indexed]
            self._add_vectors([stored.chunk_ids[row] for row in rows], stored.vectors[rows])
        self._index_generation = generation

    def _embed(self, embedder: Embedder, chunks: Sequence[tuple[ChunkId, str]]) -> None:
        """Embed and store chunks, batch by batch."""
        for start in range(0, len(chunks), _EMBED_BATCH):
            batch = chunks[start : start + _EMBED_BATCH]
            ids = [chunk_id for chunk_id, _ in batch]
            vectors = embedder([text for _, text in batch])
            self._catalog.vectors.record(embedder.id, ids, vectors)
            if self._index is not None:
                self._add_vectors(ids, vectors)

    def _add_vectors(self, ids: Sequence[ChunkId], vectors: npt.NDArray[np.float32]) -> None:
        if not ids:
            return
        if self._index is None:
            self._index = VectorIndex(vectors.shape[1])
        self._index.add(ids, vectors)
        self._indexed.update(ids)

    def _follow(self) -> None:
        """Bring recognition up to date with the catalog."""
        with self._recognizer_lock:
            generation = self._catalog.generation()
            if generation == self._recognizer_generation:
                return
            live = self._catalog.chunks_where({})
            for chunk_id in self._recognized - live:
                self._recognizer.remove(chunk_id)
            self._recognized &= live
            new = live - self._recognized
            self._recognizer.add_all(self._texts_of(new))
            self._recognized |= new
            self._recognizer_generation = generation

    def _texts_of(self, chunk_ids: frozenset[ChunkId]) -> Iterator[tuple[ChunkId, str]]:
        if len(chunk_ids) > _FEW_CHUNKS:
            yield from (chunk for chunk in self._catalog.live_texts() if chunk[0] in chunk_ids)
            return
        for chunk_id in sorted(chunk_ids):
            record = self._catalog.chunk(chunk_id)
            if record is not None:
                yield chunk_id, record.text

    def _retrieved(
        self, chunk_id: ChunkId, score: float, where: Mapping[str, str] | None
    ) -> RetrievedChunk | None:
        """The chunk; ``None`` where it went after the index was read, or its owner changed."""
        owners = self._catalog.owners(chunk_id, where=where)
        record = self._catalog.chunk(chunk_id)
        if not owners or record is None:
            return None
        return RetrievedChunk(
            id=chunk_id,
            text=record.text,
            score=score,
            sources=tuple(dict.fromkeys(owner.source for owner in owners)),
            metadata=owners[0].metadata,
        )
