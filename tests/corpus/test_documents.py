"""Documents hold valid text and get stable ids."""

from __future__ import annotations

import pytest

from pc_rag.corpus.documents import Document, as_documents, document_id
from pc_rag.errors import IngestError

PINNED_ID = "0b01b5b4b97de3328899d25c9d35622815914a61c1bedff6c5113f886b9d5cea"


def test_given_id_is_kept_when_there_is_one():
    """A caller's id names the document."""
    assert document_id(Document("text", id="mine")) == "mine"


def test_derived_id_is_pinned_when_there_is_none():
    """Pitfall 35, 43: the same text and source have the same id in every process."""
    document = Document("text", source="a.md", metadata={"k": "v", "a": "b"})
    assert document_id(document) == PINNED_ID
    assert document_id(Document("text", None, "a.md", {"a": "b", "k": "v"})) == PINNED_ID


def test_derived_ids_differ_when_anything_differs():
    """Pitfall 37: the same text under two tenants is two documents."""
    documents = [
        Document("text"),
        Document("text", source="a"),
        Document("texta"),
        Document("text", metadata={"tenant": "a"}),
        Document("text", metadata={"tenant": "b"}),
        Document("text", metadata={"tenan": "ta"}),
    ]
    assert len({document_id(document) for document in documents}) == len(documents)


def test_metadata_is_copied_when_the_caller_goes_on_using_it():
    """A document does not change when the mapping it was made of does."""
    metadata = {"k": "v"}
    document = Document("text", metadata=metadata)
    metadata["k"] = "other"
    assert document.metadata == {"k": "v"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "a\ud800"}, r"character 1 is the lone surrogate U\+D800"),
        ({"text": "a", "id": "\udcff"}, r"id: character 0 is the lone surrogate"),
        ({"text": "a", "metadata": {"k": "\udcff"}}, r"metadata 'k': character 1"),
        ({"text": "a", "id": ""}, "the id is empty"),
        ({"text": "a", "metadata": {"page": 3}}, "metadata 'page' = 3"),
    ],
)
def test_document_is_refused_when_it_cannot_be_stored(arguments, message):
    """Refused where it is made, with what is wrong."""
    with pytest.raises(IngestError, match=message):
        Document(**arguments, source="a.md")


@pytest.mark.parametrize("wrong", [123, None, b"text", {"text": "a"}])
def test_item_is_refused_when_it_is_no_document(wrong):
    """Where it is reached, with what it is; those before it are fine."""
    documents = as_documents(["fine", wrong])
    assert next(documents) == Document("fine")
    with pytest.raises(IngestError, match=rf"is a {type(wrong).__name__}; pass Document or str"):
        next(documents)
