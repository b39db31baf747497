"""Which entries of which chunks the KV store was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, EntryRecord
from pc_rag.errors import StoreError
from pc_rag.types import Fingerprint, ModuleKey

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from pc_rag.corpus.catalog.database import Database

_SELECT = (
    "SELECT entries.key, chunks.id, entries.prefix_id, entries.fingerprint, entries.num_bytes "
    "FROM entries JOIN chunks ON chunks.number = entries.chunk "
)

_INSERT = (
    "INSERT INTO entries VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
    "chunk = excluded.chunk, prefix_id = excluded.prefix_id, fingerprint = excluded.fingerprint, "
    "num_bytes = excluded.num_bytes WHERE (chunk, prefix_id, fingerprint, num_bytes) IS NOT "
    "(excluded.chunk, excluded.prefix_id, excluded.fingerprint, excluded.num_bytes)"
)
"""Writes nothing where the row is there: a commit without a change need not reach the disk."""


class EntryTable:
    """The entries that were put into the KV store.

    The store decides whether an entry can be served; this table only says what to reclaim, and
    what to expect.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, entries: Iterable[EntryRecord]) -> None:
        """Record entries that the KV store holds. An entry known already is replaced.

        Those behind a prefix that is gone are left out: it was forgotten while they were encoded.

        Raises:
            StoreError: The chunk of an entry is not in the catalog.
        """
        with self._database.write() as connection:
            insert_entries(connection, entries)

    def of_chunk(self, chunk_id: ChunkId) -> tuple[EntryRecord, ...]:
        """The entries of one chunk, for every model and prefix, by key."""
        with self._database.read() as connection:
            return _records(connection, "WHERE chunks.id = ? ORDER BY entries.key", chunk_id)

    def of_prefix(self, prefix_id: str) -> tuple[EntryRecord, ...]:
        """The entries encoded behind one prefix, by key."""
        where = "WHERE entries.prefix_id = ? ORDER BY entries.key"
        with self._database.read() as connection:
            return _records(connection, where, prefix_id)

    def keys(self) -> frozenset[ModuleKey]:
        """Every recorded key, those of scaffolds too: others of the store belong to no chunk."""
        with self._database.read() as connection:
            return frozenset(
                ModuleKey(key) for (key,) in connection.execute("SELECT key FROM all_entries")
            )

    def forget(self, keys: Iterable[ModuleKey]) -> None:
        """Delete the records of entries that the KV store no longer holds."""
        with self._database.write() as connection:
            delete_entries(connection, keys)


def insert_entries(connection: sqlite3.Connection, entries: Iterable[EntryRecord]) -> None:
    """Record entries within a transaction of the caller's."""
    for entry in entries:
        chunk = connection.execute(
            "SELECT number FROM chunks WHERE id = ?", (entry.chunk_id,)
        ).fetchone()
        prefix = connection.execute("SELECT 1 FROM prefixes WHERE id = ?", (entry.prefix_id,))
        is_prefix_known = entry.prefix_id is None or prefix.fetchone() is not None
        if chunk is None:
            raise StoreError(
                f"entry {entry.key[:12]}: chunk {entry.chunk_id} is not in the catalog; add it "
                f"before its entries"
            )
        if not is_prefix_known:
            continue
        connection.execute(
            _INSERT,
            (entry.key, chunk[0], entry.prefix_id, entry.fingerprint, entry.num_bytes),
        )


def delete_entries(connection: sqlite3.Connection, keys: Iterable[ModuleKey]) -> None:
    """Delete records of entries within a transaction of the caller's."""
    connection.executemany("DELETE FROM entries WHERE key = ?", ((key,) for key in keys))


def _records(connection: sqlite3.Connection, where: str, value: str) -> tuple[EntryRecord, ...]:
    return tuple(
        EntryRecord(
            key=ModuleKey(key),
            chunk_id=ChunkId(chunk_id),
            prefix_id=prefix_id,
            fingerprint=Fingerprint(fingerprint),
            num_bytes=num_bytes,
        )
        for key, chunk_id, prefix_id, fingerprint, num_bytes in connection.execute(
            _SELECT + where, (value,)
        )
    )
