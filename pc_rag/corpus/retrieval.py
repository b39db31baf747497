"""Nearest chunks by inner product: an exact FAISS index over named vectors."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ScoredId:
    """A found vector.

    Attributes:
        id: Its name.
        score: Inner product with the query; the cosine where both are normalised.
    """

    id: str
    score: float


class VectorIndex:
    """Vectors by name; exact search, meant for up to about 100,000 of them.

    Every method may be called from any thread; a search sees an addition whole or not at all.
    Memory: ``4 * dim`` bytes a vector and about 200 bytes for its name.

    Args:
        dim: Length of every vector.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._lock = threading.Lock()
        self._index: Any = faiss.IndexIDMap(faiss.IndexFlatIP(dim))
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def add(self, ids: Sequence[str], vectors: npt.NDArray[np.float32]) -> None:
        """Add vectors, replacing those whose names are taken.

        Args:
            ids: A name for every row; of a name given twice the last row stays.
            vectors: ``[num_ids, dim]`` float32. Copied.

        Raises:
            ConfigError: Another shape, or a value that is not finite.
        """
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
        if not ids and not rows.size:
            return
        self._check(rows, (len(ids), self.dim))
        last_rows = {name: row for row, name in enumerate(ids)}
        with self._lock:
            self._remove(last_rows)
            numbers = range(self._next_number, self._next_number + len(last_rows))
            self._next_number = numbers.stop
            self._index.add_with_ids(
                rows[list(last_rows.values())], np.array(numbers, dtype=np.int64)
            )
            self._numbers.update(zip(last_rows, numbers, strict=True))
            self._names.update(zip(numbers, last_rows, strict=True))

    def remove(self, ids: Iterable[str]) -> int:
        """Remove vectors by name; unknown names are passed over. How many were there."""
        with self._lock:
            return self._remove(ids)

    def search(
        self, vector: npt.NDArray[np.float32], k: int, *, allowed: Collection[str] | None = None
    ) -> list[ScoredId]:
        """The ``k`` best, by falling score; equal scores by name, whatever the order of additions.

        Args:
            vector: ``[dim]`` float32.
            k: How many at most.
            allowed: Names to choose from; ``None`` for all.

        Raises:
            ConfigError: The vector has another length, or a value that is not finite.
        """
        query = np.ascontiguousarray(vector, dtype=np.float32).reshape(1, -1)
        self._check(query, (1, self.dim))
        with self._lock:
            parameters, num_allowed = self._selection(allowed)
            if k <= 0 or not num_allowed:
                return []
            # FAISS cuts ties by position. One more is fetched, and more as long as the last
            # fetched ties with the k-th, so that names decide and not the order of additions.
            num_fetched = min(k + 1, num_allowed)
            while True:
                scores, numbers = self._index.search(query, num_fetched, params=parameters)
                if num_fetched == num_allowed or scores[0, -1] < scores[0, k - 1]:
                    break
                num_fetched = min(2 * num_fetched, num_allowed)
            found = [
                ScoredId(self._names[number], float(score))
                for number, score in zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
            ]
        return sorted(found, key=lambda scored: (-scored.score, scored.id))[:k]

    def _selection(self, allowed: Collection[str] | None) -> tuple[Any, int]:
        if allowed is None:
            return None, len(self._numbers)
        numbers = sorted({self._numbers[name] for name in allowed if name in self._numbers})
        selector = faiss.IDSelectorBatch(np.array(numbers, dtype=np.int64))
        # faiss adds the keyword, and the reference to the selector, when it is imported.
        return faiss.SearchParameters(sel=selector), len(numbers)  # type: ignore[call-arg]

    def _remove(self, ids: Iterable[str]) -> int:
        numbers = [self._numbers.pop(name) for name in dict.fromkeys(ids) if name in self._numbers]
        for number in numbers:
            del self._names[number]
        if numbers:
            self._index.remove_ids(np.array(numbers, dtype=np.int64))
        return len(numbers)

    def _check(self, rows: npt.NDArray[np.float32], shape: tuple[int, int]) -> None:
        if rows.shape != shape:
            raise ConfigError(
                f"vectors have shape {rows.shape}; expected {shape}: were they made by another "
                f"embedder than the index?"
            )
        if not np.isfinite(rows).all():
            raise ConfigError("a vector has values that are not finite; check the embedder")
