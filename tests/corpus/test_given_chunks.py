"""Documents that were split elsewhere, and keeping a corpus in step with whoever split them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pc_rag.corpus import Document, chunk_id_of, document_id
from pc_rag.errors import IngestError, LayoutError, StoreIOError
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    chunk_uses,
    opened,
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
