"""Streaming text: whole characters, and the same text as decoding at once."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.model.detokenize import Detokenizer
from pc_rag.model.tokenizer import TextTokenizer
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_tokenizers import metaspace_tokenizer

BYTES = TextTokenizer(tiny_tokenizer())
UNIGRAM, BPE, PREPEND = (
    TextTokenizer(metaspace_tokenizer(kind)) for kind in ("unigram", "bpe-first", "bpe-prepend")
)


def stream(tokenizer, token_ids):
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in token_ids], detokenizer.flush()


@pytest.mark.parametrize("text", ["日本語の文", "👩‍👩‍👧 family 🎉", "naïve é", "मनीष"])
def test_characters_come_whole_when_generated_byte_by_byte(text):
    """Pitfall 21: no replacement characters, and each character as soon as it is complete."""
    pieces, rest = stream(BYTES, text.encode())
    assert "".join(pieces) == text
    assert rest == ""
    assert [piece for piece in pieces if piece] == list(text)


def test_leading_space_is_as_decoded_when_the_first_token_has_one():
    """The stream follows decode of the generated ids, which drops the first word's space."""
    ids = UNIGRAM.encode_text("the cat sat", is_first=True)
    pieces, rest = stream(UNIGRAM, ids)
    assert pieces == ["the", " cat", " sat"]
    assert rest == ""


def test_incomplete_bytes_come_at_the_end_when_generation_stops_inside_a_character():
    """Decode shows them as U+FFFD, and so does flush."""
    pieces, rest = stream(BYTES, "a日".encode()[:-1])
    assert "".join(pieces) == "a"
    assert rest == BYTES.decode("a日".encode()[:-1])[1:]
    assert "\ufffd" in rest


def test_control_tokens_are_left_out_when_generated():
    """Special tokens and ids beyond the vocabulary give no text."""
    pieces, rest = stream(BYTES, [97, 258, 299, 98, 259])
    assert ("".join(pieces), rest) == ("ab", "")


@settings(max_examples=150, deadline=None)
@given(token_ids=st.lists(st.integers(0, 259), max_size=30))
def test_stream_equals_decode_when_byte_tokens_are_arbitrary(token_ids):
    """Also for bytes that never make a character."""
    pieces, rest = stream(BYTES, token_ids)
    assert "".join(pieces) + rest == BYTES.decode(token_ids)


@pytest.mark.parametrize("tokenizer", [UNIGRAM, BPE, PREPEND], ids=["unigram", "bpe", "prepend"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stream_equals_decode_when_pieces_are_arbitrary(tokenizer, data):
    """Metaspace and byte fallback, in any order, as long as the bytes make characters."""
    size = tokenizer.backend.get_vocab_size()
    ids = st.lists(st.integers(0, size - 1), max_size=30)
    text_ids = st.text("the cat日é", max_size=12).map(tokenizer.encode_text).map(list)
    token_ids = data.draw(
        st.one_of(ids, st.tuples(ids, text_ids, ids).map(lambda t: [*t[0], *t[1], *t[2]]))
    )
    pieces, rest = stream(tokenizer, token_ids)
    text = tokenizer.decode(token_ids)
    if "\ufffd" not in text:
        assert "".join(pieces) + rest == text


@pytest.mark.parametrize("tokenizer", [BPE, PREPEND], ids=["bpe", "prepend"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_text_is_lost_or_doubled_when_bytes_are_wrong(tokenizer, data):
    """Byte fallback takes back characters of a run; the text around it comes exactly once."""
    high = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(0x80, 0x100)]
    words = [tokenizer.backend.token_to_id(piece) for piece in ("▁the", "cat", "s", "</s>")]
    e_acute = [tokenizer.backend.token_to_id(token) for token in ("<0xC3>", "<0xA9>")]
    runs = st.one_of(
        st.sampled_from(words).map(lambda i: [i]),
        st.sampled_from(high).map(lambda i: [i]),
        st.just(e_acute),
    )
    token_ids = list(chain.from_iterable(data.draw(st.lists(runs, max_size=20))))
    pieces, rest = stream(tokenizer, token_ids)
    expected = [c for c in tokenizer.decode(token_ids) if c.isascii()]
    assert [c for c in "".join(pieces) + rest if c.isascii()] == expected


def test_released_text_stays_when_a_later_byte_is_wrong():
    """The run decodes to U+FFFD as a whole; the stream has already shown its first character."""
    ids = [BPE.backend.token_to_id(token) for token in ("cat", "<0xC3>", "<0xA9>", "<0xFF>", "sat")]
    pieces, rest = stream(BPE, ids)
    assert pieces == ["cat", "", "é", "", "\ufffdsat"]
    assert rest == ""
