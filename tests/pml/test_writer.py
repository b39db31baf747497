"""Written documents read back as the same nodes, or are not written at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.errors import PromptError, SchemaError
from pc_rag.pml import (
    Import,
    Module,
    Parameter,
    Prompt,
    RoleBlock,
    Schema,
    Text,
    Union,
    parse_prompt,
    parse_schema,
    write_prompt,
    write_schema,
)
from pc_rag.pml.tree import MAX_DEPTH
from pc_rag.types import Role
from tests.support.pml_strategies import schemas, schemas_with_prompts

_CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(
    lambda c: (c >= " " or c in "\t\n\r") and c not in "\ufffe\uffff"
)
XML_TEXTS = st.text(st.sampled_from("\t\n\r <>&\"'];!-?a") | _CHARACTERS, min_size=1)


def refused(write, node, kind=SchemaError):
    with pytest.raises(kind) as caught:
        write(node)
    return [problem.message for problem in caught.value.problems]


@given(schemas())
def test_schema_reads_back_equal_when_written(schema):
    """Whatever a schema declares, it is in its document."""
    assert parse_schema(write_schema(schema)) == schema


@given(schemas_with_prompts())
def test_prompt_reads_back_equal_when_written(pair):
    """Whatever a prompt imports and says, it is in its document."""
    _, prompt = pair
    assert parse_prompt(write_prompt(prompt)) == prompt


@given(XML_TEXTS)
def test_text_reads_back_exactly_when_it_looks_like_markup(text):
    """Markup, carriage returns, blanks at every border and any script stay what they are."""
    schema = Schema(
        "s", (Text(text), Module("m", (Text(text),)), RoleBlock(Role.USER, (Text(text),)))
    )
    assert parse_schema(write_schema(schema)) == schema
    prompt = Prompt("s", (Import("m", (Text(text),)), Text(text)))
    assert parse_prompt(write_prompt(prompt)) == prompt


@given(XML_TEXTS)
def test_attribute_reads_back_exactly_when_it_looks_like_markup(text):
    """Quotes, tabs and line breaks in scaffolds, defaults and arguments stay what they are."""
    parameter = Parameter(name="p", max_tokens=3, scaffold=text, default=text, pads_with_space=True)
    schema = Schema("s", (parameter, Module("m", (parameter,))))
    assert parse_schema(write_schema(schema)) == schema
    prompt = Prompt("s", (Import("m", arguments={"p": text}),), arguments={"p": text})
    assert parse_prompt(write_prompt(prompt)) == prompt


def test_schema_is_refused_when_it_would_read_back_as_another():
    """A node of the caller's own kind is written as what it derives from, and is not that."""

    class Chapter(Module):
        pass

    with pytest.raises(SchemaError, match="would read back as other nodes"):
        write_schema(Schema("s", (Chapter("m", (Text("x"),)),)))


def test_schema_is_refused_when_an_uncached_module_would_hold_a_cached_one():
    """What a document cannot say is not written as something else."""
    schema = Schema("s", (Module("m", (Module("n"),), is_cached=False),))
    (message,) = refused(write_schema, schema)
    assert 'cache="true" in a module with cache="false"' in message


@pytest.mark.parametrize(
    "text",
    ["a & b < c > d", "]]>", "<user>&amp;</user>", "\r\n", "\t a\n\n ", "<!--x-->", "\u0085\u2028"],
)
def test_text_is_escaped_when_xml_would_read_it_otherwise(text):
    """The characters that XML treats as its own, one by one (pitfall 12)."""
    schema = Schema("s", (Module("m", (Text(text),)),))
    assert parse_schema(write_schema(schema)) == schema


def test_texts_are_one_when_nothing_lies_between_them():
    """XML knows no border between texts, and no empty ones."""
    schema = Schema("s", (Text("a"), Text(""), Text("b"), Module("m", (Text(""),))))
    assert parse_schema(write_schema(schema)) == Schema("s", (Text("ab"), Module("m")))


@pytest.mark.parametrize("bad", ["\0", "\x0b", "\x1f", "\ud800", "\ufffe", "\uffff"])
def test_character_is_refused_when_xml_cannot_hold_it(bad):
    """No escape exists for them, so each is named with its offset."""
    (message,) = refused(write_schema, Schema("s", (Module("m", (Text(f"ab{bad}"),)),)))
    assert f"U+{ord(bad):04X} at offset 2" in message
    (message,) = refused(write_prompt, Prompt("s", (Text(bad),)), PromptError)
    assert f"U+{ord(bad):04X} at offset 0" in message


def test_every_problem_is_told_when_a_schema_breaks_rules():
    """One error holds those of XML and those of PML, in the order of the document (pitfall 15)."""
    schema = Schema(
        "1st",
        (
            Union(()),
            Module("m", (Text("\0"),)),
            Union((Module("m"), Module("a b"))),
            RoleBlock(Role.USER, (RoleBlock(Role.SYSTEM),)),
            RoleBlock(Role.TOOL),
        ),
    )
    messages = refused(write_schema, schema)
    expected = [
        "name='1st' of <schema>",
        "<union> has no member",
        "U+0000",
        "'m' is already declared",
        "name='a b' of <module>",
        "<system> inside <user>",
        "role 'tool' has no tag",
    ]
    assert len(messages) == len(expected)
    for message, part in zip(messages, expected, strict=True):
        assert part in message


@pytest.mark.parametrize("name", ["m/><other", 'm x="1"', "", "1", "a:b", "user", "m\n", "<", "é!"])
def test_import_is_refused_when_its_name_would_become_markup(name):
    """A tag cannot be escaped, so no name is written before it has been checked."""
    (message,) = refused(write_prompt, Prompt("s", (Import(name, (Text("x"),)),)), PromptError)
    assert f"import {name!r} is not the name" in message


@pytest.mark.parametrize("name", ["a b", 'a="1" b', "", "2", "xml:space", "schema"])
def test_argument_is_refused_when_its_name_would_become_markup(name):
    """An attribute's name cannot be escaped either, and each stands once."""
    (message,) = refused(write_prompt, Prompt("s", (), arguments={name: "x"}), PromptError)
    assert f"{name!r}" in message


def test_schema_is_refused_when_it_nests_deeper_than_the_parser_reads():
    """The deepest that parses is written; far deeper ones are refused, not a stack overflow."""

    def nested(depth):
        module = Module("m")
        for _ in range(depth - 2):
            module = Module("m", (module,))
        return Schema("s", (module,))

    assert parse_schema(write_schema(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 2000):
        (message,) = refused(write_schema, nested(depth))
        assert f"{MAX_DEPTH} levels" in message


def test_nodes_are_refused_when_they_would_read_back_as_others():
    """What is no node of PML in its place never becomes a document that says something else."""
    schema = Schema("s", (Union((Module("m"),)),))
    wrong = replace(schema, children=(Import("module"), *schema.children))
    assert refused(write_schema, wrong)
