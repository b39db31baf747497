"""Finding chunks: by meaning, for a question, and by their text, in a prompt."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId
from pc_rag.corpus.recognition import Recognized, Recognizer
from pc_rag.corpus.reports import RetrievedChunk
from pc_rag.corpus.retrieval import VectorIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.embedding import Embedder


class ChunkLookup:
    """The live chunks of a catalog, searchable; follows changes by any process. Thread-safe.

    The embedder is made when the first search needs it.

    Args:
        catalog: Knows the chunks and keeps their vectors.
        embedder: Makes the embedder.
    """

    def __init__(self, catalog: Catalog, embedder: Callable[[], Embedder]) -> None:
        self._catalog = catalog
        self._make_embedder = embedder
        self._embedder: Embedder | None = None
        self._recognizer = Recognizer()
        self._index: VectorIndex | None = None
        self._indexed: set[ChunkId] = set()
        self._texts: dict[ChunkId, str] = {}
        self._generation = -1
        self._index_generation = -1
        self._lock = Lock()

    def find(self, text: str) -> tuple[Recognized, ...]:
        """The chunks that stand in a text verbatim."""
        self._follow()
        return self._recognizer.find(text)

    def text(self, chunk_id: str) -> str:
        """The text of a live chunk, or of one that was live a moment ago."""
        found = self._texts.get(ChunkId(chunk_id))
        if found is not None:
            return found
        record = self._catalog.chunk(ChunkId(chunk_id))
        return record.text if record is not None else ""

    def search(
        self, question: str, *, k: int, where: Mapping[str, str] | None = None
    ) -> tuple[RetrievedChunk, ...]:
        """The ``k`` chunks nearest in meaning, best first."""
        index = self.index_all()
        if index is None or self._embedder is None:
            return ()
        vector = self._embedder([question])[0]
        allowed = self._catalog.chunks_where(where) if where else None
        return tuple(
            self._retrieved(ChunkId(scored.id), scored.score, where)
            for scored in index.search(vector, k, allowed=allowed)
        )

    def index_all(self) -> VectorIndex | None:
        """Embed the chunks that have no vector yet; the index, or ``None`` without chunks."""
        with self._lock:
            embedder = self._embedder = self._embedder or self._make_embedder()
            generation = self._catalog.generation()
            if generation == self._index_generation:
                return self._index
            missing = self._catalog.vectors.missing(embedder.id)
            if missing:
                vectors = embedder([text for _, text in missing])
                self._catalog.vectors.record(embedder.id, [i for i, _ in missing], vectors)
            stored = self._catalog.vectors.load(embedder.id)
            if not stored.chunk_ids:
                self._index = None
            else:
                self._update_index(stored.chunk_ids, stored.vectors)
            self._index_generation = generation
            return self._index

    def _update_index(self, ids: Sequence[ChunkId], vectors: np.ndarray) -> None:
        if self._index is None:
            self._index, self._indexed = VectorIndex(vectors.shape[1]), set()
        live = set(ids)
        self._index.remove(self._indexed - live)
        rows = [row for row, chunk_id in enumerate(ids) if chunk_id not in self._indexed]
        if rows:
            self._index.add([ids[row] for row in rows], vectors[rows])
        self._indexed = live

    def _follow(self) -> None:
        """Bring recognition up to date with the catalog."""
        generation = self._catalog.generation()
        if generation == self._generation:
            return
        with self._lock:
            texts = dict(self._catalog.live_texts())
            for chunk_id in self._texts.keys() - texts.keys():
                self._recognizer.remove(chunk_id)
            self._recognizer.add_all(
                (chunk_id, text) for chunk_id, text in texts.items() if chunk_id not in self._texts
            )
            self._texts = texts
            self._generation = generation

    def _retrieved(
        self, chunk_id: ChunkId, score: float, where: Mapping[str, str] | None
    ) -> RetrievedChunk:
        owners = self._catalog.owners(chunk_id, where=where)
        return RetrievedChunk(
            id=chunk_id,
            text=self.text(chunk_id),
            score=score,
            sources=tuple(dict.fromkeys(owner.source for owner in owners)),
            metadata=owners[0].metadata if owners else {},
        )
