"""Scaffolds: a joint run beside those of the members, and when it is read; scaffolds of unions."""

from __future__ import annotations

import pytest

from pc_rag.layout import apply_repair, lay_out, layout_rows, parse_repair
from pc_rag.pml import Import, Module, Prompt, Schema, Text, Union
from pc_rag.pml.nodes import Location, Parameter, Scaffold, Turn
from pc_rag.types import PositionPolicy, Role, Span, Visibility
from tests.support.char_encoder import CharEncoder, decode
from tests.support.plans import plan_of, problems_of, shown, text_of

X = Parameter(name="x", max_tokens=3)


def module(name, *children, **options):
    return Module(name, children or (Text(3 * name),), **options)


PAIR = Schema(
    "s", (Text("head"), Scaffold("pair", (module("a"), module("b"))), module("c"), Text("tail"))
)
TRIO = Schema(
    "s", (Scaffold("trio", (module("a"), module("b", Text("b"), X, Text("B")), module("c"))),)
)


def prompt(*children, **arguments):
    return Prompt("s", children, arguments=arguments)


def imports(names):
    return [Import(name) for name in names]


def laid_out(schema, visibility=Visibility.PREFIX):
    return lay_out(schema, CharEncoder(has_bos=False), visibility=visibility)


@pytest.mark.parametrize(
    ("visibility", "context"), [(Visibility.PREFIX, (0,)), (Visibility.MODULE, ())]
)
def test_joint_run_holds_all_members_when_a_scaffold_is_laid_out(visibility, context):
    """It attends what its first member attends, and lies where its members lie."""
    layout = laid_out(PAIR, visibility)
    scaffold = layout.items[1]
    joint = layout.runs[scaffold.joint_index]
    assert (joint.label, decode(joint.token_ids)) == ("pair", "aaabbb")
    assert (joint.span, joint.context) == (Span(4, 10), context)
    assert [member.path for member in scaffold.members] == ["a", "b"]
    assert [layout.runs[index].context for index in (1, 2)] == 2 * [context]


@pytest.mark.parametrize(
    "body", [imports("ab"), [Import("pair")], [Import("pair", (Import("b"),))]]
)
@pytest.mark.parametrize("policy", list(PositionPolicy))
def test_joint_rows_are_read_when_every_member_is_imported(body, policy):
    """By name or by the scaffold; all of them are exact, and labelled by their modules."""
    plan = plan_of(PAIR, prompt(*body, Text("?")), policy=policy)
    assert shown(plan)[:3] == [("exact", "head", 0), ("exact", "aaa", 4), ("exact", "bbb", 7)]
    assert [(part.label, part.key, part.rows) for part in plan.cached[1:]] == [
        ("a", "key 3", Span(0, 3)),
        ("b", "key 3", Span(3, 6)),
    ]


@pytest.mark.parametrize("name", ["a", "b"])
def test_own_run_is_read_when_not_every_member_is_imported(name):
    """The joint entry of a part of them would have seen what is not there."""
    plan = plan_of(PAIR, prompt(Import(name), Text("?")))
    assert plan.cached[1].key == {"a": "key 1", "b": "key 2"}[name]


def test_nothing_behind_text_is_exact_when_it_stands_between_members():
    """The joint entry is read all the same: its members saw each other."""
    plan = plan_of(PAIR, prompt(Import("a"), Text("!"), Import("b"), Text("?")))
    assert shown(plan)[:4] == [
        ("exact", "head", 0),
        ("exact", "aaa", 4),
        ("text", "!", 7),
        ("composed", "bbb", 8),
    ]
    assert plan.cached[2].key == "key 3"


def test_what_follows_a_scaffold_is_composed_when_it_did_not_see_it():
    """A module behind it attended the anonymous text only."""
    kinds = [kind for kind, *_ in shown(plan_of(PAIR, prompt(*imports("abc"), Text("?"))))]
    assert kinds == ["exact", "exact", "exact", "composed", "text", "text"]


def test_arguments_and_text_go_to_members_when_a_scaffold_is_imported():
    """Inside its tag members are named; the others are imported plainly, in order."""
    node = Import("trio", (Text("1"), Import("b", (Text("2"),), arguments={"x": "!"}), Text("3")))
    plan = plan_of(TRIO, prompt(node, Text("?")))
    assert shown(plan) == [
        ("exact", "aaa", 0),
        ("text", "1", 3),
        ("composed", "b", 4),
        ("argument", "!", 5),
        ("composed", "B", 8),
        ("text", "2", 9),
        ("text", "3", 10),
        ("composed", "ccc", 11),
        ("text", "?", 14),
    ]
    assert {part.key for part in plan.cached} == {"key 3"}
    assert [part.rows for part in plan.cached] == [Span(0, 3), Span(3, 4), Span(7, 8), Span(8, 11)]


def test_rows_before_a_parameter_are_exact_when_members_have_one():
    """Nothing behind the argument is."""
    node = Import("trio", (Import("b", arguments={"x": "!"}),))
    kinds = [kind for kind, *_ in shown(plan_of(TRIO, prompt(node, Text("?"))))]
    assert kinds == ["exact", "exact", "argument", "composed", "composed", "text"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([Import("pair"), Import("a")], "module 'a' and 'pair', which is imported at"),
        ([Import("b"), Import("pair")], "scaffold 'pair' and 'b', which is imported at"),
        ([Import("pair"), Import("pair")], "scaffold 'pair' is already imported at"),
        ([Import("b"), Import("a")], "module 'a' is imported behind 'b', but the schema declares"),
        ([Import("c"), Import("pair")], "scaffold 'pair' is imported behind 'c'"),
        ([Import("pair", arguments={"x": "1"})], "scaffold 'pair' has no parameter 'x'"),
        ([Import("pair", (Import("c"),))], "scaffold 'pair' has no module 'c'; write <c/>"),
        ([Import("pear")], "did you mean <pair/>?"),
    ],
)  # fmt: skip
def test_import_is_refused_when_it_does_not_fit_a_scaffold(body, message):
    """Members and their scaffold are imported once, in order."""
    (problem,) = problems_of(PAIR, prompt(*body))
    assert message in problem.message


def test_missing_argument_is_reported_when_a_member_is_imported_by_its_scaffold():
    """At the scaffold's import, which is the one there is."""
    (problem,) = problems_of(TRIO, prompt(Import("trio", location=Location(4, 2))))
    assert (problem.line, problem.column) == (4, 2)
    assert problem.message.startswith("parameter 'x' of module 'b' has no argument")


def test_members_are_one_chunk_when_they_are_repaired():
    """They see each other: only what stands before the scaffold is missing to them."""
    schema = Schema("s", (module("z"), *TRIO.children))
    trio = Import("trio", (Import("b", arguments={"x": ""}),))

    def repaired(*body):
        plan = plan_of(schema, prompt(*body, Text("?")))
        plan = apply_repair(plan, parse_repair("link:2"), lambda part: bool(part.label))
        return [text for kind, text, _ in shown(plan) if kind == "repair"]

    assert repaired(trio) == []
    assert repaired(Import("z"), trio) == ["aa"]


def test_scaffold_has_no_joint_run_when_a_member_is_not_stored():
    """What is computed in every request is in no entry, and sees the others anyway."""
    schema = Schema(
        "s", (Scaffold("pair", (module("a"), module("b", is_cached=False))), Text("tail"))
    )
    layout = laid_out(schema)
    assert layout.items[0].joint_index is None
    assert [(run.label, run.is_stored) for run in layout.runs[:2]] == [("a", True), ("b", False)]
    assert shown(plan_of(schema, prompt(Import("pair")))) == [
        ("exact", "aaa", 0),
        ("text", "bbb", 3),
        ("composed", "tai", 6),
        ("repair", "l", 9),
    ]


UNION = Schema(
    "s",
    (
        Text("head"),
        Union(
            (
                module("a", Text("a"), module("n"), Text("A")),
                module("b", Text("bbbbb")),
                module("u", is_cached=False),
            ),
            scaffold="a",
        ),
        Text("mid"),
        module("c"),
    ),
)


@pytest.mark.parametrize(
    ("visibility", "mid", "module_c"),
    [(Visibility.PREFIX, "headaA", "headaAmid"), (Visibility.MODULE, "headaA", "")],
)
def test_text_behind_a_union_attends_its_scaffold_member_when_it_has_one(visibility, mid, module_c):
    """As if it were imported: its own text, without the modules nested in it."""
    layout = laid_out(UNION, visibility)
    contexts = {
        decode(run.token_ids): decode(layout.context_of(index)[0])
        for index, run in enumerate(layout.runs)
    }
    assert (contexts["mid"], contexts["ccc"]) == (mid, module_c)
    assert contexts["bbbbb"] == ("head" if visibility is Visibility.PREFIX else "")


def test_text_behind_a_union_is_exact_only_when_its_scaffold_member_is_imported():
    """Under another member, or under none, it has seen what is not there."""

    def kinds(name):
        plan = plan_of(UNION, prompt(*imports(name)), policy=PositionPolicy.RESERVED)
        return [kind for kind, text, _ in shown(plan) if text.startswith("mi")]

    assert kinds("ac") == ["exact"]
    assert kinds("bc") == ["composed"]
    assert kinds("c") == ["composed"]
    plain = Schema("s", (UNION.children[0], Union(UNION.children[1].members), Text("mid")))
    plan = plan_of(plain, prompt(), policy=PositionPolicy.RESERVED)
    assert shown(plan)[1] == ("exact", "mi", 9)


def test_union_has_no_scaffold_when_that_member_is_not_stored():
    """What is not stored must not live on in the KV of what is."""
    union = Union(UNION.children[1].members, scaffold="u")
    layout = laid_out(Schema("s", (Text("head"), union, Text("mid"))))
    assert layout.runs[-1].context == (0,)


def test_modules_are_fresh_at_their_spans_when_they_are_not_stored():
    """In every request, with all they hold; what is nested in them too."""
    inner = module("n", Text("n"), is_cached=False)
    schema = Schema(
        "s", (Text("head"), module("u", Text("u"), X, inner, is_cached=False), Text("tail"))
    )
    node = Import("u", imports("n"), arguments={"x": "!"})
    plan = plan_of(schema, prompt(node), policy=PositionPolicy.RESERVED)
    assert [(*each, part.label) for each, part in zip(shown(plan), plan.parts, strict=True)] == [
        ("exact", "head", 0, "(anonymous)"),
        ("text", "u", 4, "u"),
        ("argument", "!", 5, "u"),
        ("text", "n", 8, "u.n"),
        ("composed", "tai", 9, "(anonymous)"),
        ("repair", "l", 12, "(anonymous)"),
    ]


def test_rows_are_golden_when_a_schema_has_every_kind_of_node():
    """A scaffold of two modules costs three entries; parameters and unstored modules cost none."""
    schema = Schema(
        "s",
        (
            Text("head"),
            Parameter(name="p", max_tokens=2),
            Scaffold("pair", (module("a", Text("a"), X), module("b"))),
            Union((module("c"), module("d", Text("dddd"))), scaffold="d"),
            module("e", X),
            module("f", is_cached=False),
        ),
    )
    assert [
        (row.depth, str(row.kind), row.name, row.path, row.span.start, row.span.end,
         row.num_reserved, row.num_tokens, row.num_entries)
        for row in layout_rows(laid_out(schema))
    ] == [
        (0, "schema", "s", "s", 0, 23, 23, 27, 6),
        (1, "text", "", "", 0, 6, 6, 6, 1),
        (2, "parameter", "p", "", 4, 6, 2, 2, 0),
        (1, "scaffold", "pair", "pair", 6, 13, 7, 14, 3),
        (2, "module", "a", "a", 6, 10, 4, 4, 1),
        (3, "text", "", "a", 6, 10, 4, 4, 1),
        (4, "parameter", "x", "a", 7, 10, 3, 3, 0),
        (2, "module", "b", "b", 10, 13, 3, 3, 1),
        (3, "text", "", "b", 10, 13, 3, 3, 1),
        (1, "union", "", "", 13, 17, 4, 7, 2),
        (2, "module", "c", "c", 13, 16, 4, 3, 1),
        (3, "text", "", "c", 13, 16, 3, 3, 1),
        (2, "module", "d", "d", 13, 17, 4, 4, 1),
        (3, "text", "", "d", 13, 17, 4, 4, 1),
        (1, "module", "e", "e", 17, 20, 3, 0, 0),
        (2, "text", "", "e", 17, 20, 3, 0, 0),
        (3, "parameter", "x", "e", 17, 20, 3, 0, 0),
        (1, "module", "f", "f", 20, 23, 3, 0, 0),
        (2, "text", "", "f", 20, 23, 3, 0, 0),
    ]  # fmt: skip


def test_joint_rows_are_read_when_a_turn_stands_around_members():
    """A turn of the prompt is text of the prompt."""
    plan = plan_of(PAIR, prompt(Turn(Role.USER, tuple(imports("ab")))))
    assert text_of(plan) == "head<user>aaabbb</user>tail<generate>"
    assert [part.key for part in plan.cached] == ["key 0", "key 3", "key 3"]
