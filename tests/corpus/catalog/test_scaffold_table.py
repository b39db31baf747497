"""Scaffolds in the catalog, and catalogs that were made before there were any."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from pc_rag.corpus.catalog import (
    Catalog,
    PrefixRole,
    ScaffoldEntry,
    ScaffoldRecord,
    chunk_id_of,
    scaffold_id_of,
)
from pc_rag.corpus.catalog.catalog import FILE_NAME
from pc_rag.corpus.catalog.schema import APPLICATION_ID, MIGRATIONS
from pc_rag.corpus.documents import Document
from pc_rag.types import Fingerprint, ModuleKey
from tests.support.catalog import chunks_of, entry_of

ONE, TWO = chunk_id_of("one"), chunk_id_of("two")


def scaffold_of(*chunk_ids, separator="-"):
    return ScaffoldRecord(
        id=scaffold_id_of(chunk_ids, separator), chunk_ids=chunk_ids, separator=separator
    )


def entry(scaffold, *, prefix_id=None, key="k"):
    return ScaffoldEntry(
        key=ModuleKey(key),
        scaffold_id=scaffold.id,
        prefix_id=prefix_id,
        fingerprint=Fingerprint("model"),
        num_bytes=10,
    )


def add(catalog, text="one\ntwo", **fields):
    document = Document(text, **{"id": "d"} | fields)
    catalog.add_document(document, chunks_of(document), chunking="lines")


@pytest.fixture
def catalog(tmp_path):
    with Catalog(tmp_path, tokenizer_id="bytes") as opened:
        add(opened)
        yield opened


def test_ids_differ_when_order_or_separator_do():
    """A scaffold is its chunks in their order with a text between them."""
    ids = {
        scaffold_id_of(chunks, separator)
        for chunks in ((ONE, TWO), (TWO, ONE), (ONE, TWO, ONE))
        for separator in ("", "-", "\n")
    }
    assert len(ids) == 9


def test_scaffolds_are_listed_when_they_are_recorded(catalog):
    """In the order they came, once each, with their chunks in order."""
    first, second = scaffold_of(TWO, ONE), scaffold_of(ONE, TWO)
    for scaffold in (first, second, first):
        assert catalog.scaffolds.record(scaffold, [entry(scaffold, key=scaffold.id)])
    assert catalog.scaffolds.live() == (first, second)
    assert catalog.scaffolds.entries_of(first.id) == {first.id: 10}
    assert catalog.scaffolds.dead() == ()
    stats = catalog.stats()
    assert (stats.num_scaffolds, stats.num_entries, stats.entry_bytes) == (2, 2, 20)
    assert catalog.entries.keys() == {first.id, second.id}


def test_nothing_is_recorded_when_a_chunk_is_unknown(catalog):
    """It may have gone while the scaffold was encoded."""
    scaffold = scaffold_of(ONE, chunk_id_of("three"))
    assert catalog.scaffolds.record(scaffold, [entry(scaffold)]) is False
    assert catalog.scaffolds.live() == ()
    assert catalog.stats().num_entries == 0


def test_revision_changes_when_documents_or_scaffolds_do(catalog):
    """And does not where a scaffold is recorded again, or one removed that is not there."""
    revisions = [catalog.scaffolds.revision()]
    scaffold = scaffold_of(ONE, TWO)
    for change in (
        lambda: catalog.scaffolds.record(scaffold, []),
        lambda: catalog.remove_document("d"),
        lambda: catalog.scaffolds.remove([scaffold.id]),
    ):
        change()
        revisions.append(catalog.scaffolds.revision())
    assert len(set(revisions)) == 4
    catalog.scaffolds.remove([scaffold.id])
    assert catalog.scaffolds.revision() == revisions[-1]


def test_scaffold_is_dead_when_one_of_its_chunks_is_unowned(catalog):
    """And its chunks are not purged before it is removed."""
    scaffold = scaffold_of(ONE, TWO)
    catalog.scaffolds.record(scaffold, [entry(scaffold)])
    add(catalog, "one")
    assert catalog.scaffolds.live() == ()
    assert catalog.scaffolds.dead() == (scaffold,)
    assert catalog.stats().num_scaffolds == 0
    assert catalog.purge(catalog.unowned()) == 0
    catalog.scaffolds.remove([scaffold.id])
    assert catalog.scaffolds.dead() == ()
    assert catalog.stats().num_entries == 0
    assert catalog.purge(catalog.unowned()) == 1


def test_entries_go_when_their_prefix_does(catalog):
    """Those behind a prefix that is gone already are left out."""
    prefix = catalog.prefixes.record("Be brief.", (1, 2), role=PrefixRole.ADOPTED)
    scaffold = scaffold_of(ONE, TWO)
    entries = [
        entry(scaffold),
        entry(scaffold, prefix_id=prefix.id, key="p"),
        entry(scaffold, prefix_id="gone", key="g"),
    ]
    catalog.scaffolds.record(scaffold, entries)
    assert set(catalog.scaffolds.entries_of(scaffold.id)) == {"k", "p"}
    assert catalog.scaffolds.keys_behind(prefix.id) == {"p"}
    catalog.prefixes.remove(prefix.id)
    assert set(catalog.scaffolds.entries_of(scaffold.id)) == {"k"}


def test_entry_is_not_the_scaffolds_own_when_a_chunk_has_it_too(catalog):
    """It must not leave the store with the scaffold."""
    scaffold = scaffold_of(ONE, TWO)
    catalog.entries.record([entry_of("one")])
    catalog.scaffolds.record(scaffold, [entry(scaffold, key=entry_of("one").key)])
    assert catalog.scaffolds.entries_of(scaffold.id) == {}


def test_catalog_is_brought_up_to_date_when_an_older_version_made_it(tmp_path):
    """Documents and entries of version 1 stay, and scaffolds can be made."""
    with Catalog(tmp_path / "new", tokenizer_id="bytes") as new:
        add(new)
        new.entries.record([entry_of("one")])
        expected = new.stats()
    with closing(sqlite3.connect(tmp_path / "new" / FILE_NAME)) as source:
        source.row_factory = sqlite3.Row
        (tmp_path / "old").mkdir()
        with closing(sqlite3.connect(tmp_path / "old" / FILE_NAME)) as old:
            old.executescript(MIGRATIONS[0])
            tables = ["counters", "documents", "chunks", "chunk_tokens", "ownership", "entries"]
            for table in tables:
                for row in source.execute(f"SELECT * FROM {table}"):
                    marks = ", ".join("?" * len(row))
                    old.execute(f"INSERT INTO {table} VALUES ({marks})", tuple(row))
            old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            old.execute("PRAGMA user_version = 1")
            old.commit()
    for _ in range(2):
        with Catalog(tmp_path / "old", tokenizer_id="bytes") as catalog:
            assert catalog.stats() == expected
            assert [chunk.text for chunk in catalog.chunks_of("d")] == ["one", "two"]
    scaffold = scaffold_of(ONE, TWO)
    with Catalog(tmp_path / "old", tokenizer_id="bytes") as catalog:
        assert catalog.scaffolds.record(scaffold, [entry(scaffold)])
    with Catalog(tmp_path / "old", tokenizer_id="bytes") as catalog:
        assert catalog.scaffolds.live() == (scaffold,)
