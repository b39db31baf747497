"""Imports by dotted path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pc_rag.layout.schema_layout import targets_in
from pc_rag.pml import Import, Module, Prompt, Schema, Text, Union
from pc_rag.pml.nodes import Location, Parameter, Scaffold
from tests.support.plans import plan_of, problems_of, text_of

SCHEMA = Schema(
    "s",
    (
        Module(
            "a",
            (
                Text("a("),
                Parameter(name="x", max_tokens=3, default="-"),
                Module("b", (Text("b"), Module("c", (Text("c"),)), Module("d.e", (Text("e"),)))),
                Text("|"),
                Union((Module("f", (Parameter(name="y", max_tokens=2),)), Module("g"))),
                Scaffold("k", (Module("m", (Text("m"),)), Module("n", (Text("n"),)))),
                Text(")"),
            ),
        ),
        Module("a.z", (Text("z"),)),
        Scaffold("pair", (Module("p", (Text("p"),)), Module("q", (Text("q"),)))),
    ),
)


def node(name, *children, **arguments):
    return Import(name, children, arguments=arguments)


@pytest.mark.parametrize(
    ("children", "text"),
    [
        ([node("a.b")], "a(-b|)"),
        ([node("a.b.c")], "a(-bc|)"),
        ([node("a.b.d.e")], "a(-be|)"),
        ([node("a.b.c"), node("a.b.d.e")], "a(-bce|)"),
        ([node("a.b"), node("a.f", y="!")], "a(-b|!)"),
        ([node("a", x="?"), node("a.b")], "a(?b|)"),
        ([node("a.b"), Text("T"), node("a.k")], "a(-bT|mn)"),
        ([node("a.b"), Text("T")], "a(-b|)T"),
        ([node("a.m")], "a(-|m)"),
        ([node("a.b", Text("T"))], "a(-bT|)"),
        ([node("a", node("b.c"))], "a(-bc|)"),
        ([node("a.z")], "z"),
        ([node("a.b"), node("a.z")], "a(-b|)z"),
    ],
)
def test_path_is_a_nested_import_when_it_leads_to_a_module(children, text):
    """A module's own name wins; paths of one module are one import of it."""
    assert text_of(plan_of(SCHEMA, Prompt("s", (*children, Text("."))))) == f"{text}."


@pytest.mark.parametrize(
    ("children", "message"),
    [
        ([node("a.x")], "schema 's' has no module 'a.x'"),
        ([node("a.b.x")], "has no module 'a.b.x'"),
        ([node("b.c")], "has no module 'b.c'"),
        ([node("pair.p")], "has no module 'pair.p'"),
        ([node("a.b"), node("a.b")], "module 'b' is already imported"),
        ([node("a.f", y="1"), node("a.g")], "members of one union"),
        ([node("a.b"), node("a.z"), node("a.g")], "module 'a' is already imported"),
        ([node("a.f", y="long")], "argument y='long' of module 'a.f' has 4 tokens"),
        ([node("a.b", y="1")], "module 'a.b' has no parameter 'y'"),
    ],
)
def test_path_is_refused_when_it_does_not_fit(children, message):
    """As the nested import would be, at the place of the path."""
    placed = [replace(node, location=Location(9)) for node in children]
    (problem,) = problems_of(SCHEMA, Prompt("s", tuple(placed)))
    assert message in problem.message
    assert problem.line == 9


def test_name_wins_when_a_path_reads_the_same():
    """The markup refuses such schemas; nodes of a program's own are not misread."""
    inner = Module("a", (Module("b", (Text("nested"),)),))
    schema = Schema("s", (inner, Module("a.b", (Text("named"),))))
    assert text_of(plan_of(schema, Prompt("s", (node("a.b"), Text("."))))) == "named."


def test_work_grows_with_the_prompt_when_all_its_imports_are_paths(monkeypatch):
    """What a module holds is gathered once a level, not once an import."""
    calls = []

    def counted(items):
        calls.append(items)
        return targets_in(items)

    monkeypatch.setattr("pc_rag.layout.import_paths.targets_in", counted)
    names = [f"m{i}" for i in range(50)]
    inner = Module("b", tuple(Module(name, (Text("x"),)) for name in names))
    children = tuple(node(f"a.b.{name}") for name in names)
    plan = plan_of(Schema("s", (Module("a", (inner,)),)), Prompt("s", (*children, Text("."))))
    assert text_of(plan) == 50 * "x" + "."
    assert len(calls) == 3
