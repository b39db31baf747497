"""Turns in prompts: around text and imports that lie in no turn of the schema."""

from __future__ import annotations

import pytest

from pc_rag.pml import Import, Module, Prompt, RoleBlock, Schema, Text, Union
from pc_rag.pml.nodes import Location, Parameter, Turn
from pc_rag.types import Role
from tests.support.char_encoder import CharEncoder
from tests.support.plans import plan_of, problems_of, shown, text_of

SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT


def module(name, *children):
    return Module(name, children or (Text(3 * name),))


PLAIN = Schema("s", (Text("head"), module("a"), Text("mid"), module("b"), Text("tail")))
BARE = Schema("s", (module("a"), module("b", Text("b"), module("n"), Text("B"))))
CHAT = Schema(
    "s",
    (
        RoleBlock(SYSTEM, (Text("Sys"), module("s"))),
        module("a"),
        RoleBlock(USER, (Text("In"), module("u"), Text("out"))),
        module("z"),
        module("t", RoleBlock(ASSISTANT, (Text("T"),))),
    ),
)


def read(schema, *children, **arguments):
    return text_of(plan_of(schema, Prompt("s", children, arguments=arguments)))


def turn(role, *children, line=0):
    return Turn(role, tuple(Text(c) if isinstance(c, str) else c for c in children), Location(line))


A, B, N, U, Z = (Import(name) for name in "abnuz")


@pytest.mark.parametrize(
    ("children", "text"),
    [
        ([turn(USER, A, "?")], "<user>aaa?</user>"),
        ([turn(SYSTEM, A), turn(USER, B, "?")], "<system>aaa</system><user>bB?</user>"),
        ([turn(SYSTEM, "Be kind."), turn(USER, A)], "<system>Be kind.</system><user>aaa</user>"),
        ([turn(USER, "See ", A, " and ", B)], "<user>See aaa and bB</user>"),
        (
            [Text("1"), turn(ASSISTANT, "2", A), Text("3")],
            "<user>1</user><assistant>2aaa</assistant><user>3</user>",
        ),
        (
            [turn(USER, A), turn(ASSISTANT, "2"), turn(USER, "3")],
            "<user>aaa</user><assistant>2</assistant><user>3</user>",
        ),
        ([Import("b", (turn(USER, N, "!"),))], "b<user>nnn!</user>B"),
        ([turn(USER, Import("b", (Text("x"), N, Text("y"))))], "<user>bxnnnyB</user>"),
        ([turn(USER, Import("b.n"))], "<user>bnnnB</user>"),
        ([turn(USER)], "<user></user>"),
    ],
)
def test_turn_stands_around_its_children_when_the_schema_has_none(children, text):
    """The prompt ends by opening the assistant's turn, and loose text becomes a user turn."""
    assert read(BARE, *children) == f"{text}<generate>"


@pytest.mark.parametrize(
    ("children", "text"),
    [
        ([turn(USER, A, "?")], "head<user>aaa?</user>midtail"),
        ([turn(USER, A, "?", B)], "head<user>aaa?midbbb</user>tail"),
        ([A, turn(USER, "?", B)], "headaaa<user>?midbbb</user>tail"),
        ([A, turn(USER, B)], "headaaamid<user>bbb</user>tail"),
        ([A, Text("1"), turn(USER, B)], "headaaa<user>1</user>mid<user>bbb</user>tail"),
        ([Text("1"), turn(ASSISTANT, B)], "headmid<user>1</user><assistant>bbb</assistant>tail"),
        ([turn(SYSTEM, "1"), A], "head<system>1</system>aaamidtail"),
        ([turn(USER, "1")], "headmidtail<user>1</user>"),
    ],
)
def test_turn_begins_where_its_first_child_goes_when_text_is_around(children, text):
    """Text of the schema between its children lies in it, all other does not."""
    assert read(PLAIN, *children) == f"{text}<generate>"


@pytest.mark.parametrize(
    ("children", "text"),
    [
        ([turn(USER, A)], "<user>aaa</user><user>Inout</user>"),
        ([U, turn(ASSISTANT, Z)], "<user>Inuuuout</user><assistant>zzz</assistant>"),
        (
            [U, Text("?"), turn(ASSISTANT, "Yes."), turn(USER, "Then?")],
            "<user>Inuuu?out</user><assistant>Yes.</assistant><user>Then?</user>",
        ),
        (
            [U, turn(ASSISTANT, "Yes."), Text("Then?")],
            "<user>Inuuuout</user><assistant>Yes.</assistant><user>Then?</user>",
        ),
    ],
)  # fmt: skip
def test_turns_follow_those_of_the_schema_when_both_have_some(children, text):
    """A turn behind an import in a turn of the schema goes to the end: the conversation goes on."""
    assert read(CHAT, *children) == f"<system>Sys</system>{text}<generate>"


def test_last_user_turn_takes_the_text_before_a_turn_when_nothing_is_imported():
    """Turns begin behind its end."""
    schema = Schema("s", (RoleBlock(USER, (Text("In: "),)),))
    text = read(schema, Text("Why?"), turn(ASSISTANT, "So."), Text("And?"))
    assert text == ("<user>In: Why?</user><assistant>So.</assistant><user>And?</user><generate>")
    assert read(schema, turn(ASSISTANT, "So.")) == (
        "<user>In: </user><assistant>So.</assistant><generate>"
    )


def test_stored_text_stays_cached_when_a_turn_stands_around_it():
    """What opens the turn is fresh, so what is behind it is composed."""
    plan = plan_of(BARE, Prompt("s", (turn(USER, A, "?"),)))
    assert shown(plan) == [
        ("text", "<user>", 0),
        ("composed", "aaa", 1),
        ("text", "?", 4),
        ("text", "</user>", 5),
        ("text", "<generate>", 6),
    ]


@pytest.mark.parametrize(
    ("children", "line", "message"),
    [
        ([turn(ASSISTANT, Import("u", location=Location(7)))], 7, "module 'u' lies in a turn"),
        ([turn(USER, Import("t"), line=3)], 3, "module 't' has turns of its own"),
        ([turn(USER, A, Z, line=3)], 3, "text of the schema inside this turn has turns"),
        ([U, turn(ASSISTANT, "1", line=3), Z], 3, "this turn lies in a turn already"),
        ([U, turn(ASSISTANT, "1", Z, line=3)], 3, "this turn lies in a turn already"),
        ([turn(ASSISTANT, "1", line=3), U], 3, "this turn lies in a turn already"),
        ([Import("u", (turn(ASSISTANT, "1", line=3),))], 3, "this turn lies in a turn already"),
        ([turn(USER, A, turn(ASSISTANT, "1", line=3))], 3, "this turn lies in a turn already"),
        ([turn(USER, Import("a", (turn(USER, "1", line=3),)))], 3, "this turn lies in a turn"),
    ],
)
def test_turn_is_refused_when_it_would_lie_in_another(children, line, message):
    """With its place: neither chat templates nor the markup know turns in turns."""
    (problem,) = problems_of(CHAT, Prompt("s", tuple(children)))
    assert problem.line == line
    assert message in problem.message


class FirstTurns(CharEncoder):
    """A template that puts a default system text in front of the first turn."""

    def role_open(self, role, *, is_first):
        return (*(map(ord, "D") if is_first else ()), *super().role_open(role, is_first=is_first))


EITHER = Schema(
    "s",
    (
        module("a"),
        Union(
            (
                module("t", RoleBlock(USER, (Text("T"),))),
                module("v", RoleBlock(USER, (Text("V"),)), RoleBlock(USER, (Text("W"),))),
            )
        ),
        RoleBlock(USER, (Text("last"),)),
    ),
)


@pytest.mark.parametrize(
    ("schema", "children", "text"),
    [
        (BARE, [turn(USER, A), turn(USER, "x")], "D<user>aaa</user><user>x</user>"),
        (BARE, [turn(SYSTEM, "x"), Text("y")], "D<system>x</system><user>y</user>"),
        (BARE, [Text("x"), turn(USER, A)], "D<user>x</user><user>aaa</user>"),
        (CHAT, [turn(USER, A)], "D<system>Sys</system><user>aaa</user><user>Inout</user>"),
        (
            Schema("s", (module("a"), RoleBlock(USER, (Text("In"),)))),
            [turn(SYSTEM, A)],
            "<system>aaa</system>D<user>In</user>",
        ),
        (Schema("s", (module("t", RoleBlock(USER, (Text("T"),))), module("a"))), [Text("x"), A],
         "D<user>x</user>aaa"),
        (Schema("s", (module("t", RoleBlock(USER, (Text("T"),))), module("a"))),
         [Import("t"), Text("x")], "D<user>T</user><user>x</user>"),
        (Schema("s", (module("t", RoleBlock(USER, (Text("T"),))), RoleBlock(USER, (Text("U"),)),
                      module("a"))), [turn(USER, A)], "<user>U</user><user>aaa</user>"),
        (Schema("s", (Union((module("t", RoleBlock(USER, (Text("T"),))), module("a"))),
                      RoleBlock(USER, (Text("last"),)))), [Import("t")],
         "D<user>T</user><user>last</user>"),
        (EITHER, [Import("t")], "D<user>T</user><user>last</user>"),
        (EITHER, [Import("v")], "D<user>V</user><user>W</user><user>last</user>"),
        (EITHER, [turn(SYSTEM, "x", A), Import("v")],
         "<system>xaaa</system>D<user>V</user><user>W</user><user>last</user>"),
    ],
)  # fmt: skip
def test_first_turn_is_told_when_a_prompt_opens_it(schema, children, text):
    """A default system text is read once: with the schema's first turn, else with the prompt's."""
    plan = plan_of(schema, Prompt("s", tuple(children)), encoder=FirstTurns(has_bos=False))
    assert text_of(plan) == f"{text}<generate>"


def test_arguments_are_read_when_their_module_lies_in_a_turn():
    """Parameters of modules and of the schema."""
    name = Parameter(name="name", max_tokens=5)
    schema = Schema("s", (module("m", Text("I am "), name), Text(" of "), name))
    children = (turn(USER, Import("m", arguments={"name": "Ann"}), "!"),)
    assert read(schema, *children, name="Rome") == "<user>I am Ann!</user> of Rome<generate>"
