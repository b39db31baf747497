"""The catalog: documents, the chunks they own, and what is stored for each chunk."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pc_rag.corpus.catalog.database import Database
from pc_rag.corpus.catalog.documents import (
    Identity,
    added_at,
    compare,
    document_records,
    replace_chunks,
    upsert_document,
)
from pc_rag.corpus.catalog.entries import EntryTable, delete_entries, insert_entries
from pc_rag.corpus.catalog.packing import pack_token_ids, unpack_token_ids
from pc_rag.corpus.catalog.prefixes import PrefixTable
from pc_rag.corpus.catalog.records import (
    CatalogStats,
    ChunkId,
    ChunkRecord,
    DocumentChange,
    DocumentRecord,
    Unowned,
)
from pc_rag.corpus.catalog.scaffolds import ScaffoldTable
from pc_rag.corpus.catalog.vectors import VectorTable
from pc_rag.types import ModuleKey

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from pc_rag.corpus.catalog.records import EntryRecord, NewChunk
    from pc_rag.corpus.documents import Document
    from pc_rag.types import TokenIds

FILE_NAME = "catalog.sqlite"
_ID_SETTING = "catalog_id"


class Catalog:
    """What a corpus holds, on disk; shared by processes, called from any thread.

    Two documents with the same chunk share it, and both own it. Removing a document leaves a
    tombstone and replacing one leaves chunks without an owner; ``unowned`` and ``purge`` reclaim
    both. Every change is one transaction, durable when the call returns: readers see the old state
    or the new one, and a killed process leaves one of the two.

    Token ids belong to a tokenizer and vectors to an embedder, and are kept apart by both, so one
    catalog serves several models.

    Args:
        folder: Holds the file ``catalog.sqlite``; created with mode 0700.
        tokenizer_id: Names the tokenizer of every token id that goes in and comes out.

    Attributes:
        entries: Which entries the KV store was given.
        prefixes: Text before the chunks.
        scaffolds: Chunks that belong together.
        vectors: Vectors of chunks, by embedder.

    Raises:
        StoreError: The file is a link, is no catalog, or was written by a newer pc-rag.
        StoreIOError: The file cannot be opened.
    """

    def __init__(self, folder: str | Path, *, tokenizer_id: str) -> None:
        self._database = Database(Path(folder) / FILE_NAME)
        self._tokenizer_id = tokenizer_id
        self.entries = EntryTable(self._database)
        self.prefixes = PrefixTable(self._database, tokenizer_id)
        self.scaffolds = ScaffoldTable(self._database)
        self.vectors = VectorTable(self._database)

    def compare(self, document: Document, *, chunking: str) -> DocumentChange:
        """What ``add_document`` would report, so that unchanged text is neither split nor encoded.

        Args:
            document: The document.
            chunking: ``Chunker.id`` of the way it would be split.
        """
        with self._database.read() as connection:
            return compare(connection, document, Identity.of(document, chunking))

    def add_document(
        self,
        document: Document,
        chunks: Sequence[NewChunk],
        *,
        chunking: str,
        entries: Sequence[EntryRecord] = (),
        based_on: float | None = None,
    ) -> DocumentChange:
        """Add a document or replace the version of the same id, in one step.

        Encode and store the entries first: until this call returns the old version answers, and it
        goes on answering when the encoding fails.

        Args:
            document: The document.
            chunks: Its chunks in order; looked at only where the text or the chunking changed.
            chunking: ``Chunker.id`` of the way it was split.
            entries: Entries of its chunks that the KV store now holds; those behind a prefix that
                is gone meanwhile are left out.
            based_on: ``added_at`` of the version that the document was made from, 0 where there was
                none: nothing happens if another is there by now. ``None`` replaces any.

        Raises:
            IngestError: A chunk is not stripped or has no tokens.
            StoreError: An entry belongs to no known chunk.
        """
        identity = Identity.of(document, chunking)
        with self._database.write() as connection:
            if based_on is not None and added_at(connection, identity.id) != based_on:
                return DocumentChange.OUTDATED
            change = compare(connection, document, identity)
            if change is not DocumentChange.UNCHANGED:
                number = upsert_document(connection, document, identity)
                if change is not DocumentChange.METADATA:
                    replace_chunks(connection, number, chunks, self._tokenizer_id)
                _count_change(connection)
            insert_entries(connection, entries)
        return change

    def remove_document(self, document_id: str) -> bool:
        """Leave a tombstone for a document; ``purge`` reclaims it. Whether it was live."""
        with self._database.write() as connection:
            cursor = connection.execute(
                "UPDATE documents SET tombstoned_at = ? WHERE id = ? AND tombstoned_at IS NULL",
                (time.time(), document_id),
            )
            if cursor.rowcount:
                _count_change(connection)
            return bool(cursor.rowcount)

    def document(self, document_id: str) -> DocumentRecord | None:
        """A live document by id."""
        with self._database.read() as connection:
            found = document_records(connection, "id = ?", [document_id])
        return found[0] if found else None

    def documents(
        self, *, source: str | None = None, id_beginning: str = ""
    ) -> tuple[DocumentRecord, ...]:
        """All live documents, or those of one source, whose ids begin like this, by id."""
        where, values = "substr(id, 1, length(?1)) = ?1", [id_beginning]
        if source is not None:
            where, values = f"{where} AND source = ?2", [*values, source]
        with self._database.read() as connection:
            return document_records(connection, where, values)

    def owners(
        self, chunk_id: ChunkId, *, where: Mapping[str, str] | None = None
    ) -> tuple[DocumentRecord, ...]:
        """The live documents that own a chunk, by id.

        Args:
            chunk_id: The chunk.
            where: Metadata that a document must have to be among them.
        """
        owned = (
            "number IN (SELECT ownership.document FROM ownership JOIN chunks "
            "ON chunks.number = ownership.chunk WHERE chunks.id = ?)"
        )
        with self._database.read() as connection:
            found = document_records(connection, owned, [chunk_id])
        wanted = (where or {}).items()
        return tuple(record for record in found if wanted <= record.metadata.items())

    def chunk(self, chunk_id: ChunkId) -> ChunkRecord | None:
        """A chunk by id, live or not."""
        found = self._chunks("", "chunks.id = ?", chunk_id)
        return found[0] if found else None

    def chunks_of(self, document_id: str) -> tuple[ChunkRecord, ...]:
        """The chunks of a live document, in its order."""
        return self._chunks(
            "JOIN live_ownership ON live_ownership.chunk = chunks.number "
            "JOIN documents ON documents.number = live_ownership.document",
            "documents.id = ? ORDER BY live_ownership.ordinal",
            document_id,
        )

    def _chunks(self, join: str, where: str, value: str) -> tuple[ChunkRecord, ...]:
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT chunks.id, chunks.text, chunk_tokens.token_ids FROM chunks "  # noqa: S608 - constants of ours
                f"{join} LEFT JOIN chunk_tokens ON chunk_tokens.chunk = chunks.number "
                f"AND chunk_tokens.tokenizer_id = ? WHERE {where}",
                (self._tokenizer_id, value),
            ).fetchall()
        return tuple(
            ChunkRecord(
                id=ChunkId(chunk_id),
                text=text,
                token_ids=None if token_ids is None else unpack_token_ids(token_ids),
            )
            for chunk_id, text, token_ids in rows
        )

    def record_tokens(self, chunk_id: ChunkId, token_ids: TokenIds) -> None:
        """Store a chunk's tokens under the catalog's tokenizer; a chunk that is gone is ignored."""
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO chunk_tokens SELECT number, ?, ?, ? FROM chunks "
                "WHERE id = ?",
                (self._tokenizer_id, len(token_ids), pack_token_ids(token_ids), chunk_id),
            )

    def live_texts(self) -> tuple[tuple[ChunkId, str], ...]:
        """Ids and texts of all chunks with a live owner, by id."""
        with self._database.read() as connection:
            rows = connection.execute("SELECT id, text FROM live_chunks ORDER BY id").fetchall()
        return tuple((ChunkId(chunk_id), text) for chunk_id, text in rows)

    def chunks_where(self, where: Mapping[str, str]) -> frozenset[ChunkId]:
        """The chunks with a live owner that has all of this metadata; all live ones if empty."""
        joins, values = "", []
        for index, (name, value) in enumerate(where.items()):
            joins += (
                f"JOIN document_metadata AS m{index} ON m{index}.document = "
                f"live_ownership.document AND m{index}.name = ? AND m{index}.value = ? "
            )
            values += [name, value]
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT DISTINCT chunks.id FROM live_ownership "  # noqa: S608 - values are bound
                f"JOIN chunks ON chunks.number = live_ownership.chunk {joins}",
                values,
            )
            return frozenset(ChunkId(chunk_id) for (chunk_id,) in rows)

    def unowned(self) -> Unowned:
        """What no live document needs.

        Remove its ``module_keys`` from the KV store, then call ``purge``: after a crash in between
        the next ``unowned`` names them again.
        """
        with self._database.read() as connection:
            chunks = connection.execute("SELECT id FROM unowned_chunks ORDER BY id").fetchall()
            entries = connection.execute(
                "SELECT key, num_bytes FROM entries "
                "JOIN unowned_chunks ON unowned_chunks.number = entries.chunk ORDER BY key"
            ).fetchall()
            documents = connection.execute(
                "SELECT id FROM documents WHERE tombstoned_at IS NOT NULL ORDER BY id"
            ).fetchall()
        return Unowned(
            chunk_ids=tuple(ChunkId(chunk_id) for (chunk_id,) in chunks),
            module_keys=tuple(ModuleKey(key) for key, _ in entries),
            document_ids=tuple(document_id for (document_id,) in documents),
            num_bytes=sum(num_bytes for _, num_bytes in entries),
        )

    def purge(self, unowned: Unowned) -> int:
        """Delete what ``unowned`` named, after its entries have left the KV store.

        A chunk that a document has taken up again meanwhile stays, without the records of the
        entries that are gone; so does one of a scaffold (``ScaffoldTable.remove`` comes first); a
        document that has come back stays.

        Returns:
            Number of chunks deleted.
        """
        with self._database.write() as connection:
            delete_entries(connection, unowned.module_keys)
            connection.executemany(
                "DELETE FROM documents WHERE id = ? AND tombstoned_at IS NOT NULL",
                ((document_id,) for document_id in unowned.document_ids),
            )
            deleted = connection.executemany(
                "DELETE FROM chunks WHERE id = ? "
                "AND NOT EXISTS (SELECT 1 FROM ownership WHERE chunk = number) "
                "AND NOT EXISTS (SELECT 1 FROM entries WHERE chunk = number) "
                "AND NOT EXISTS (SELECT 1 FROM scaffold_members WHERE chunk = number)",
                ((chunk_id,) for chunk_id in unowned.chunk_ids),
            )
            return deleted.rowcount if unowned.chunk_ids else 0

    def id(self) -> str:
        """Names this catalog: another one was made anew, whatever its number of changes."""
        found = self.setting(_ID_SETTING)
        if found is None:
            with self._database.write() as connection:
                connection.execute(
                    "INSERT OR IGNORE INTO settings VALUES (?, ?)",
                    (_ID_SETTING, secrets.token_hex(16)),
                )
            found = self.setting(_ID_SETTING)
        return found or ""

    def generation(self) -> int:
        """How many changes of documents there were, by any process: equal means still current."""
        with self._database.read() as connection:
            row = connection.execute("SELECT value FROM counters WHERE name = 'changes'").fetchone()
        return int(row[0]) if row else 0

    def setting(self, name: str) -> str | None:
        """A value that ``put_setting`` stored, or ``None``."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT value FROM settings WHERE name = ?", (name,)
            ).fetchone()
        return str(row[0]) if row else None

    def settings(self, beginning: str) -> Mapping[str, str]:
        """Every setting whose name begins like this."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT name, value FROM settings WHERE substr(name, 1, length(?1)) = ?1 "
                "ORDER BY name",
                (beginning,),
            ).fetchall()
        return {str(name): str(value) for name, value in rows}

    def put_setting(self, name: str, value: str) -> None:
        """Store a value with the corpus, for example the slot length it was created with."""
        self.put_settings({name: value})

    def put_settings(self, values: Mapping[str, str]) -> None:
        """Store several values in one step."""
        with self._database.write() as connection:
            connection.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", values.items())

    def delete_unchanged(self, values: Mapping[str, str]) -> None:
        """Delete settings that still have these values; one that changed meanwhile stays."""
        with self._database.write() as connection:
            connection.executemany(
                "DELETE FROM settings WHERE name = ? AND value = ?", values.items()
            )

    def delete_settings(self, beginning: str) -> None:
        """Delete every setting whose name begins like this."""
        with self._database.write() as connection:
            connection.execute(
                "DELETE FROM settings WHERE substr(name, 1, length(?1)) = ?1", (beginning,)
            )

    def stats(self) -> CatalogStats:
        """Numbers of the catalog, all of one moment."""
        queries = {
            "num_documents": "SELECT count(*) FROM documents WHERE tombstoned_at IS NULL",
            "num_tombstones": "SELECT count(*) FROM documents WHERE tombstoned_at IS NOT NULL",
            "num_chunks": "SELECT count(*) FROM live_chunks",
            "num_unowned_chunks": "SELECT count(*) FROM unowned_chunks",
            "num_tokens": "SELECT coalesce(sum(num_tokens), 0) FROM chunk_tokens "
            "JOIN live_chunks ON number = chunk WHERE tokenizer_id = :tokenizer",
            "num_scaffolds": "SELECT count(*) FROM live_scaffolds",
            "num_entries": "SELECT count(*) FROM all_entries",
            "entry_bytes": "SELECT coalesce(sum(num_bytes), 0) FROM all_entries",
            "num_prefixes": "SELECT count(*) FROM prefixes WHERE tokenizer_id = :tokenizer",
        }
        with self._database.read() as connection:
            return CatalogStats(
                **{
                    name: connection.execute(query, {"tokenizer": self._tokenizer_id}).fetchone()[0]
                    for name, query in queries.items()
                }
            )

    def close(self) -> None:
        """Close the file. Idempotent; later calls raise ``StoreError``."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _count_change(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO counters VALUES ('changes', 1) "
        "ON CONFLICT (name) DO UPDATE SET value = value + 1"
    )
