"""Entries, prefixes and vectors beside the chunks."""

from __future__ import annotations

import numpy as np
import pytest

from pc_rag.corpus.catalog import Catalog, PrefixRole, chunk_id_of
from pc_rag.corpus.documents import Document
from pc_rag.errors import StoreError
from tests.support.catalog import chunks_of, entry_of


@pytest.fixture
def catalog(tmp_path):
    with Catalog(tmp_path, tokenizer_id="bytes") as opened:
        document = Document("one\ntwo", id="d")
        opened.add_document(document, chunks_of(document), chunking="lines")
        yield opened


def test_entries_are_listed_by_chunk_when_they_are_recorded(catalog):
    """Recording twice changes nothing; forgetting deletes the record."""
    prefix = catalog.prefixes.record("Be brief.", (1, 2), role=PrefixRole.DEFAULT)
    entries = {entry_of("one"), entry_of("one", prefix_id=prefix.id), entry_of("two")}
    catalog.entries.record(entries)
    catalog.entries.record(entries)
    assert set(catalog.entries.of_chunk(chunk_id_of("one"))) == entries - {entry_of("two")}
    assert catalog.entries.of_prefix(prefix.id) == (entry_of("one", prefix_id=prefix.id),)
    assert catalog.stats().entry_bytes == 900
    catalog.entries.forget([entry_of("one").key])
    assert catalog.entries.keys() == {entry.key for entry in entries - {entry_of("one")}}


def test_entry_is_refused_when_its_chunk_is_unknown(catalog):
    """Nothing of the call is recorded."""
    with pytest.raises(StoreError, match="is not in the catalog"):
        catalog.entries.record([entry_of("two"), entry_of("three")])
    assert catalog.entries.keys() == frozenset()


def test_entry_is_left_out_when_its_prefix_is_gone(catalog):
    """A prefix may be forgotten while chunks are encoded behind it; the document is published."""
    entries = [entry_of("two"), entry_of("one", prefix_id="gone")]
    catalog.entries.record(entries)
    assert catalog.entries.keys() == {entry_of("two").key}
    other = Document("one\ntwo", id="other")
    catalog.add_document(other, chunks_of(other), chunking="lines", entries=entries)
    assert catalog.document("other") is not None
    assert catalog.entries.keys() == {entry_of("two").key}


def test_settings_go_when_their_names_begin_as_said(catalog):
    """And no others, whatever characters the beginning has."""
    for name in ("a_ 1", "a_ 2", "ab 1", "b a_ 1"):
        catalog.put_setting(name, "x")
    catalog.delete_settings("a_ ")
    left = {name for name in ("a_ 1", "a_ 2", "ab 1", "b a_ 1") if catalog.setting(name)}
    assert left == {"ab 1", "b a_ 1"}


def test_former_default_is_adopted_when_there_is_a_new_one(catalog):
    """There is one default, and it comes first."""
    prefixes = catalog.prefixes
    first = prefixes.record("first", (1,), role=PrefixRole.DEFAULT)
    adopted = prefixes.record("learned", (2,), role=PrefixRole.ADOPTED)
    second = prefixes.record("second", (3,), role=PrefixRole.DEFAULT)
    found = prefixes.all()
    assert [prefix.id for prefix in found] == [second.id, first.id, adopted.id]
    assert [prefix.role for prefix in found] == ["default", "adopted", "adopted"]
    assert found[0].token_ids == (3,)
    assert prefixes.record("first", (1,), role=PrefixRole.DEFAULT).id == first.id
    assert [prefix.role for prefix in prefixes.all()] == ["default", "adopted", "adopted"]
    assert catalog.stats().num_prefixes == 3


def test_entries_go_too_when_their_prefix_is_removed(catalog):
    """A prefix takes its records along, and no others."""
    prefix = catalog.prefixes.record("learned", (2,), role=PrefixRole.ADOPTED)
    catalog.entries.record([entry_of("one"), entry_of("one", prefix_id=prefix.id)])
    assert catalog.prefixes.remove(prefix.id)
    assert not catalog.prefixes.remove(prefix.id)
    assert catalog.entries.keys() == {entry_of("one").key}


def test_prefixes_are_kept_apart_when_tokenizers_differ(tmp_path, catalog):
    """The same text is another prefix under another tokenizer."""
    catalog.prefixes.record("text", (1,), role=PrefixRole.DEFAULT)
    with Catalog(tmp_path, tokenizer_id="other") as other:
        assert other.prefixes.all() == ()
        other.prefixes.record("text", (9,), role=PrefixRole.DEFAULT)
    assert [prefix.token_ids for prefix in catalog.prefixes.all()] == [(1,)]


def test_vectors_are_kept_apart_when_embedders_differ(catalog):
    """Only vectors of the asked embedder and of live chunks are loaded; missing ones are named."""
    one, two = chunk_id_of("one"), chunk_id_of("two")
    catalog.vectors.record("mini", [one], np.array([[1, 2]], dtype=np.float32))
    catalog.vectors.record("mini", [one, "gone"], np.array([[3, 4], [5, 6]], dtype=np.float32))
    catalog.vectors.record("large", [two], np.ones((1, 3), dtype=np.float32))
    stored = catalog.vectors.load("mini")
    assert stored.chunk_ids == (one,)
    np.testing.assert_array_equal(stored.vectors, [[3, 4]])
    assert catalog.vectors.missing("mini") == ((two, "two"),)
    catalog.remove_document("d")
    assert catalog.vectors.load("mini").vectors.shape == (0, 0)
    assert catalog.vectors.missing("mini") == ()


def test_vectors_are_refused_when_their_number_differs(catalog):
    """One row a chunk."""
    with pytest.raises(StoreError, match="2 vectors for 1 chunks"):
        catalog.vectors.record("mini", [chunk_id_of("one")], np.ones((2, 3), dtype=np.float32))


def test_everything_of_a_chunk_goes_when_it_is_purged(catalog):
    """Tokens and vectors do not outlive their chunk."""
    catalog.vectors.record("mini", [chunk_id_of("one")], np.ones((1, 3), dtype=np.float32))
    catalog.remove_document("d")
    assert catalog.purge(catalog.unowned()) == 2
    with catalog._database.read() as connection:
        for table in ("chunks", "chunk_tokens", "chunk_vectors", "ownership", "documents"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
