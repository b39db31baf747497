"""The whitespace rule, case by case."""

from __future__ import annotations

from pathlib import Path

import pytest

from pc_rag import pml
from pc_rag.pml import Text
from pc_rag.pml.whitespace import clean_text


def body_of(body, *, tag="module", indent=""):
    opened = '<module name="m">' if tag == "module" else f"<{tag}>"
    schema = pml.parse_schema(f'<schema name="s">\n{indent}{opened}{body}</{tag}>\n</schema>')
    (element,) = schema.children
    return [child.text for child in element.children if isinstance(child, Text)]


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("inline", ["inline"]),
        (" spaced ", [" spaced "]),
        ("\n    block\n  ", ["block\n"]),
        ("\n\n\n    block\n\n\n  ", ["block\n"]),
        ("\n    one\n      two\n    three\n", ["one\n  two\nthree\n"]),
        ("\n    one\n\n \n    two\n", ["one\n\n\ntwo\n"]),
        ("\n\tone\n\t\ttwo\n", ["one\n\ttwo\n"]),
        ("\n\tone\n  two\n", ["\tone\n  two\n"]),
        ("\n  a <module name='x'/> b\n", ["a ", " b\n"]),
        ("\n  <module name='x'/>\n\n  <module name='y'/>\n", []),
        ("<module name='x'/> <module name='y'/>", []),
        ("\n  one\n  <module name='x'/>\n  two\n", ["one\n", "two\n"]),
        ("  \n  ", []),
        ("end  \n", ["end\n"]),
    ],
)
def test_layout_is_dropped_when_text_is_indented(body, texts):
    """Indentation is layout; line breaks between visible lines, and inner spaces, are text."""
    assert body_of(body) == texts


P = '<param name="p{}" len="1"/>'


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        (f"for{P}.", ["for", "."]),
        (f"for {P} days", ["for ", " days"]),
        (f"\n    for {P}\n    days\n", ["for ", "\ndays\n"]),
        (f"\n    for {P}\n\n      days {P}\n    in all\n", ["for ", "\n\n  days ", "\nin all\n"]),
        (f"\n    for\n    {P}. Given\n    that\n", ["for\n", ". Given\nthat\n"]),
        (f"\n    {P}\n  ", ["\n"]),
        (f"\n    {P}\n    {P}\n  ", ["\n", "\n"]),
        (f"{P} {P}", [" "]),
        (f" {P}<module name='x'/> <module name='y'/>", [" "]),
        (f"{P}, {P}", [", "]),
        (f"{P}\n", ["\n"]),
        (f"a{P}<!-- c -->b", ["a", "b"]),
    ],
)
def test_text_around_a_parameter_is_kept_when_it_is_visible(body, texts):
    """A parameter is a tag like others: text stops in front of it and goes on behind it."""
    num_parameters = body.count("{}")
    for index in range(num_parameters):
        body = body.replace("{}", str(index), 1)
    assert body_of(body) == texts


@pytest.mark.parametrize("space", [" ", "\n", "\t \n"])
def test_space_between_parameters_is_kept_when_it_is_preserved(space):
    """Two arguments with one space between them take xml:space="preserve"."""
    body = f"{P.format(1)}{space}{P.format(2)}"
    schema = pml.parse_schema(f'<schema name="s" xml:space="preserve">{body}</schema>')
    assert schema.children[1] == Text(space)


def test_turn_ends_without_line_break_when_it_stands_in_a_prompt():
    """Turns of prompts are as those of schemas."""
    prompt = pml.parse_prompt('<prompt schema="s">\n  <user>\n  Why?\n  </user>\n</prompt>')
    assert [turn.children for turn in prompt.children] == [(Text("Why?"),)]


def test_code_keeps_its_shape_when_it_begins_behind_the_tag():
    """The first line has the indentation of the line its tag stands on."""
    assert body_of("class A:\n        x = 1\n", indent="    ") == ["class A:\n    x = 1\n"]
    assert body_of("class A:\n    x = 1\n") == ["class A:\n    x = 1\n"]
    assert body_of("I want\n    food", indent="    ") == ["I want\nfood"]


@pytest.mark.parametrize("tag", ["system", "user", "assistant"])
def test_turn_ends_without_line_break_when_its_tag_has_its_own_line(tag):
    """A chat template closes a turn right behind the last word."""
    assert body_of("\n  Hello.\n", tag=tag) == ["Hello."]


def test_prompt_ends_without_line_break_when_its_tag_has_its_own_line():
    """The question is the question."""
    prompt = pml.parse_prompt('<prompt schema="s">\n  <a/>\n  Why?\n</prompt>')
    assert prompt.children[-1] == Text("Why?")


def test_all_whitespace_is_kept_when_it_is_preserved():
    """xml:space="preserve" holds for everything below, until "default"."""
    schema = pml.parse_schema(
        '<schema name="s"><module name="a" xml:space="preserve">\n  <module name="b"> \n</module>'
        '<module name="c" xml:space="default">\n  x\n </module>\n</module>\n</schema>'
    )
    (a,) = schema.children
    first, b, c, last = a.children
    assert (first, last) == (Text("\n  "), Text("\n"))
    assert b.children == (Text(" \n"),)
    assert c.children == (Text("x\n"),)


def test_members_are_taken_when_whitespace_is_preserved_in_a_union():
    """Whitespace of a union is never text."""
    schema = pml.parse_schema(
        '<schema name="s" xml:space="preserve"><union> <module name="a"/>\n</union></schema>'
    )
    assert len(schema.children[0].members) == 1


def test_code_survives_when_it_is_dedented():
    """A real file comes back, less the line breaks at its ends."""
    code = Path(__file__).read_text(encoding="utf-8")
    assert clean_text(f"\n{code}  ", first_indent="", ends_block=False) == code
