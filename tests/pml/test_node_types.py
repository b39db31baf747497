"""Nodes built in Python of values that no node holds: refused, each named, never passed over."""

from __future__ import annotations

import pytest

from pc_rag.errors import PromptError, SchemaError
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
    write_prompt,
    write_schema,
)
from pc_rag.pml.node_types import type_problems
from pc_rag.pml.tree import NESTED_TOO_DEEP
from pc_rag.types import Role

SOUND_SCHEMA = Schema(
    "s",
    [  # a list reads as well as a tuple
        Text("a"),
        Parameter(name="p", max_tokens=3, scaffold="x", default=""),
        Module("m", (Union((Module("n"),), scaffold="n"),), is_cached=False),
        Scaffold("c", (Module("d"), Module("e"))),
        RoleBlock(Role.USER, (Text("b"),)),
    ],
)
SOUND_PROMPT = Prompt(
    "s", (Text("a"), Turn(Role.USER, (Import("m", arguments={"p": "1"}),))), arguments={"q": "2"}
)


@pytest.mark.parametrize("root", [SOUND_SCHEMA, SOUND_PROMPT])
def test_nothing_is_found_when_nodes_are_what_they_should_be(root):
    """Every kind of node, with every field."""
    assert type_problems(root, type(root)) == ()


@pytest.mark.parametrize(
    ("children", "messages"),
    [
        (None, ["children of Prompt('s') are None; allowed: a tuple of Text, Import, Turn"]),
        ("hello", ["children of Prompt('s') are 'hello' of type str"]),
        (("hello",), ["children of Prompt('s') hold 'hello' of type str", "write Text('hello')"]),
        ((None, Module("m")), ["hold None;", "hold Module("]),
        ((Text(None),), ["text of Text is None; allowed: a str"]),
        ((Text(b"x"),), ["text of Text is b'x' of type bytes"]),
        ((Import(3),), ["name of Import is 3 of type int; allowed: a str"]),
        ((Import("a", ("x",)),), ["children of Import('a') hold 'x'"]),
        ((Import("a", "xy"),), ["children of Import('a') are 'xy'"]),
        ((Import("a", arguments=None),), ["arguments of Import('a') are None; allowed: a dict"]),
        ((Import("a", arguments=[("p", "1")]),), ["arguments of Import('a') are [('p', '1')]"]),
        ((Import("a", arguments={1: "x"}),), ["hold the name 1 of type int"]),
        (
            (Import("a", arguments={"p": 56, "q": None, "r": ["x"], "t": "sound"}),),
            [
                "argument 'p' of Import('a') is 56 of type int; allowed: a str, such as '56'",
                "argument 'q' of Import('a') is None",
                "argument 'r' of Import('a') is ['x']",
            ],
        ),
        ((Turn(None, (Text(1),)),), ["role of Turn is None", "text of Text is 1"]),
        ((Turn("tool"),), ["role of Turn is 'tool' of type str; allowed: assistant, system, user"]),
    ],
)
def test_prompt_is_refused_when_it_holds_what_no_prompt_does(children, messages):
    """All of it in one error; text among the nodes would vanish otherwise (pitfall 12)."""
    with pytest.raises(PromptError) as caught:
        write_prompt(Prompt("s", children))
    for message in messages:
        assert message in str(caught.value)
    assert len(caught.value.problems) in (1, len(messages))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "a Schema is needed; got None"),
        (SOUND_PROMPT, "a Schema is needed; got Prompt("),
        (Schema(None), "name of Schema is None"),
        (Schema("s", ("a",)), "children of Schema('s') hold 'a' of type str"),
        (Schema("s", (Import("a"),)), "children of Schema('s') hold Import("),
        (Schema("s", (Union("ab"),)), "members of Union are 'ab' of type str"),
        (Schema("s", (Union((Text("a"),)),)), "members of Union hold Text("),
        (Schema("s", (Union((Module("a"),), scaffold=1),)), "scaffold of Union is 1"),
        (
            Schema("s", (Parameter(name="p", max_tokens="3"),)),
            "max_tokens of Parameter('p') is '3'",
        ),
        (Schema("s", (Parameter(name="p", max_tokens=True),)), "is True of type bool"),
        (Schema("s", (Parameter(name="p", max_tokens=3, default=4),)), "default of Parameter('p')"),
        (Schema("s", (Module("m", is_cached="no"),)), "is_cached of Module('m') is 'no'"),
        (Schema("s", (Module("m", (Text(5),)),)), "text of Text is 5 of type int"),
    ],
)
def test_schema_is_refused_when_it_holds_what_no_schema_does(schema, message):
    """The value, its type and what is allowed are named (pitfall 15)."""
    with pytest.raises(SchemaError) as caught:
        write_schema(schema)
    assert message in str(caught.value)


def test_look_is_bounded_when_nodes_lie_in_each_other_without_end():
    """What is deeper than any document may be is one problem, and is not walked (pitfall 14)."""
    node = Import("a")
    for _ in range(100_000):
        node = Import("a", (node,))
    (problem,) = type_problems(Prompt("s", (node,)), Prompt)
    assert problem.message == NESTED_TOO_DEEP
