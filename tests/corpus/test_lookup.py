"""Search and recognition follow the catalog, whoever changes it, without reading it anew."""

from __future__ import annotations

import threading

import pytest

from pc_rag.corpus import Catalog, Document
from pc_rag.corpus.catalog import chunk_id_of
from pc_rag.corpus.lookup import ChunkLookup
from pc_rag.corpus.publishing import Published
from pc_rag.errors import MissingDependencyError
from tests.support.catalog import chunks_of
from tests.support.corpora import CAT, DOG, EMBEDDING, FISH, TEXTS


class CountingEmbedder:
    """Counts the texts that it embeds."""

    id = EMBEDDING.id

    def __init__(self):
        self.texts = []

    def __call__(self, texts):
        self.texts += texts
        return EMBEDDING(texts)


@pytest.fixture
def catalog(tmp_path):
    with Catalog(tmp_path, tokenizer_id="bytes") as catalog:
        yield catalog


@pytest.fixture
def embedder():
    return CountingEmbedder()


@pytest.fixture
def lookup(catalog, embedder):
    return ChunkLookup(catalog, lambda: embedder)


def add(catalog, text, **fields):
    document = Document(text, **fields)
    before = catalog.generation()
    change = catalog.add_document(document, chunks_of(document), chunking="lines")
    after = catalog.generation()
    chunks = tuple((chunk_id_of(chunk.text), chunk.text) for chunk in chunks_of(document))
    is_alone = change == "added" and after == before + 1
    return Published(chunks, before if is_alone else None, after)


def found(lookup, text):
    return [match.chunk_id for match in lookup.find(text)]


def searched(lookup, question, k=9, **options):
    return [chunk.text for chunk in lookup.search(question, k=k, **options)]


def test_nothing_is_found_when_there_is_no_chunk(lookup):
    """An empty catalog is no error."""
    assert searched(lookup, "cat") == []
    assert found(lookup, CAT) == []


@pytest.mark.parametrize("k", [0, -1])
def test_nothing_is_found_when_nothing_is_wanted(catalog, lookup, k):
    """No chunk is a fair wish."""
    add(catalog, CAT)
    assert searched(lookup, "cat", k=k) == []


@pytest.mark.parametrize("k", [0, -1])
def test_no_embedder_is_made_when_nothing_is_wanted(catalog, k):
    """Nor is the index built."""
    add(catalog, CAT)
    made = []
    lookup = ChunkLookup(catalog, lambda: made.append(1) or EMBEDDING)
    assert lookup.search("cat", k=k) == ()
    assert not made
    assert lookup.search("cat", k=1)
    assert made


def test_all_are_found_when_more_are_wanted_than_there_are(catalog, lookup):
    """Best first, each once."""
    for text in TEXTS:
        add(catalog, text)
    assert searched(lookup, "small silver fish swim", k=100)[0] == FISH
    assert sorted(searched(lookup, "fish", k=100)) == sorted(TEXTS)


def test_changes_are_followed_when_another_process_makes_them(catalog, lookup):
    """Chunks come and go between two calls."""
    add(catalog, CAT, id="a")
    assert searched(lookup, "cat") == [CAT]
    assert found(lookup, f"{CAT} {DOG}") == [chunk_id_of(CAT)]
    add(catalog, DOG, id="b")
    catalog.remove_document("a")
    assert searched(lookup, CAT, k=1) == [DOG], "a chunk that went takes no place"
    assert found(lookup, f"{CAT} {DOG}") == [chunk_id_of(DOG)]
    add(catalog, CAT, id="a")
    assert searched(lookup, "the cat sat on the mat")[0] == CAT
    assert len(found(lookup, f"{CAT} {DOG}")) == 2


def test_many_chunks_are_followed_when_they_come_at_once(catalog, lookup):
    """Above the limit texts are read in one pass."""
    lines = [f"Line {number} has a text of its own." for number in range(300)]
    add(catalog, "\n".join(lines))
    assert len(found(lookup, " ".join(lines))) == 300


def test_chunk_is_embedded_once_when_lookups_come_and_go(catalog, embedder):
    """Vectors are kept in the catalog; a removed chunk that comes back has its own still."""
    first = ChunkLookup(catalog, lambda: embedder)
    add(catalog, CAT, id="a")
    first.search("cat", k=1)
    first.search("cat", k=1)
    second = ChunkLookup(catalog, lambda: embedder)
    assert searched(second, "cat") == [CAT]
    catalog.remove_document("a")
    assert searched(second, "cat") == []
    add(catalog, CAT, id="a")
    assert searched(second, "cat") == [CAT]
    assert embedder.texts.count(CAT) == 1


def test_catalog_is_not_read_anew_when_additions_are_published(catalog, lookup, monkeypatch):
    """An addition costs its own chunks, however many there are; so adding is not quadratic."""
    add(catalog, CAT)
    assert searched(lookup, "cat") == [CAT]
    assert found(lookup, CAT)

    def refuse(*arguments):
        raise AssertionError("the whole catalog was read")

    monkeypatch.setattr(catalog, "live_texts", refuse)
    monkeypatch.setattr(catalog, "chunks_where", refuse)
    monkeypatch.setattr(catalog.vectors, "load", refuse)
    monkeypatch.setattr(catalog.vectors, "missing", refuse)
    for text in (DOG, FISH):
        lookup.published(add(catalog, text))
    assert sorted(searched(lookup, "dog")) == sorted(TEXTS)
    assert len(found(lookup, " ".join(TEXTS))) == 3


def test_vectors_are_not_reloaded_when_a_few_chunks_change(catalog, lookup, monkeypatch):
    """After a change by others only ids are compared, and what is new is embedded."""
    add(catalog, CAT, id="a")
    searched(lookup, "cat")
    monkeypatch.setattr(catalog.vectors, "load", None)
    add(catalog, DOG)
    catalog.remove_document("a")
    assert searched(lookup, "cat") == [DOG]


def test_foreign_change_is_seen_when_it_falls_between_publications(catalog, lookup):
    """Counting changes must not hide one that was not ours."""
    lookup.published(add(catalog, CAT))
    searched(lookup, "cat")
    ours = add(catalog, DOG)
    add(catalog, FISH)
    lookup.published(ours)
    assert sorted(searched(lookup, "dog")) == sorted(TEXTS)
    assert len(found(lookup, " ".join(TEXTS))) == 3


def test_no_chunk_is_lost_when_another_is_published_late(catalog, lookup):
    """The lookup may have followed a change already when its publication comes."""
    late = add(catalog, CAT)
    assert searched(lookup, "cat") == [CAT]
    assert found(lookup, CAT)
    add(catalog, DOG)
    lookup.published(late)
    assert sorted(searched(lookup, "dog")) == sorted([CAT, DOG])
    assert len(found(lookup, f"{CAT} {DOG}")) == 2


def test_former_chunks_go_when_a_document_was_replaced(catalog, lookup):
    """A replacement is followed by comparison: chunks may have gone with the old version."""
    lookup.published(add(catalog, CAT, id="a"))
    assert found(lookup, CAT)
    lookup.published(add(catalog, DOG, id="a"))
    assert searched(lookup, "cat") == [DOG]
    assert found(lookup, f"{CAT} {DOG}") == [chunk_id_of(DOG)]


def test_filter_holds_when_two_tenants_own_one_text(catalog, lookup):
    """Pitfall 37: only documents that match are named, though the chunk is shared."""
    add(catalog, CAT, source="a.txt", metadata={"tenant": "a"})
    add(catalog, CAT, source="b.txt", metadata={"tenant": "b"})
    add(catalog, DOG, source="b.txt", metadata={"tenant": "b"})
    (chunk,) = lookup.search("cat", k=5, where={"tenant": "a"})
    assert (chunk.text, chunk.sources, chunk.metadata) == (CAT, ("a.txt",), {"tenant": "a"})
    assert searched(lookup, "dog", where={"tenant": "a"}) == [CAT]
    assert searched(lookup, "dog", where={"tenant": "c"}) == []
    assert len(searched(lookup, "dog", where={})) == 2


def test_chunk_is_left_out_when_it_goes_during_a_search(catalog, lookup, monkeypatch):
    """No result without a text or an owner, whatever the index still holds."""
    add(catalog, CAT, id="a")
    searched(lookup, "cat")
    generation = catalog.generation()
    catalog.remove_document("a")
    monkeypatch.setattr(catalog, "generation", lambda: generation)
    assert searched(lookup, "cat") == []


def test_index_recovers_when_the_embedder_fails_half_way(catalog):
    """What was embedded before the failure is kept, the rest is done the next time."""
    lines = [f"Line {number} has a text of its own." for number in range(600)]
    add(catalog, "\n".join(lines))
    calls = []

    def embed(texts):
        calls.append(len(texts))
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return EMBEDDING(texts)

    embed.id = EMBEDDING.id
    lookup = ChunkLookup(catalog, lambda: embed)
    with pytest.raises(RuntimeError):
        lookup.search("line", k=1)
    assert len(searched(lookup, "Line", k=1000)) == 600
    assert sum(calls) == 600 + calls[1] + 1  # the batch that failed came twice; and the question


def test_chunks_are_recognised_when_there_is_no_embedder(catalog):
    """A drop-in prompt needs no vectors; a search says what to install."""

    def missing():
        raise MissingDependencyError("the default embedder", "embeddings")

    lookup = ChunkLookup(catalog, missing)
    lookup.published(add(catalog, CAT))
    assert found(lookup, CAT)
    with pytest.raises(MissingDependencyError):
        lookup.search("cat", k=1)


def test_every_lookup_is_whole_when_threads_add_and_find(catalog, lookup):
    """Threads that follow changes at once neither lose nor repeat a chunk."""
    lines = [f"Line {number} has a text of its own." for number in range(60)]
    errors = []

    def work(part):
        try:
            for line in lines[part::3]:
                lookup.published(add(catalog, line))
                assert chunk_id_of(line) in found(lookup, f"x {line} y")
                assert line in searched(lookup, line, k=3)
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(searched(lookup, "line", k=100)) == 60
    assert len(found(lookup, "\n".join(lines))) == 60
