"""Chunks fit, lose nothing and end where readers would pause."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.corpus.chunking import Chunker
from pc_rag.errors import ConfigError, LayoutError


def count_pieces(text):
    """Like a byte-level tokenizer: words up to five letters, and every other character."""
    return len(re.findall(r" ?[^\W\d_]{1,5}|\s+(?=\S)|\s|.", text))


def count_bytes(text):
    """Several tokens a character."""
    return len(text.encode())


def split(text, max_tokens, count=count_pieces):
    return Chunker(count, max_tokens=max_tokens).split(text)


texts = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from(["\n\n", "\n", " ", ". ", "。", "word", "a longer sentence. ", "x" * 90]),
    ),
    max_size=60,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(4, 60), st.sampled_from([count_pieces, count_bytes]))
def test_no_text_is_lost_when_it_is_split(text, max_tokens, count):
    """Chunks are in order, stripped, within the limit; between them there is only whitespace."""
    end = 0
    for chunk in split(text, max_tokens, count):
        assert chunk.text == text[chunk.start : chunk.end] == chunk.text.strip() != ""
        assert chunk.num_tokens == count(chunk.text) <= max_tokens
        assert not text[end : chunk.start].strip()
        end = chunk.end
    assert not text[end:].strip()


def test_chunks_are_near_full_when_paragraphs_are_short():
    """Paragraphs are merged up to the limit."""
    text = "\n\n".join(f"Paragraph {n} has a few words only." for n in range(200))
    sizes = [chunk.num_tokens for chunk in split(text, 128)]
    assert min(sizes[:-1]) > 0.8 * 128
    assert all("\n\n" in chunk.text for chunk in split(text, 128)[:-1])


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("one two three.\nfour five six\n\nseven eight nine. ten", "six"),
        ("one two three\nfour five. six seven\neight nine ten eleven", "seven"),
        ("one two three four five six. Seven eight nine ten one two three four", "six."),
        ("one two three four five six seven eight nine ten one two three four", " two"),
    ],
    ids=["paragraph", "line", "sentence", "word"],
)
def test_strongest_boundary_is_taken_when_several_would_do(text, ends):
    """Paragraph before line before sentence before word."""
    assert split(text, 12)[0].text.endswith(ends)


def test_weaker_boundary_is_taken_when_a_stronger_one_leaves_a_chunk_empty():
    """A title is not a chunk of its own."""
    text = "Title\n\n" + "one two three four five six. " * 20
    assert split(text, 30)[0].text.endswith("six.")


def test_chinese_is_cut_behind_sentences_when_there_are_no_spaces():
    """A full-width stop ends a sentence without a space behind it."""
    sentence = "这是一个关于缓存的句子。"
    chunks = split(sentence * 10, 40, count=len)
    assert all(chunk.text.endswith("。") for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == sentence * 10


def test_string_is_cut_between_characters_when_it_has_no_boundary():
    """Pitfall 10: 10,000 tokens without a space become full chunks."""
    chunks = split("0" * 10_000, 256)
    assert "".join(chunk.text for chunk in chunks) == "0" * 10_000
    assert all(chunk.num_tokens > 0.9 * 256 for chunk in chunks[:-1])


@pytest.mark.parametrize("text", ["", " ", "\n\n \t\u3000"])
def test_there_is_no_chunk_when_text_is_whitespace(text):
    """Whitespace alone is not worth an entry."""
    assert split(text, 16) == []


def test_tokens_are_counted_linearly_when_text_is_long():
    """The work is a few tokenisations a chunk, not one of the rest of the text."""
    counted = []

    def count(text):
        counted.append(len(text))
        return count_pieces(text)

    text = "Some words of a sentence that goes on. " * 3000 + "0" * 20_000
    chunks = split(text, 128, count)
    assert sum(counted) < 6 * len(text)
    assert len(counted) < 6 * len(chunks)


def test_character_is_refused_when_it_exceeds_the_limit():
    """A character of four tokens cannot be in a chunk of three; numbers are named."""
    with pytest.raises(LayoutError, match="takes 4 tokens, more than the chunk limit of 3"):
        split("ab 🙂", 3, count_bytes)


def test_limit_is_refused_when_it_is_not_positive():
    """A chunk of no tokens is no chunk."""
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        Chunker(len, max_tokens=0)


def test_ids_differ_when_limits_differ():
    """A document is chunked anew when the limit changes."""
    assert Chunker(len, max_tokens=64).id != Chunker(len, max_tokens=65).id
