"""Documents become nodes; text never vanishes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag import pml
from pc_rag.errors import PMLError, PromptError, SchemaError
from pc_rag.pml import (
    Import,
    Module,
    Parameter,
    Prompt,
    RoleBlock,
    Scaffold,
    Schema,
    Text,
    Turn,
    Union,
)
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


def test_parameters_are_there_when_a_schema_declares_them():
    """Both tags take both spellings of the length; defaults are those of the reference."""
    schema = pml.parse_schema(
        '<schema name="s">for<param name="days" len="5"/>.<user>In <parameter name="city" '
        'length="1000000" scaffold="a &lt;city&gt;" default="Rome,&#10;&#9;&quot;IT&quot;" '
        'pad="space"/></user><module name="m"><param name="days" length="1" pad="none" '
        'default=""/></module>'
        '<parameter name="schema_" len="2"/></schema>'
    )
    city = Parameter(
        name="city",
        max_tokens=1_000_000,
        scaffold="a <city>",
        default='Rome,\n\t"IT"',
        pads_with_space=True,
    )
    assert schema.children == (
        Text("for"),
        Parameter(name="days", max_tokens=5),
        Text("."),
        RoleBlock(Role.USER, (Text("In "), city)),
        Module("m", (Parameter(name="days", max_tokens=1, default=""),)),
        Parameter(name="schema_", max_tokens=2),
    )


def test_scaffolds_are_there_when_a_schema_declares_them():
    """Their members hold text, parameters and turns; unions name a member of theirs."""
    schema = pml.parse_schema(
        '<schema name="s"><scaffold name="both">\n<module name="a">A<param name="p" len="1"/>'
        '</module> <module name="b"><user>B</user></module></scaffold>'
        '<union scaffold="d"><module name="c"/><module name="d"/></union></schema>'
    )
    a = Module("a", (Text("A"), Parameter(name="p", max_tokens=1)))
    b = Module("b", (RoleBlock(Role.USER, (Text("B"),)),))
    union = Union((Module("c"), Module("d")), scaffold="d")
    assert schema.children == (Scaffold("both", (a, b)), union)


def test_modules_are_uncached_when_one_around_them_is():
    """What an uncached module holds is not stored either, through unions and turns."""
    schema = pml.parse_schema(
        '<schema name="s"><module name="a" cache="false">x<user><union><module name="b"/></union>'
        '</user><module name="c" cache="false"/></module><module name="d" cache="true"/>'
        '<module name="e"/></schema>'
    )
    union = Union((Module("b", is_cached=False),))
    turn, c = RoleBlock(Role.USER, (union,)), Module("c", is_cached=False)
    a = Module("a", (Text("x"), turn, c), is_cached=False)
    assert schema.children == (a, Module("d"), Module("e"))


def test_scaffold_is_taken_when_some_of_it_is_uncached():
    """It still imports all of its members; only nothing of them together is stored."""
    schema = pml.parse_schema(
        '<schema name="s"><module name="m" cache="false"><scaffold name="k"><module name="a"/>'
        '<module name="b"/></scaffold></module><scaffold name="l"><module name="c"/>'
        '<module name="d" cache="false"/></scaffold></schema>'
    )
    a, b, d = (Module(name, is_cached=False) for name in "abd")
    outer = Module("m", (Scaffold("k", (a, b)),), is_cached=False)
    assert schema.children == (outer, Scaffold("l", (Module("c"), d)))


def test_arguments_and_turns_are_there_when_a_prompt_has_them():
    """Attributes are arguments; tags of roles are turns; tags may be paths."""
    prompt = pml.parse_prompt(
        '<prompt schema="s" days="3" name="x"><system>Be <tone xml:space="preserve"/></system>'
        '<trip.v2.rome schema="y" city="a &amp;&#10;b" days=""><user>Hi</user></trip.v2.rome>'
        "</prompt>"
    )
    assert prompt == Prompt(
        "s",
        (
            Turn(Role.SYSTEM, (Text("Be "), Import("tone"))),
            Import(
                "trip.v2.rome",
                (Turn(Role.USER, (Text("Hi"),)),),
                arguments={"schema": "y", "city": "a &\nb", "days": ""},
            ),
        ),
        arguments={"days": "3", "name": "x"},
    )
    assert prompt.children[1].arguments == {"schema": "y", "city": "a &\nb", "days": ""}
    assert prompt.arguments == {"days": "3", "name": "x"}


def test_places_are_real_when_the_new_nodes_are_located():
    """Parameters, scaffolds and turns have the place of their tag."""
    schema = pml.parse_schema(
        '<schema name="s">\n ä<param name="p" len="1"/>\n  <scaffold name="x"><module name="a"/>'
        '<module name="b"/></scaffold>\n</schema>'
    )
    (turn,) = pml.parse_prompt('<prompt schema="s">\n <user>x</user></prompt>').children
    _, parameter, _, scaffold = schema.children
    assert (parameter.location.line, parameter.location.column) == (2, 3)
    assert (scaffold.location.line, scaffold.location.column) == (3, 3)
    assert (scaffold.members[1].location.line, scaffold.members[1].location.column) == (3, 40)
    assert (turn.location.line, turn.location.column) == (2, 2)


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize(
    "document", ["<prompt schema='s' {}/>", "<prompt schema='s'><a {}/></prompt>"]
)
def test_line_breaks_are_located_when_values_hold_them(document, quote):
    """XML would turn them into spaces; each attribute is named at its first one (pitfall 12)."""
    other = '"' if quote == "'" else "'"
    values = f"x={quote}{other}>\n\t{quote}  y = {quote}1\t2\n{quote}\nz={quote}&#10;&#9;{quote}"
    document = document.format(values)
    with pytest.raises(PromptError) as caught:
        pml.parse_prompt(document)
    column = document.index("\n") + 1
    found = [(p.line, p.column, p.message[:13]) for p in caught.value.problems]
    assert found == [(1, column, "attribute 'x'"), (2, 11, "attribute 'y'")]


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
