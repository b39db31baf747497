"""XML that PML refuses is refused fast, with line and column."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from pc_rag import pml
from pc_rag.errors import PMLSyntaxError, PromptError
from pc_rag.pml import Text
from pc_rag.pml.tree import MAX_ATTRIBUTES, MAX_DEPTH

BILLION_LAUGHS = (
    '<?xml version="1.0"?>\n<!DOCTYPE schema [<!ENTITY a "lol">'
    + "".join(f'<!ENTITY {n} "{f"&{m};" * 10}">' for m, n in zip("abcdefghi", "bcdefghij"))  # noqa: B905 - equal lengths
    + ']>\n<schema name="s">&j;</schema>'
)


def refused(document):
    with pytest.raises(PMLSyntaxError) as caught:
        pml.parse_schema(document)
    return caught.value.problems


@pytest.mark.parametrize(
    ("document", "line", "column", "hint"),
    [
        ('<schema name="s">AT&T</schema>', 1, 22, "&amp;"),
        ('<schema name="s">\n  a < b</schema>', 2, 6, "&lt;"),
        ('<schema name="s">\n  中文 < b</schema>', 2, 7, "&lt;"),
        ('<schema name="s">&nbsp;</schema>', 1, 24, "only &amp; &lt;"),
        ('<schema name="s"><module name="a"></schema>', 1, 44, "close every tag"),
        ('<schema name="a<b"/>', 1, 16, "write < as &lt;"),
        ('<schema name="s" name="t"/>', 1, 26, "remove one"),
        ('<schema name="s">a ]]> b</schema>', 1, 20, "write > as &gt;"),
        ('<schema name="s"/><schema name="t"/>', 1, 19, "one root element"),
        ("", 1, 1, "<schema>"),
        ("no markup", 1, 1, "<schema>"),
        ('<schema name="s"><xi:include href="/etc/passwd"/></schema>', 1, 50, "no namespaces"),
    ],
)
def test_fault_is_located_when_xml_is_not_well_formed(document, line, column, hint):
    """Faults are reported with line, column and what to do; nothing is repaired (pitfall 13)."""
    (problem,) = refused(document)
    assert problem.line == line
    assert abs(problem.column - column) <= 2, "libxml2 points at the fault or right behind it"
    assert hint in problem.message


@pytest.mark.parametrize("text", ["a<b c", "if a<b and c>d", "<module name=x/>", "<module name/>"])
def test_advice_is_to_escape_when_a_bare_sign_begins_what_is_no_tag(text):
    """XML takes it for a tag, and misses what a tag has (pitfall 13)."""
    first, *_ = refused(f'<schema name="s">{text}</schema>')
    assert "where this is text and no tag, write < as &lt;" in first.message


@pytest.mark.parametrize(
    "prolog",
    [
        "<!DOCTYPE schema>",
        '<!DOCTYPE schema SYSTEM "file:///etc/passwd">',
        '<!DOCTYPE schema [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE schema [<!ENTITY % p SYSTEM "http://localhost/x"> %p;]>',
    ],
)
def test_dtd_is_refused_when_it_declares_anything(prolog):
    """No entity is declared, no file or host is read (pitfall 14)."""
    document = f'<?xml version="1.0"?><!-- <!DOCTYPE no> -->\n {prolog}<schema name="s"/>'
    (problem,) = refused(document)
    assert (problem.line, problem.column) == (2, 2)
    assert "DTD" in problem.message


def test_dtd_is_refused_when_it_hides_in_another_encoding():
    """What is checked is characters, not bytes."""
    document = '<!DOCTYPE schema [<!ENTITY x "y">]><schema name="s">&x;</schema>'
    (problem,) = refused(document.encode("utf-16"))
    assert "DTD" in problem.message


@pytest.mark.parametrize(
    "document",
    [
        BILLION_LAUGHS,
        "<schema>" * 100_000,
        '<schema name="s">' + '<module name="a">' * 99_999 + "</module>" * 99_999 + "</schema>",
        '<prompt schema="s">' + "<a>" * 100_000,
    ],
    ids=["billion laughs", "open tags", "nested modules", "nested imports"],
)
@pytest.mark.parametrize("parse", [pml.parse_schema, pml.parse_prompt])
def test_bomb_is_refused_fast_when_it_would_grow(document, parse):
    """Refused in well under a second, in memory of the document's own size (pitfall 14)."""
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(PMLSyntaxError) as caught:
        parse(document)
    seconds = time.process_time() - start
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.problems[0].line > 0
    assert caught.value.problems[0].column > 0
    assert seconds < 1
    assert peak_bytes < 20 * len(document) + 1_000_000


@pytest.mark.parametrize("num_levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_depth_is_limited_when_elements_nest(num_levels):
    """The limit is exact, and the element beyond it is located."""
    nested = num_levels - 1
    opened = "".join(f'\n<module name="m{i}">' for i in range(nested))
    document = f'<schema name="s">{opened}{"</module>" * nested}</schema>'
    if num_levels <= MAX_DEPTH:
        assert pml.parse_schema(document)
    else:
        (problem,) = refused(document)
        assert (problem.line, problem.column) == (MAX_DEPTH + 1, 1)
        assert str(MAX_DEPTH) in problem.message


@pytest.mark.parametrize("num_attributes", [MAX_ATTRIBUTES, MAX_ATTRIBUTES + 1, 100_000])
def test_attributes_are_counted_when_there_are_many(num_attributes):
    """The limit is exact; beyond it they are not read at all, which would take minutes."""
    arguments = "".join(f' a{i}="\n"' for i in range(num_attributes - 1))
    start = time.process_time()
    with pytest.raises((PMLSyntaxError, PromptError)) as caught:
        pml.parse_prompt(f"<prompt schema='s'{arguments}/>")
    assert time.process_time() - start < 5
    if num_attributes <= MAX_ATTRIBUTES:
        assert len(caught.value.problems) == num_attributes - 1
    else:
        (problem,) = caught.value.problems
        assert f"has {num_attributes:,} attributes; at most 1,000" in problem.message


def test_namespaces_are_refused_when_declared():
    """Every declaration is named."""
    problems = refused(
        '<schema name="s" xmlns="urn:a">\n<module name="m" xmlns:xi="urn:b">'
        '<xi:include href="x"/></module></schema>'
    )
    assert [(p.line, p.column) for p in problems] == [(1, 1), (2, 1)]


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16"])
def test_bytes_are_read_when_their_encoding_marks_itself(codec):
    """UTF-8 by default, byte order marks are honoured."""
    schema = pml.parse_schema('<schema name="s">é中😀</schema>'.encode(codec))
    assert schema.children == (Text("é中😀"),)


def test_bytes_are_read_when_their_encoding_is_declared():
    """The declaration counts for bytes; characters have been decoded already."""
    document = '<?xml version="1.0" encoding="ISO-8859-1"?><schema name="s">é</schema>'
    for form in (document, document.encode("latin-1")):
        assert pml.parse_schema(form).children == (Text("é"),)


@pytest.mark.parametrize(
    ("document", "place", "message"),
    [
        (b'<schema name="s">\nab\xff</schema>', (2, 3), "byte 0xff is not utf-8"),
        (b'<?xml version="1.0" encoding="utf-7"?><schema name="s"/>', (1, 1), "'utf-7'"),
        ('<schema name="s">\ud800</schema>', (1, 18), "surrogate"),
        ('<schema name="s">\x00</schema>', (1, 18), ""),
        ('<schema name="s">&#0;</schema>', (1, 22), ""),
    ],
)
def test_characters_are_refused_when_they_are_none(document, place, message):
    """Undecodable bytes and forbidden characters are located, never replaced."""
    problem = refused(document)[0]
    assert (problem.line, problem.column) == place
    assert message in problem.message


def test_text_is_refused_when_it_is_larger_than_the_parser_allows():
    """Ten megabytes of one text are refused in words, not cut."""
    (problem,) = refused(f'<schema name="s">{"x" * 10_000_001}</schema>')
    assert "10,000,000 bytes" in problem.message


@pytest.mark.parametrize(
    "piece",
    [
        "<!-- c -->x",
        "<?p?>x",
        '<module name="m{}"/>',
        "x\n",
        '<param name="p{}" len="3"/>x',
        "<user>x</user>",
        '<scaffold name="s{0}"><module name="a{0}"/><module name="b{0}"/></scaffold>',
    ],
)
def test_time_is_linear_when_a_document_repeats(piece):
    """No pass over a document is quadratic: 50,000 repetitions stay under seconds."""
    body = "".join(piece.format(i) for i in range(50_000 // max(1, piece.count("name="))))
    start = time.process_time()
    pml.parse_schema(f'<schema name="s">{body}</schema>')
    assert time.process_time() - start < 5
