"""Documents that were split elsewhere, and keeping a corpus in step with whoever split them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from pc_rag.corpus import Catalog, Corpus, Document, PromptFormat, chunk_id_of, document_id
from pc_rag.errors import IngestError, LayoutError, StoreIOError
from pc_rag.kv.memory_tier import MemoryTier
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    chunk_uses,
    loaded_model,
    opened,
    tiny_engine,
)

LONG = " ".join(f"word{number}" for number in range(120))
"""Longer than a chunk of the corpus, as a byte is a token."""


def given(*texts, **fields):
    """A document that was split elsewhere."""
    return Document.of_chunks(texts, **{"id": "d"} | fields)


@pytest.fixture
def corpus():
    with opened() as corpus:
        yield corpus


def served(corpus, *texts):
    """The ids of the chunks that are found in a prompt of these texts."""
    return [use.label for use in chunk_uses(corpus.generate(" | ".join(texts), SHORT))]


def entries_of(corpus, *texts):
    return [part.key for part in corpus.plan(" | ".join(texts)).plan.cached]


def test_every_text_is_one_chunk_when_a_document_was_split_elsewhere(corpus):
    """However long or short, stripped and in order; blank ones are left out."""
    (prepared,) = corpus.prepare([given(f" {LONG}\n", "ok", " \n", CAT, "ok")])
    assert [chunk.text for chunk in prepared.chunks] == [LONG, "ok", CAT, "ok"]
    assert prepared.document.text == f"{LONG}\n\nok\n\n{CAT}\n\nok"
    assert corpus.add([prepared]).num_encoded == 3
    assert corpus.upkeep.chunk_texts("d") == (LONG, "ok", CAT, "ok")
    assert served(corpus, CAT, LONG) == [chunk_id_of(CAT), chunk_id_of(LONG)]


def test_nothing_is_encoded_when_given_chunks_come_again(corpus):
    """Pitfall 39: the same twice, then other metadata: no encode."""
    assert corpus.add([given(CAT, LONG)]).num_encoded == 2
    again = corpus.add([given(CAT, LONG)])
    assert (again.num_unchanged, again.num_encoded) == (1, 0)
    edited = corpus.add([given(CAT, LONG, metadata={"page": "2"}, source="s")])
    assert (edited.num_metadata_only, edited.num_encoded) == (1, 0)
    (record,) = corpus.documents()
    assert (record.source, record.metadata) == ("s", {"page": "2"})
    assert corpus.upkeep.chunk_texts("d") == (CAT, LONG)


def test_only_new_chunks_are_encoded_when_a_given_document_changes(corpus):
    """Order counts, and what went is no longer recognised."""
    corpus.add([given(CAT, DOG)])
    changed = corpus.add([given(FISH, CAT)])
    assert (changed.num_updated, changed.num_encoded) == (1, 1)
    assert corpus.upkeep.chunk_texts("d") == (FISH, CAT)
    assert served(corpus, DOG, CAT) == [chunk_id_of(CAT)]
    turned = corpus.add([given(CAT, FISH)])
    assert (turned.num_updated, turned.num_encoded) == (1, 0)
    assert corpus.upkeep.chunk_texts("d") == (CAT, FISH)


def test_documents_differ_when_only_the_borders_of_their_chunks_do(corpus):
    """The same text split in another way is another version, and another derived id."""
    one, two, plain = given("a b", "c d"), given("a b\n\nc d"), Document("a b\n\nc d", id="d")
    assert one.text == two.text == plain.text
    assert len({document_id(replace(each, id=None)) for each in (one, two, plain)}) == 3
    for document, chunks in ((one, ("a b", "c d")), (two, ("a b\n\nc d",)), (plain, (plain.text,))):
        assert corpus.add([document]).num_updated + (document is one) == 1
        assert corpus.upkeep.chunk_texts("d") == chunks
        assert corpus.add([document]).num_unchanged == 1


def test_given_document_can_be_empty_when_all_its_texts_are_blank(corpus):
    """It is known, and has no chunk; a former version of it is gone."""
    corpus.add([given(CAT)])
    assert corpus.add([given(" ", "\n")]).num_updated == 1
    assert corpus.upkeep.chunk_texts("d") == ()
    assert [record.id for record in corpus.documents()] == ["d"]
    assert served(corpus, CAT) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Document("a", chunks=("b",)), "not the 1 chunks"),
        (lambda: Document(" a", chunks=(" a",)), "not the 1 chunks"),
        (lambda: Document("a", chunks=("a",), is_whole=True), "is_whole"),
        (lambda: Document.of_chunks("text"), "single str"),
        (lambda: Document.of_chunks(3), "single int"),
        (lambda: Document.of_chunks(["a", 3]), "number 1 is a int"),
        (lambda: Document.of_chunks(["a\ud800"]), "surrogate"),
    ],
)
def test_document_is_refused_when_its_chunks_are_none(make, message):
    """Chunks that are not those of the text, whole documents, single texts, no texts."""
    with pytest.raises(IngestError, match=message):
        make()


def test_given_chunk_is_refused_when_no_prompt_could_hold_it():
    """With document, chunk and numbers, before anything is encoded."""
    with opened(context_limit=500) as corpus:
        with pytest.raises(LayoutError, match=rf"'d', chunk 1 .*{len(LONG)} tokens.* 500 "):
            corpus.add([given(CAT, LONG)])
        assert corpus.documents() == ()


def test_given_chunk_is_refused_when_it_is_longer_than_a_slot():
    """Named as well."""
    with (
        opened(slot_tokens=100, position_policy="reserved") as corpus,
        pytest.raises(LayoutError, match=rf"'d', chunk 1: .*{len(LONG)} tokens, a slot holds 100"),
    ):
        corpus.add([given(CAT, LONG)])


def test_old_version_answers_when_encoding_a_given_document_fails(corpus, monkeypatch):
    """Pitfall 41: all of its chunks change in one step, or none does."""
    corpus.add([given(CAT, DOG)])

    def fail(*arguments, **keywords):
        raise StoreIOError("the medium is gone")

    with monkeypatch.context() as patch:
        patch.setattr(corpus.engine.source, "encode", fail)
        with pytest.raises(StoreIOError):
            corpus.add([given(CAT, FISH)])
    assert corpus.upkeep.chunk_texts("d") == (CAT, DOG)
    assert served(corpus, DOG, CAT, FISH) == [chunk_id_of(DOG), chunk_id_of(CAT)]


def test_documents_are_listed_when_their_ids_begin_alike(corpus):
    """By id; the beginning is plain text, not a pattern."""
    corpus.add([given(CAT, id="a%/1"), given(DOG, id="a%/2"), given(FISH, id="ab/3")])
    corpus.remove("a%/2")
    assert [record.id for record in corpus.documents()] == ["a%/1", "ab/3"]
    assert [record.id for record in corpus.documents(id_beginning="a%")] == ["a%/1"]
    assert corpus.upkeep.chunk_texts("a%/2") == ()


def test_unknown_chunks_come_behind_known_ones_when_they_are_ensured(corpus):
    """Nothing is dropped, and source and metadata stay; a whole document has its own order."""
    corpus.add([given(CAT, DOG, source="s", metadata={"k": "v"})])
    report = corpus.upkeep.ensure([given(FISH, DOG), given("ok", id="new")])
    assert (report.num_encoded, report.num_updated, report.num_added) == (2, 1, 1)
    assert corpus.upkeep.chunk_texts("d") == (CAT, DOG, FISH)
    assert corpus.upkeep.chunk_texts("new") == ("ok",)
    assert corpus.documents(id_beginning="d")[0].metadata == {"k": "v"}
    corpus.upkeep.ensure([given(FISH, DOG, CAT)])
    assert corpus.upkeep.chunk_texts("d") == (FISH, DOG, CAT)
    again = corpus.upkeep.ensure([given(DOG)])
    assert (again.num_encoded, again.num_unchanged) == (0, 1)


def test_missing_entries_are_encoded_when_they_are_ensured(corpus):
    """Those that left the store, behind every prefix; none where all are there."""
    corpus.add([given(CAT, DOG)])
    for key in entries_of(corpus, CAT, DOG):
        corpus.engine.store.remove(key)
    assert corpus.upkeep.ensure([given(DOG)]).num_encoded == 2
    assert corpus.upkeep.ensure([given(CAT, DOG)]).num_encoded == 0
    uses = chunk_uses(corpus.generate(f"{CAT} {DOG}", SHORT))
    assert [use.is_hit for use in uses] == [True, True]


def test_document_is_refused_when_it_is_ensured_without_chunks(corpus):
    """Which part of it is missing could not be said."""
    with pytest.raises(IngestError, match="of_chunks"):
        corpus.upkeep.ensure([Document(CAT, id="d")])


def test_entries_are_stored_again_when_the_folder_was_deleted_under_the_corpus(tmp_path):
    """Pitfall 42: memory holds them still, and a restart would find nothing."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add([given(CAT, DOG)])
        shutil.rmtree(tmp_path / "kv")
        assert corpus.add([given(CAT, DOG)]).num_encoded == 2
    with opened(tmp_path, has_retrieval=False) as corpus:
        assert corpus.add([given(CAT, DOG)]).num_encoded == 0
        assert all(use.is_hit for use in chunk_uses(corpus.generate(f"{CAT} {DOG}", SHORT)))


def test_revision_changes_when_documents_do(corpus):
    """At every change, also one that takes another back; not for what was there."""
    found = [corpus.upkeep.revision]
    for change in (
        lambda: corpus.add([given(CAT)]),
        lambda: corpus.add([given(CAT, DOG)]),
        lambda: corpus.add([given(CAT)]),
        lambda: corpus.remove("d"),
        lambda: corpus.add([given(CAT)]),
    ):
        change()
        found.append(corpus.upkeep.revision)
    assert len(set(found)) == len(found)
    corpus.add([given(CAT)])
    corpus.generate(CAT, SHORT)
    assert corpus.upkeep.revision == found[-1]


def test_revision_changes_when_folders_or_the_model_are_others(tmp_path):
    """Pitfall 42: the store or the catalog deleted, other weights, another prompt format."""

    def revision(**options):
        with opened(tmp_path, has_retrieval=False, **options) as corpus:
            return corpus.upkeep.revision

    first = revision()
    assert revision() == first
    others = [
        revision(loaded=loaded_model(seed=1)),
        revision(prompt_format=PromptFormat(prefix="Read.")),
    ]
    shutil.rmtree(tmp_path / "kv")
    others.append(revision())
    assert revision() == others[-1]
    shutil.rmtree(tmp_path / "catalog")
    others.append(revision())
    assert len({first, *others}) == 5


def test_catalog_has_one_id_when_it_is_opened_twice(tmp_path):
    """Two of one folder agree, another folder's differs."""
    with Catalog(tmp_path / "a", tokenizer_id="t") as one, Catalog(
        tmp_path / "a", tokenizer_id="u"
    ) as two, Catalog(tmp_path / "b", tokenizer_id="t") as other:  # fmt: skip
        assert one.id() == two.id() != other.id()


def test_revision_is_the_same_when_two_corpora_share_folder_and_store(tmp_path):
    """Whoever remembers it may ask another process."""
    store = MemoryTier(1 << 30)
    with tiny_engine(store) as engine:
        one = Corpus(engine, tmp_path, has_retrieval=False)
        two = Corpus(engine, tmp_path, has_retrieval=False)
        one.add([given(CAT)])
        assert one.upkeep.revision == two.upkeep.revision
        one.close()
        two.close()
