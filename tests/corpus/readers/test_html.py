"""HTML becomes the text a reader sees."""

from __future__ import annotations

import pytest

from pc_rag.corpus.readers.html import html_to_text
from pc_rag.errors import IngestError


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a  b\n c</p><p>d</p>", "a b c\n\nd"),
        ("<div>a<div>b</div></div>c", "a\n\nb\n\nc"),
        ("a <b>bold</b>, <i>it</i>alic", "a bold, italic"),
        ("a<br>b", "a\nb"),
        ("<ul><li>a<li><p>b</p></ul>", "- a\n\n- b"),
        ("<ul><li>a</li><li>b</li></ul>", "- a\n- b"),
        ("<table><tr><th>x</th><th>y</th></tr><tr><td>1<td>2</table>", "x | y\n1 | 2"),
        ("<pre>def f():\n    <b>return</b> 1\n</pre>end", "def f():\n    return 1\n\n\nend"),
        ("a<script>b</script><style>c</style><!-- d --><template>e</template>f", "af"),
        ("<!DOCTYPE html><html><head><title>t</title></head><body>x</body></html>", "x"),
        ("1 &lt; 2 &amp; caf&eacute; &#x1F642;", "1 < 2 & café 🙂"),
        ("", ""),
    ],
)
def test_text_is_what_a_reader_sees_when_a_page_is_read(page, text):
    """Blocks are on lines of their own, inline markup joins, what is unseen is dropped."""
    assert html_to_text(page.encode(), "p.html")[0] == text


def test_text_is_kept_when_tags_nest_deeply():
    """Deeper than Python recurses."""
    page = "<div>" * 20_000 + "deep" + "</div>" * 20_000
    assert html_to_text(page.encode(), "p.html") == ("deep", "")


def test_declared_encoding_is_used_when_a_page_is_not_utf8():
    """A page may say its encoding; one that does not is refused, not guessed."""
    page = '<meta charset="iso-8859-1"><p>café</p>'.encode("latin-1")
    assert html_to_text(page, "p.html")[0] == "café"
    with pytest.raises(IngestError, match=r"p\.html: byte 6 \(0xE9\) is not UTF-8"):
        html_to_text("<p>café</p>".encode("latin-1"), "p.html")
    with pytest.raises(IngestError, match="declares the encoding 'nonsense'"):
        html_to_text(page.replace(b"iso-8859-1", b"nonsense"), "p.html")
