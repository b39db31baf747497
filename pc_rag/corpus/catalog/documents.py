"""Documents, their metadata and the chunks they own: statements within a caller's transaction."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.packing import pack_token_ids
from pc_rag.corpus.catalog.records import DocumentChange, DocumentRecord, chunk_id_of
from pc_rag.corpus.documents import content_digest, document_id
from pc_rag.errors import IngestError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from pc_rag.corpus.catalog.records import NewChunk
    from pc_rag.corpus.documents import Document


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides whether a document changed.

    Attributes:
        id: Its id, given or derived.
        content_digest: See ``pc_rag.corpus.documents.content_digest``.
        chunking: Names the way it is chunked.
    """

    id: str
    content_digest: str
    chunking: str

    @classmethod
    def of(cls, document: Document, chunking: str) -> Identity:
        """The identity of a document that is chunked in the named way."""
        return cls(document_id(document), content_digest(document), chunking)


def compare(
    connection: sqlite3.Connection, document: Document, identity: Identity
) -> DocumentChange:
    """What adding the document would change."""
    row = connection.execute(
        "SELECT number, source, content_digest, chunking FROM documents "
        "WHERE id = ? AND tombstoned_at IS NULL",
        (identity.id,),
    ).fetchone()
    if row is None:
        return DocumentChange.ADDED
    number, source, content_digest, chunking = row
    if (content_digest, chunking) != (identity.content_digest, identity.chunking):
        return DocumentChange.UPDATED
    if source != document.source or metadata_of(connection, number) != document.metadata:
        return DocumentChange.METADATA
    return DocumentChange.UNCHANGED


def added_at(connection: sqlite3.Connection, document_id_: str) -> float:
    """When the live version of a document came, in seconds of the wall clock; 0 without one."""
    row = connection.execute(
        "SELECT added_at FROM documents WHERE id = ? AND tombstoned_at IS NULL", (document_id_,)
    ).fetchone()
    return float(row[0]) if row else 0.0


def upsert_document(connection: sqlite3.Connection, document: Document, identity: Identity) -> int:
    """Write the document's row and metadata; its number."""
    (number,) = connection.execute(
        "INSERT INTO documents (id, source, content_digest, chunking, added_at) "
        "VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET source = excluded.source, "
        "content_digest = excluded.content_digest, chunking = excluded.chunking, "
        "added_at = excluded.added_at, tombstoned_at = NULL RETURNING number",
        (
            identity.id,
            document.source,
            identity.content_digest,
            identity.chunking,
            time.time(),
        ),
    ).fetchone()
    connection.execute("DELETE FROM document_metadata WHERE document = ?", (number,))
    connection.executemany(
        "INSERT INTO document_metadata (name, value, document) VALUES (?, ?, ?)",
        ((name, value, number) for name, value in document.metadata.items()),
    )
    return int(number)


def replace_chunks(
    connection: sqlite3.Connection, number: int, chunks: Sequence[NewChunk], tokenizer_id: str
) -> None:
    """Make a document own these chunks, in this order, and no others."""
    connection.execute("DELETE FROM ownership WHERE document = ?", (number,))
    for ordinal, chunk in enumerate(chunks):
        if not chunk.token_ids or chunk.text != chunk.text.strip():
            raise IngestError(
                f"chunk {ordinal} ({chunk.text[:40]!r}) has {len(chunk.token_ids)} tokens; a chunk "
                f"is stripped text of at least one token"
            )
        chunk_id = chunk_id_of(chunk.text)
        connection.execute(
            "INSERT INTO chunks (id, text) VALUES (?, ?) ON CONFLICT (id) DO NOTHING",
            (chunk_id, chunk.text),
        )
        (row,) = connection.execute("SELECT number FROM chunks WHERE id = ?", (chunk_id,))
        connection.execute(
            "INSERT OR REPLACE INTO chunk_tokens VALUES (?, ?, ?, ?)",
            (row[0], tokenizer_id, len(chunk.token_ids), pack_token_ids(chunk.token_ids)),
        )
        connection.execute("INSERT INTO ownership VALUES (?, ?, ?)", (number, ordinal, row[0]))


def metadata_of(connection: sqlite3.Connection, number: int) -> dict[str, str]:
    """The metadata of the document with this number."""
    return dict(
        connection.execute(
            "SELECT name, value FROM document_metadata WHERE document = ? ORDER BY name", (number,)
        )
    )


def document_records(
    connection: sqlite3.Connection, where: str, values: Iterable[str]
) -> tuple[DocumentRecord, ...]:
    """The live documents that a condition of this package holds for, by id."""
    rows = connection.execute(
        "SELECT number, id, source, content_digest, added_at FROM documents "  # noqa: S608 - constants of ours
        f"WHERE tombstoned_at IS NULL AND {where} ORDER BY id",
        tuple(values),
    ).fetchall()
    return tuple(
        DocumentRecord(
            id=id_,
            source=source,
            metadata=metadata_of(connection, number),
            content_digest=content_digest,
            added_at=added_at,
        )
        for number, id_, source, content_digest, added_at in rows
    )
