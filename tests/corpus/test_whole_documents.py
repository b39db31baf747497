"""Documents that are one chunk each, for texts that somebody else has split."""

from __future__ import annotations

import hashlib

import pytest

from pc_rag.corpus import Document, chunk_id_of
from pc_rag.errors import LayoutError, StoreIOError
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import HitKind
from tests.support.corpora import CAT, DOG, SHORT, chunk_uses, loaded_model, opened

LONG = " ".join(f"word{number}" for number in range(120))
"""Several chunks of 200 tokens, as a byte is a token."""


def whole(text, **fields):
    """A document of one chunk whose id is a hash of its text, as vector stores have them."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Document(text, **{"id": digest, "is_whole": True} | fields)


@pytest.fixture
def corpus():
    with opened() as corpus:
        yield corpus


def test_text_is_one_chunk_when_its_document_is_whole(corpus):
    """However long, and stripped at both ends as every chunk is."""
    split, prepared = corpus.prepare([Document(LONG), whole(f"\n {LONG}\t\n")])
    assert len(split.chunks) > 1
    assert [chunk.text for chunk in prepared.chunks] == [LONG]
    assert corpus.add([prepared]).num_encoded == 1
    (use,) = chunk_uses(corpus.generate(f"x {LONG} y", SHORT))
    assert (use.label, use.num_tokens) == (chunk_id_of(LONG), len(LONG))


def test_short_text_is_a_chunk_when_its_document_is_whole(corpus):
    """A line, a word; a blank text is known and has no chunk."""
    report = corpus.add([whole("ok"), whole(" \n")])
    assert (report.num_added, report.num_encoded) == (2, 1)
    assert [chunk.text for chunk in corpus.search("ok", 3)] == ["ok"]


def test_document_is_chunked_anew_when_it_becomes_whole(corpus):
    """The way of chunking is part of what a document is."""
    corpus.add([Document(LONG, id="d")])
    num_chunks = corpus.stats().catalog.num_chunks
    assert num_chunks > 1
    assert corpus.add([Document(LONG, id="d", is_whole=True)]).num_updated == 1
    assert corpus.stats().catalog.num_chunks == 1
    assert corpus.add([Document(LONG, id="d", is_whole=True)]).num_unchanged == 1
    assert corpus.add([Document(LONG, id="d")]).num_updated == 1
    assert corpus.stats().catalog.num_chunks == num_chunks


def test_whole_document_is_refused_when_it_is_longer_than_a_slot():
    """With the numbers; nothing of it is taken in."""
    with opened(slot_tokens=100, position_policy="reserved") as corpus:
        with pytest.raises(LayoutError, match=rf"{len(LONG)} tokens, a slot holds 100"):
            corpus.add([whole(LONG)])
        assert corpus.stats().catalog.num_documents == 0


def test_whole_document_is_refused_when_no_prompt_could_hold_it():
    """With the numbers, before anything is encoded."""
    with opened(context_limit=500) as corpus:
        with pytest.raises(LayoutError, match=rf"{len(LONG)} tokens; the context ends at 500"):
            corpus.add([whole(LONG)])
        assert corpus.add([Document(LONG)]).num_encoded > 1


@pytest.mark.parametrize("add_bos", [False, True])
def test_whole_document_is_taken_when_the_shortest_prompt_just_holds_it(add_bos):
    """Itself, BOS where the model wants it, and one token to generate; one more is refused."""
    num_tokens = 99 - add_bos
    one = GenerationConfig(max_new_tokens=1)
    loaded = loaded_model(add_bos=add_bos)
    with opened(context_limit=100, has_retrieval=False, loaded=loaded) as corpus:
        with pytest.raises(LayoutError, match=f"{num_tokens + 1} tokens; the context ends at 100"):
            corpus.add([whole(LONG.replace(" ", "")[: num_tokens + 1])])
        longest = LONG.replace(" ", "")[:num_tokens]
        assert corpus.add([whole(longest)]).num_encoded == 1
        assert corpus.generate(longest, one).metrics.num_generated_tokens == 1


def test_nothing_is_encoded_when_whole_documents_come_again(corpus):
    """Pitfall 39: the same documents twice, then another metadata: no encode."""
    documents = [whole(CAT, source="s"), whole(LONG, source="s", metadata={"page": "1"})]
    assert corpus.add(documents).num_encoded == 2
    again = corpus.add(documents)
    assert (again.num_unchanged, again.num_encoded) == (2, 0)
    edited = corpus.add([whole(LONG, source="s", metadata={"page": "2"})])
    assert (edited.num_metadata_only, edited.num_encoded) == (1, 0)
    assert corpus.search(LONG, 1)[0].metadata == {"page": "2"}


def test_one_tombstone_is_left_when_one_of_many_whole_documents_goes(corpus):
    """Pitfall 40: and it goes again when the document comes back, at no encode."""
    lines = [f"Line {number} tells of the number {number}." for number in range(201)]
    documents = [whole(line, source="s") for line in lines]
    assert corpus.add(documents).num_encoded == 201
    assert corpus.remove(documents[77].id)
    stats = corpus.stats().catalog
    assert (stats.num_tombstones, stats.num_documents, stats.num_chunks) == (1, 200, 200)
    prompt = "\n".join(lines)
    labels = [use.label for use in chunk_uses(corpus.generate(prompt[:1900], SHORT))]
    assert chunk_id_of(lines[77]) not in labels
    found = corpus.search(lines[77], 201)
    assert sorted(chunk.text for chunk in found) == sorted(lines[:77] + lines[78:])

    report = corpus.add([documents[77]])
    assert (report.num_added, report.num_encoded) == (1, 0)
    stats = corpus.stats().catalog
    assert (stats.num_tombstones, stats.num_documents, stats.num_chunks) == (0, 201, 201)
    (use,) = chunk_uses(corpus.generate(f"x {lines[77]}", SHORT))
    assert use.is_hit


def test_old_version_answers_when_encoding_a_whole_document_fails(corpus, monkeypatch):
    """Pitfall 41: it changes in one step or not at all, also in recognition."""
    corpus.add([Document(CAT, id="a", is_whole=True)])
    before = corpus.answer("cat", 1, config=SHORT)

    def fail(*arguments, **keywords):
        raise StoreIOError("the medium is gone")

    with monkeypatch.context() as patch:
        patch.setattr(corpus.engine.source, "encode", fail)
        with pytest.raises(StoreIOError):
            corpus.add([Document(DOG, id="a", is_whole=True)])
    after = corpus.answer("cat", 1, config=SHORT)
    assert [chunk.text for chunk in after.chunks] == [CAT]
    assert after.completion.token_ids == before.completion.token_ids
    assert chunk_uses(after)[0].hit_kind is HitKind.EXACT
    assert chunk_uses(corpus.generate(f"x {DOG}", SHORT)) == []
    assert chunk_uses(corpus.generate(f"x {CAT}", SHORT))[0].is_hit
