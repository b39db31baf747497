"""Which tokens of a chunk a head has, and which tokens of a text a part of a chunk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from pc_rag.corpus.parts import PartText, head_tokens, label_parts
from pc_rag.corpus.recognition import ChunkPart, Recognized
from pc_rag.model.tokenizer import TextTokenizer
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_tokenizers import metaspace_tokenizer

MERGES = (("t", "h"), ("th", "e"), ("\u0120", "the"), ("c", "a"), ("ca", "t"), ("\u0120", "cat"))
WITH_SPACE = (*MERGES, (".", "\u0120"), ("\u0120", "\u0120"))


def trimming_tokenizer():
    """Its post-processor trims spaces off the places of tokens, as GPT-2's does."""
    hf = tiny_tokenizer(merges=WITH_SPACE)
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    hf.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return TextTokenizer(hf)


TOKENIZERS = {
    "bytes": TextTokenizer(tiny_tokenizer()),
    "merges": TextTokenizer(tiny_tokenizer(merges=MERGES)),
    "trimming": trimming_tokenizer(),
    "unigram": TextTokenizer(metaspace_tokenizer("unigram")),
    "fallback": TextTokenizer(metaspace_tokenizer("bpe-prepend")),
}


def head_of(name, text, num_chars):
    tokenizer = TOKENIZERS[name]
    return head_tokens(tokenizer, text, tokenizer.encode_text(text), num_chars)


TEXT = st.text("the cat.\u00e9\u8a9e\U0001f642 ", min_size=1, max_size=40)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, data=st.data())
def test_tokens_of_a_head_are_the_text_that_they_stand_for(name, text, data):
    """They lie inside it, cut no character, and one more token would not."""
    num_chars = data.draw(st.integers(0, len(text)))
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode_text(text)
    places = tokenizer.locate_text(text).places
    head = head_of(name, text, num_chars)
    num_read = head.num_read if head else 0
    if head:
        assert head.token_ids == token_ids
        assert 0 < num_read <= len(token_ids)
        assert max(end for _, end in places[:num_read]) == head.num_chars <= num_chars
        assert all(begin >= head.num_chars for begin, _ in places[num_read:])
        if name in ("bytes", "merges", "trimming"):
            assert tokenizer.decode(token_ids[:num_read]) == text[: head.num_chars]
    more = [end for _, end in places[: num_read + 1]]
    assert num_read == len(token_ids) or max(more) > num_chars or places[num_read][0] < max(
        end for _, end in places[num_read:]
    )  # fmt: skip


def test_character_is_not_cut_when_several_tokens_make_it():
    """An emoji is four byte tokens, which are read all or not at all."""
    text = "ab\U0001f642cd"
    assert [head_of("bytes", text, n).num_read for n in (1, 2, 3, 4, 5)] == [1, 2, 6, 7, 8]
    assert head_of("bytes", "\U0001f642", 0) is None


def test_token_is_left_out_when_the_head_ends_inside_it():
    """What is left of the head becomes text."""
    head = head_of("merges", "the cat the cat", 6)
    assert (head.num_read, head.num_chars) == (1, 3)
    assert head_of("merges", "the cat", 2) is None


def test_space_belongs_to_its_token_when_a_post_processor_trims_places():
    """``". "`` is one token here; a head that ends at the full stop does not have it."""
    assert len(TOKENIZERS["trimming"].encode_text("the. ")) == 2
    assert head_of("trimming", "the. dog", 4).num_chars == 3
    assert head_of("trimming", "the. dog", 5).num_chars == 5


def test_no_token_is_read_when_the_text_makes_other_ones():
    """A chunk that was stored with other tokens is never cut by guess."""
    tokenizer = TOKENIZERS["merges"]
    assert head_tokens(tokenizer, "the cat", tuple(b"the cat"), 5) is None


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("is_first", [True, False])
@settings(max_examples=40, deadline=None)
@given(text=TEXT, edges=st.lists(st.integers(0, 40), max_size=4))
def test_labelled_text_has_the_tokens_of_the_whole_text(name, is_first, text, edges):
    """Parts cut no token; the tokens of each lie inside it."""
    tokenizer = TOKENIZERS[name]
    edges = sorted({min(edge, len(text)) for edge in edges})
    parts = [
        Recognized(str(number), start, end, ChunkPart.TAIL)
        for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=False))
    ]
    pieces = list(label_parts(tokenizer, text, parts, is_first=is_first))
    assert all(pieces)
    ids = [i for p in pieces for i in (p.token_ids if isinstance(p, PartText) else p)]
    assert tuple(ids) == tokenizer.encode_text(text, is_first=is_first)
    if name == "bytes":
        for part in parts:
            standing = text[part.start : part.end].encode()
            labelled = [p.token_ids for p in pieces if getattr(p, "chunk_id", "") == part.chunk_id]
            assert labelled == ([tuple(standing)] if standing else [])


def test_nothing_is_given_when_the_text_is_empty():
    """No piece without tokens."""
    assert list(label_parts(TOKENIZERS["bytes"], "", (), is_first=True)) == []
