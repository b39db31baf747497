"""Documents become nodes; text never vanishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag import pml
from pc_rag.errors import PMLError, SchemaError
from pc_rag.pml import Import, Module, Prompt, RoleBlock, Schema, Text, Union
from pc_rag.types import Role
from tests.support.pml_strategies import schemas, schemas_with_prompts, to_xml

XML_CHARACTERS = st.characters(
    exclude_categories=["Cs"], exclude_characters=[*map(chr, [*range(9), 11, 12, *range(14, 32)])]
).filter(lambda c: c not in "\ufffe\uffff" and (ord(c) & 0xFFFE) != 0xFFFE)


def text_of(body: str) -> str:
    """The text that a module keeps of a body."""
    schema = pml.parse_schema(f'<schema name="s"><module name="m">{body}</module></schema>')
    (module,) = schema.children
    assert all(isinstance(child, Text) for child in module.children)
    return "".join(child.text for child in module.children)


def test_every_node_is_there_when_a_schema_is_parsed():
    """Names, roles, unions, nesting and text arrive as they stand in the document."""
    schema = pml.parse_schema(
        '<schema name="travel"><system>Help.</system><user>Hi <module name="plan">To '
        '<union><module name="miami">Miami</module><module name="rome.v2">Rome</module></union>'
        "</module> soon</user></schema>"
    )
    union = Union((Module("miami", (Text("Miami"),)), Module("rome.v2", (Text("Rome"),))))
    assert schema == Schema(
        "travel",
        (
            RoleBlock(Role.SYSTEM, (Text("Help."),)),
            RoleBlock(
                Role.USER, (Text("Hi "), Module("plan", (Text("To "), union)), Text(" soon"))
            ),
        ),
    )


def test_every_node_is_there_when_a_prompt_is_parsed():
    """Imports nest, whatever they are called, and text stays between them."""
    prompt = pml.parse_prompt(
        '<prompt schema="travel">Now: <plan>with <rome.v2/> first</plan><union/>What?</prompt>'
    )
    plan = Import("plan", (Text("with "), Import("rome.v2"), Text(" first")))
    assert prompt == Prompt("travel", (Text("Now: "), plan, Import("union"), Text("What?")))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("AT&amp;T", "AT&T"),
        ("a &lt; b &gt; c &quot;d&quot; &apos;e&apos;", "a < b > c \"d\" 'e'"),
        ("&#65;&#x4E2D;&#128512;", "A中😀"),
        ("<![CDATA[a < b && <user>]]> tail", "a < b && <user> tail"),
        ("one<!-- not this -->two", "onetwo"),
        ("one<?pi not this?>two<?pi?>three", "onetwothree"),
        ("<!-- <module> --><![CDATA[<!-- kept -->]]>", "<!-- kept -->"),
        ("汉字 한글 😀👩‍👩‍👧 é", "汉字 한글 😀👩‍👩‍👧 é"),
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        ("one&#13;two", "one\rtwo"),
        ("\u00a0", "\u00a0"),
        ("<![CDATA[]]>x<![CDATA[]]>", "x"),
    ],
)
def test_text_is_kept_exactly_when_it_is_hard(body, text):
    """Entities, CDATA, comments, processing instructions and any script (pitfall 12)."""
    assert text_of(body) == text


def test_text_is_kept_when_it_stands_before_between_and_after_elements():
    """Heads and tails of every element are text of the enclosing one (pitfall 12)."""
    schema = pml.parse_schema(
        '<schema name="s">1<module name="a">2<module name="b">3</module>4</module>5'
        '<!-- c -->6<module name="c"/>7</schema>'
    )
    a, b = Module("a", (Text("2"), Module("b", (Text("3"),)), Text("4"))), Module("c")
    assert schema.children == (Text("1"), a, Text("56"), b, Text("7"))


@settings(deadline=None)
@given(schemas())
def test_nodes_survive_when_a_schema_is_written_and_parsed(schema):
    """Nothing is lost or invented on the way through XML."""
    assert pml.parse_schema(to_xml(schema)) == schema


@settings(deadline=None)
@given(schemas_with_prompts())
def test_nodes_survive_when_a_prompt_is_written_and_parsed(pair):
    """Nothing is lost or invented on the way through XML."""
    prompt = pair[1]
    assert pml.parse_prompt(to_xml(prompt)) == prompt


@settings(max_examples=300, deadline=None)
@given(st.text(XML_CHARACTERS, min_size=1))
def test_every_character_survives_when_whitespace_is_preserved(text):
    """With xml:space="preserve" a text comes back as it was, whatever it holds."""
    schema = Schema("s", (Text(text),))
    assert pml.parse_schema(to_xml(schema)) == schema
    assert pml.parse_schema(to_xml(schema).encode()) == schema


@settings(max_examples=300, deadline=None)
@given(st.text(XML_CHARACTERS))
def test_visible_characters_survive_when_whitespace_is_cleaned(text):
    """The whitespace rule takes spaces, tabs and line feeds only."""
    (*_, prompt_text) = pml.parse_prompt(
        f'<prompt schema="s">{to_xml(Text(text))}</prompt>'
    ).children or (Text(""),)
    drop = str.maketrans("", "", " \t\n")
    assert prompt_text.text.translate(drop) == text.translate(drop)


def test_places_are_real_when_nodes_are_located():
    """Line and column are those of the tag and of the first visible character."""
    schema = pml.parse_schema(
        '<?xml version="1.0"?>\r\n<!-- head -->\r\n<schema name="s">\r\n'
        '  中文 <module\r\n     name="a"><!-- c -->\r\n   x</module> <module name="b"/>\r\n'
        "</schema>"
    )
    text, a, b = schema.children
    assert (schema.location.line, schema.location.column) == (3, 1)
    assert (text.location.line, text.location.column) == (4, 3)
    assert (a.location.line, a.location.column) == (4, 6)
    assert (a.children[0].location.line, a.children[0].location.column) == (6, 4)
    assert (b.location.line, b.location.column) == (6, 15)


@pytest.mark.parametrize("tag", ["a", "b"])
def test_places_stay_right_when_attributes_hold_markup_characters(tag):
    """A '>' inside of an attribute or comment ends no tag."""
    with pytest.raises(SchemaError) as caught:
        pml.parse_schema(f"<schema name='s' x='a>b\"'><!-- > < --><![CDATA[<c>]]><{tag}/></schema>")
    assert [(p.line, p.column) for p in caught.value.problems] == [(1, 1), (1, 54)]


def test_file_is_named_when_it_breaks_a_rule(tmp_path):
    """Errors of a file begin with its path."""
    path = tmp_path / "travel.xml"
    path.write_text('<schema name="travel"><modul name="a"/></schema>', encoding="utf-8")
    with pytest.raises(SchemaError) as caught:
        pml.read_schema(path)
    assert str(caught.value).startswith(f"{path}: line 1, column 23: unknown tag <modul>")
    assert "did you mean <module>?" in str(caught.value)


def test_file_is_parsed_when_it_is_good(tmp_path):
    """The schema remembers which file it is from."""
    path = tmp_path / "travel.xml"
    path.write_bytes('<schema name="travel">é</schema>'.encode())
    schema = pml.read_schema(path)
    assert schema.children == (Text("é"),)
    assert schema.source == str(path)


def test_error_says_so_when_a_file_is_missing(tmp_path):
    """A missing file is a PMLError that names the path and the reason."""
    with pytest.raises(PMLError, match=r"none\.xml: cannot be read: No such file"):
        pml.read_schema(tmp_path / "none.xml")
