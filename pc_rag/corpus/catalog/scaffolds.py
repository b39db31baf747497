"""Which chunks belong together, and which entries of them the KV store was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, ScaffoldRecord
from pc_rag.types import ModuleKey

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping

    from pc_rag.corpus.catalog.database import Database
    from pc_rag.corpus.catalog.records import ScaffoldEntry

_COUNTER = "scaffolds"

_INSERT_ENTRY = (
    "INSERT INTO scaffold_entries SELECT ?, number, ?, ?, ? FROM scaffolds WHERE id = ? "
    "AND (?2 IS NULL OR EXISTS (SELECT 1 FROM prefixes WHERE id = ?2)) "
    "ON CONFLICT (key) DO UPDATE SET scaffold = excluded.scaffold, "
    "prefix_id = excluded.prefix_id, fingerprint = excluded.fingerprint, "
    "num_bytes = excluded.num_bytes"
)


class ScaffoldTable:
    """Scaffolds by id, with their entries.

    A scaffold is live while every chunk of it has a live owner; one that lost a chunk is served no
    more, and stays until it is removed or the chunk is back.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(
        self, scaffold: ScaffoldRecord, entries: Iterable[ScaffoldEntry], *, adds: bool = True
    ) -> bool:
        """Store a scaffold with entries that the KV store holds; what is known already stays.

        Entries behind a prefix that is gone are left out: it was forgotten meanwhile.

        Args:
            scaffold: The scaffold.
            entries: Its entries.
            adds: Whether one that is not known is added; one that was removed is not otherwise.

        Returns:
            Whether it is known now: not where one of its chunks is gone. Nothing is stored then.
        """
        with self._database.write() as connection:
            numbers = [_chunk_number(connection, chunk_id) for chunk_id in scaffold.chunk_ids]
            known = connection.execute("SELECT 1 FROM scaffolds WHERE id = ?", (scaffold.id,))
            is_known = known.fetchone() is not None
            if None in numbers or not (is_known or adds):
                return False
            if not is_known:
                connection.execute(
                    "INSERT INTO scaffolds (id, separator) VALUES (?, ?)",
                    (scaffold.id, scaffold.separator),
                )
                connection.executemany(
                    "INSERT INTO scaffold_members SELECT number, ?, ? FROM scaffolds WHERE id = ?",
                    ((ordinal, number, scaffold.id) for ordinal, number in enumerate(numbers)),
                )
                _count_change(connection)
            connection.executemany(_INSERT_ENTRY, map(_entry_row, entries))
        return True

    def live(self) -> tuple[ScaffoldRecord, ...]:
        """The scaffolds whose chunks all have a live owner, in the order they came."""
        return self._records("SELECT number, id, separator FROM live_scaffolds ORDER BY number")

    def dead(self) -> tuple[ScaffoldRecord, ...]:
        """The scaffolds that lost a chunk; ``remove`` them once their entries left the store."""
        return self._records(
            "SELECT number, id, separator FROM scaffolds "
            "WHERE number NOT IN (SELECT number FROM live_scaffolds) ORDER BY number"
        )

    def entries_of(self, scaffold_id: str) -> Mapping[ModuleKey, int]:
        """The entries of a scaffold that no chunk has too, with their bytes, by key.

        A chunk may have just the text of a scaffold: its entry is the same one, and stays.
        """
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT key, scaffold_entries.num_bytes FROM scaffold_entries JOIN scaffolds "
                "ON number = scaffold WHERE id = ? AND key NOT IN (SELECT key FROM entries) "
                "ORDER BY key",
                (scaffold_id,),
            ).fetchall()
        return {ModuleKey(key): int(num_bytes) for key, num_bytes in rows}

    def keys_behind(self, prefix_id: str) -> frozenset[ModuleKey]:
        """The entries of scaffolds encoded behind one prefix."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT key FROM scaffold_entries WHERE prefix_id = ?", (prefix_id,)
            )
            return frozenset(ModuleKey(key) for (key,) in rows)

    def remove(self, scaffold_ids: Iterable[str]) -> None:
        """Delete scaffolds and the records of their entries, which have left the KV store."""
        with self._database.write() as connection:
            deleted = connection.executemany(
                "DELETE FROM scaffolds WHERE id = ?", ((each,) for each in scaffold_ids)
            )
            if deleted.rowcount > 0:
                _count_change(connection)

    def revision(self) -> tuple[int, int]:
        """Another value once a document or a scaffold changed, by any process."""
        with self._database.read() as connection:
            found = dict(connection.execute("SELECT name, value FROM counters").fetchall())
        return int(found.get("changes", 0)), int(found.get(_COUNTER, 0))

    def _records(self, query: str) -> tuple[ScaffoldRecord, ...]:
        members = (
            "SELECT id FROM scaffold_members JOIN chunks ON number = chunk "
            "WHERE scaffold = ? ORDER BY ordinal"
        )
        with self._database.read() as connection:
            return tuple(
                ScaffoldRecord(
                    id=id_,
                    separator=separator,
                    chunk_ids=tuple(
                        ChunkId(chunk_id) for (chunk_id,) in connection.execute(members, (number,))
                    ),
                )
                for number, id_, separator in connection.execute(query).fetchall()
            )


def _chunk_number(connection: sqlite3.Connection, chunk_id: ChunkId) -> int | None:
    row = connection.execute("SELECT number FROM chunks WHERE id = ?", (chunk_id,)).fetchone()
    return None if row is None else int(row[0])


def _entry_row(entry: ScaffoldEntry) -> tuple[object, ...]:
    return (
        entry.key,
        entry.prefix_id,
        entry.fingerprint,
        entry.num_bytes,
        entry.scaffold_id,
    )


def _count_change(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO counters VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1",
        (_COUNTER,),
    )
