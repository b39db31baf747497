"""Bytes become text, or the byte that prevents it is named."""

from __future__ import annotations

import pytest

from pc_rag.corpus.readers.text import decode_text
from pc_rag.errors import IngestError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ab\xff", r"a\.txt: byte 2 \(0xFF\) is not UTF-8"),
        (b"\xef\xbb\xbfab\xff", r"byte 5 \(0xFF\)"),
        (b"ab\xe2\x82", r"byte 2 \(0xE2\) is not UTF-8 \(unexpected end of data\)"),
        ("text".encode("utf-16-le"), "byte 1 is NUL"),
    ],
)
def test_byte_is_named_when_it_is_not_text(data, message):
    """The offset counts bytes of the file, a byte order mark included."""
    with pytest.raises(IngestError, match=message):
        decode_text(data, "a.txt")


def test_line_ends_are_plain_when_a_file_has_others():
    """Windows and old Macintosh line ends become one kind."""
    assert decode_text(b"a\r\nb\rc\n", "a.txt") == "a\nb\nc\n"
