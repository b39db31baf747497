"""Documents of one chunk a line, tokenised by bytes, for tests of the catalog."""

from __future__ import annotations

import hashlib

from pc_rag.corpus.catalog import EntryRecord, NewChunk, chunk_id_of
from pc_rag.types import Fingerprint, ModuleKey


def chunks_of(document):
    """One chunk a line."""
    return [NewChunk(line, tuple(line.encode())) for line in document.text.split("\n")]


def texts_of(chunks):
    """The texts of chunk records."""
    return [chunk.text for chunk in chunks]


def entry_of(text, *, prefix_id=None):
    """The record of an entry of the chunk with this text."""
    key = hashlib.sha256(f"entry {text} {prefix_id}".encode()).hexdigest()
    return EntryRecord(
        key=ModuleKey(key),
        chunk_id=chunk_id_of(text),
        prefix_id=prefix_id,
        fingerprint=Fingerprint("model"),
        num_bytes=100 * len(text),
    )
