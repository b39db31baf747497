"""Vectors of chunks, by embedder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pc_rag.corpus.catalog.records import ChunkId, StoredVectors
from pc_rag.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pc_rag.corpus.catalog.database import Database


class VectorTable:
    """Vectors of chunks; those of different embedders lie side by side."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(
        self, embedder_id: str, chunk_ids: Sequence[ChunkId], vectors: npt.NDArray[np.float32]
    ) -> None:
        """Store vectors, replacing those of the same chunks and embedder.

        Args:
            embedder_id: The embedder that made them.
            chunk_ids: A chunk for every row; chunks that are gone are passed over.
            vectors: ``[num_chunks, dim]`` float32.

        Raises:
            StoreError: Another number of rows than chunks.
        """
        rows = np.asarray(vectors, dtype="<f4")
        if len(rows) != len(chunk_ids):
            raise StoreError(f"{len(rows)} vectors for {len(chunk_ids)} chunks; one for each")
        with self._database.write() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO chunk_vectors SELECT number, ?, ? FROM chunks WHERE id = ?",
                (
                    (embedder_id, row.tobytes(), chunk_id)
                    for chunk_id, row in zip(chunk_ids, rows, strict=True)
                ),
            )

    def load(self, embedder_id: str) -> StoredVectors:
        """The vectors of all live chunks that have one under this embedder."""
        with self._database.read() as connection:
            found = connection.execute(
                "SELECT id, vector FROM chunk_vectors "
                "JOIN live_chunks ON number = chunk WHERE embedder_id = ? ORDER BY id",
                (embedder_id,),
            ).fetchall()
        if not found:
            return StoredVectors((), np.zeros((0, 0), dtype=np.float32))
        data = np.frombuffer(b"".join(vector for _, vector in found), dtype="<f4")
        vectors = data.reshape(len(found), -1).astype(np.float32)
        return StoredVectors(tuple(ChunkId(chunk_id) for chunk_id, _ in found), vectors)

    def missing(self, embedder_id: str) -> tuple[tuple[ChunkId, str], ...]:
        """Ids and texts of the live chunks without a vector under this embedder, by id."""
        with self._database.read() as connection:
            found = connection.execute(
                "SELECT id, text FROM live_chunks WHERE number NOT IN "
                "(SELECT chunk FROM chunk_vectors WHERE embedder_id = ?) ORDER BY id",
                (embedder_id,),
            ).fetchall()
        return tuple((ChunkId(chunk_id), text) for chunk_id, text in found)
