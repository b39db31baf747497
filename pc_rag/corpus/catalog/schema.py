"""The catalog's tables."""

from __future__ import annotations

SCHEMA_VERSION = 2
"""Stored as ``PRAGMA user_version``; raised with every change of the tables."""

APPLICATION_ID = 0x70635247
"""``pcRG``; tells a catalog from other SQLite files."""

_DOCUMENTS = """
CREATE TABLE settings (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE counters (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE documents (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL,
    content_digest TEXT NOT NULL,
    chunking TEXT NOT NULL,
    added_at REAL NOT NULL,
    tombstoned_at REAL
);
CREATE INDEX documents_by_source ON documents (source);

CREATE TABLE document_metadata (
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    document INTEGER NOT NULL REFERENCES documents (number) ON DELETE CASCADE,
    PRIMARY KEY (name, value, document)
) WITHOUT ROWID;
CREATE INDEX metadata_by_document ON document_metadata (document);

CREATE TABLE chunks (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL
);

CREATE TABLE chunk_tokens (
    chunk INTEGER NOT NULL REFERENCES chunks (number) ON DELETE CASCADE,
    tokenizer_id TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    token_ids BLOB NOT NULL,  -- little-endian int32
    PRIMARY KEY (chunk, tokenizer_id)
);

CREATE TABLE chunk_vectors (
    chunk INTEGER NOT NULL REFERENCES chunks (number) ON DELETE CASCADE,
    embedder_id TEXT NOT NULL,
    vector BLOB NOT NULL,  -- little-endian float32
    PRIMARY KEY (chunk, embedder_id)
);

CREATE TABLE ownership (
    document INTEGER NOT NULL REFERENCES documents (number) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL,
    chunk INTEGER NOT NULL REFERENCES chunks (number),
    PRIMARY KEY (document, ordinal)
) WITHOUT ROWID;
CREATE INDEX ownership_by_chunk ON ownership (chunk);

CREATE TABLE prefixes (
    id TEXT PRIMARY KEY,
    tokenizer_id TEXT NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,  -- little-endian int32
    role TEXT NOT NULL CHECK (role IN ('default', 'adopted'))
);
CREATE UNIQUE INDEX one_default ON prefixes (tokenizer_id) WHERE role = 'default';

CREATE TABLE entries (
    key TEXT PRIMARY KEY,
    chunk INTEGER NOT NULL REFERENCES chunks (number),
    prefix_id TEXT REFERENCES prefixes (id),
    fingerprint TEXT NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX entries_by_chunk ON entries (chunk);
CREATE INDEX entries_by_prefix ON entries (prefix_id);

CREATE VIEW live_ownership AS
    SELECT ownership.document, ownership.ordinal, ownership.chunk
    FROM ownership JOIN documents ON documents.number = ownership.document
    WHERE documents.tombstoned_at IS NULL;

CREATE VIEW live_chunks AS
    SELECT number, id, text FROM chunks
    WHERE EXISTS (SELECT 1 FROM live_ownership WHERE live_ownership.chunk = chunks.number);

CREATE VIEW unowned_chunks AS
    SELECT number, id FROM chunks
    WHERE NOT EXISTS (SELECT 1 FROM live_ownership WHERE live_ownership.chunk = chunks.number);
"""
"""The tables of version 1."""

_SCAFFOLDS = """
CREATE TABLE scaffolds (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    separator TEXT NOT NULL
);

CREATE TABLE scaffold_members (
    scaffold INTEGER NOT NULL REFERENCES scaffolds (number) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL,
    chunk INTEGER NOT NULL REFERENCES chunks (number),
    PRIMARY KEY (scaffold, ordinal)
) WITHOUT ROWID;
CREATE INDEX members_by_chunk ON scaffold_members (chunk);

CREATE TABLE scaffold_entries (
    key TEXT PRIMARY KEY,
    scaffold INTEGER NOT NULL REFERENCES scaffolds (number) ON DELETE CASCADE,
    prefix_id TEXT REFERENCES prefixes (id),
    fingerprint TEXT NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX scaffold_entries_by_scaffold ON scaffold_entries (scaffold);
CREATE INDEX scaffold_entries_by_prefix ON scaffold_entries (prefix_id);

CREATE VIEW live_scaffolds AS
    SELECT number, id, separator FROM scaffolds
    WHERE NOT EXISTS (
        SELECT 1 FROM scaffold_members JOIN unowned_chunks
        ON unowned_chunks.number = scaffold_members.chunk
        WHERE scaffold_members.scaffold = scaffolds.number
    );

CREATE VIEW all_entries AS
    SELECT key, prefix_id, num_bytes FROM entries
    UNION ALL SELECT key, prefix_id, num_bytes FROM scaffold_entries;
"""

MIGRATIONS = {0: _DOCUMENTS, 1: _SCAFFOLDS}
"""By version of a catalog (0 of an empty file): the statements that make the next one of it."""
