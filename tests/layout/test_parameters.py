"""Parameters: what stands for them when a module is encoded, and where arguments lie."""

from __future__ import annotations

import pytest

from pc_rag.errors import LayoutError, SchemaError
from pc_rag.layout import apply_repair, lay_out, parse_repair
from pc_rag.pml import Import, Module, Prompt, RoleBlock, Schema, Text, Union
from pc_rag.pml.nodes import Location, Parameter
from pc_rag.types import PositionPolicy, Role, Span, Visibility
from tests.support.char_encoder import PLACEHOLDER, CharEncoder, decode
from tests.support.plans import plan_of, problems_of, shown, text_of

DAYS = Parameter(name="days", max_tokens=4)
MIDDLE = Schema("s", (Text("head"), Module("trip", (Text("for"), DAYS, Text("days")))))


def prompt(*children, **arguments):
    return Prompt("s", children, arguments=arguments, source="p.xml")


def trip(days):
    return prompt(Import("trip", arguments={"days": days}), Text("?"))


def run_of(*children):
    layout = lay_out(
        Schema("s", children), CharEncoder(has_bos=False), visibility=Visibility.PREFIX
    )
    (run,) = layout.runs
    return run


def test_placeholders_lie_inside_a_run_when_a_module_has_a_parameter():
    """Text around it and its reserved positions are one entry, without a break."""
    run = run_of(Text("for"), DAYS, Text("days"))
    assert run.token_ids == (*map(ord, "for"), *4 * (PLACEHOLDER,), *map(ord, "days"))
    assert [parameter.rows for parameter in run.parameters] == [Span(3, 7)]
    assert run.text_rows == (Span(0, 3), Span(7, 11))
    assert run.span == Span(0, 11)


@pytest.mark.parametrize(
    ("scaffold", "standing"),
    [(None, "____"), ("", "____"), ("two", "two_"), ("nine", "nine")],
)
def test_scaffold_text_stands_in_when_a_parameter_has_one(scaffold, standing):
    """It is filled up with placeholders; without one all are placeholders."""
    run = run_of(Parameter(name="days", max_tokens=4, scaffold=scaffold))
    assert decode(run.token_ids).replace(chr(PLACEHOLDER), "_") == standing
    assert run.text_rows == ()
    assert not run.is_entry


@pytest.mark.parametrize("policy", list(PositionPolicy))
@pytest.mark.parametrize(
    ("days", "argument"),
    [
        ("two", [("argument", "two", 7)]),
        ("nine", [("argument", "nine", 7)]),
        ("", []),
    ],
)
def test_argument_lies_at_the_reserved_positions_when_it_is_given(policy, days, argument):
    """Behind a shorter one the positions stay empty, under both policies."""
    assert shown(plan_of(MIDDLE, trip(days), policy=policy)) == [
        ("exact", "head", 0),
        ("exact", "for", 4),
        *argument,
        ("composed", "days", 11),
        ("text", "?", 15),
    ]


@pytest.mark.parametrize("policy", list(PositionPolicy))
@pytest.mark.parametrize("days", ["", "2", "nine"])
def test_spaces_fill_up_an_argument_when_its_parameter_pads(policy, days):
    """All reserved positions are read then."""
    parameter = Parameter(name="days", max_tokens=4, pads_with_space=True)
    schema = Schema("s", (Module("trip", (parameter, Text("days"))),))
    plan = plan_of(schema, trip(days), policy=policy)
    assert shown(plan) == [
        ("argument", days.ljust(4), 0),
        ("composed", "days", 4),
        ("text", "?", 8),
    ]


def test_default_is_the_argument_when_a_prompt_gives_none():
    """One that is given wins, also an empty one."""
    parameter = Parameter(name="days", max_tokens=4, default="two")
    schema = Schema("s", (Module("trip", (Text("for "), parameter)),))
    assert text_of(plan_of(schema, prompt(Import("trip")))) == "for two"
    assert text_of(plan_of(schema, prompt(Import("trip", arguments={"days": "1"})))) == "for 1"
    assert text_of(plan_of(schema, prompt(Import("trip", arguments={"days": ""})))) == "for "


def test_parameters_are_buffers_when_they_begin_and_end_a_module():
    """Free text before and behind a module, at positions that nothing else takes."""
    buffers = (Parameter(name="before", max_tokens=3), Parameter(name="behind", max_tokens=3))
    schema = Schema(
        "s", (Module("m", (buffers[0], Text("text"), buffers[1])), Module("n", (Text("next"),)))
    )
    both = Import("m", arguments={"before": "so", "behind": "ok"})
    plan = plan_of(schema, prompt(both, Import("n"), Text("?")), policy=PositionPolicy.RESERVED)
    assert shown(plan) == [
        ("argument", "so", 0),
        ("composed", "text", 3),
        ("argument", "ok", 7),
        ("composed", "next", 10),
        ("text", "?", 14),
    ]


def test_arguments_of_the_prompt_go_to_the_schema_when_parameters_lie_in_no_module():
    """Text behind them stays cached: it attended the placeholders, and no prompt text."""
    name = Parameter(name="name", max_tokens=5)
    schema = Schema("s", (RoleBlock(Role.USER, (Text("I am "), name, Text("! "))),))
    plan = plan_of(schema, prompt(Text("Hi"), name="Ann"))
    assert shown(plan) == [
        ("exact", "<user>I am ", 0),
        ("argument", "Ann", 6),
        ("composed", "! ", 11),
        ("text", "Hi", 13),
        ("text", "</user>", 15),
        ("text", "<generate>", 16),
    ]


def test_parameter_moves_with_its_module_when_text_pushes_it():
    """Parts of one entry keep their distances, wherever it goes."""
    schema = Schema("s", (Module("a", (Text("a"),)), *MIDDLE.children[1:]))
    body = prompt(Import("a"), Text("long"), Import("trip", arguments={"days": "1"}))
    for policy in PositionPolicy:
        parts = plan_of(schema, body, policy=policy).parts
        assert [part.span.start for part in parts[2:5]] == [5, 8, 12]
        assert {part.occurrence.start for part in parts[2:5]} == {5}


def test_rows_around_an_argument_are_read_when_anonymous_text_is_fresh():
    """Behind prompt text it is computed, but its placeholders are not."""
    schema = Schema("s", (Module("m", (Text("m"),)), Text("for"), DAYS, Text("days")))
    plan = plan_of(schema, prompt(Import("m"), Text("!"), days="9"))
    assert shown(plan) == [
        ("exact", "m", 0),
        ("text", "!", 1),
        ("text", "for", 2),
        ("argument", "9", 5),
        ("text", "days", 9),
    ]


ALL_WRONG = Schema(
    "s",
    (
        Parameter(name="name", max_tokens=2),
        Module("trip", (DAYS, Parameter(name="city", max_tokens=5))),
    ),
)


def test_every_argument_is_reported_when_none_fits():
    """Too long with counts, missing, unknown with the names there are (pitfall 9)."""
    node = Import(
        "trip", arguments={"days": "fifty", "citi": "x", "zzz": "y"}, location=Location(2, 3)
    )
    body = Prompt("s", (node, Import("nope", location=Location(3, 1))), location=Location(1, 1))
    too_long = "has 5 tokens, the parameter holds 4; shorten it by 1"
    missing = "has no argument and no default; give it one:"
    assert [(p.line, p.column, p.message) for p in problems_of(ALL_WRONG, body)] == [
        (1, 1, f"parameter 'name' of schema 's' {missing} name=\"...\""),
        (2, 3, f"argument days='fifty' of module 'trip' {too_long}"),
        (2, 3, "module 'trip' has no parameter 'citi'; did you mean 'city'?"),
        (2, 3, "module 'trip' has no parameter 'zzz'; it has days, city"),
        (2, 3, f"parameter 'city' of module 'trip' {missing} city=\"...\""),
        (3, 1, "schema 's' has no module 'nope'; it has trip"),
    ]


def test_context_overflow_is_reported_with_the_arguments_when_both_do_not_fit():
    """Reserved positions count, whether an argument fills them or not."""
    problems = problems_of(MIDDLE, trip("fifty"), max_position=15)
    assert ["context overflow" in p.message for p in problems] == [False, True]


def test_texts_of_parameters_are_refused_when_they_are_longer_than_their_length():
    """All at once, with their places and counts: only the tokenizer can tell."""
    schema = Schema(
        "s",
        (
            Parameter(name="a", max_tokens=2, default="abc", location=Location(3, 5)),
            Module("m", (Parameter(name="b", max_tokens=1, scaffold="xy", location=Location(2)),)),
        ),
        source="s.xml",
    )  # fmt: skip
    with pytest.raises(SchemaError) as caught:
        lay_out(schema, CharEncoder(), visibility=Visibility.PREFIX)
    assert str(caught.value) == (
        "s.xml: line 2: scaffold='xy' of parameter 'b' has 2 tokens, the parameter holds "
        "1; shorten it, or raise the length\n"
        "s.xml: line 3, column 5: default='abc' of parameter 'a' has 3 tokens, the parameter holds "
        "2; shorten it, or raise the length"
    )


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 9])
def test_module_is_one_chunk_when_repair_meets_its_parameter(num_tokens):
    """Its first stored tokens are recomputed, on both sides of the argument, and only its own."""
    other = Module("b", (Text("xyz"), DAYS, Text("uvw")))
    first = Module("a", (Text("abc"), DAYS, Text("def")))
    body = prompt(*(Import(name, arguments={"days": "1"}) for name in "ab"), Text("?"))
    plan = plan_of(Schema("s", (first, other)), body)
    repaired = apply_repair(plan, parse_repair(f"link:{num_tokens}"), lambda part: bool(part.label))
    texts = ["".join(text for kind, text, _ in shown(repaired) if kind == "repair")]
    assert texts == ["xyzuvw"[:num_tokens]]
    bare = [shown(each.without_reuse()) for each in (plan, repaired)]
    assert bare[0] == bare[1]
    assert [text for kind, text, _ in bare[0] if kind == "uncached"] == ["abc", "def", "xyz", "uvw"]


def test_last_token_is_computed_when_a_parameter_ends_the_prompt():
    """An empty argument leaves the text before it at the end."""
    schema = Schema("s", (Module("m", (Text("abc"), Parameter(name="p", max_tokens=2))),))
    empty = plan_of(schema, prompt(Import("m", arguments={"p": ""})))
    assert shown(empty) == [("exact", "ab", 0), ("repair", "c", 2)]
    full = plan_of(schema, prompt(Import("m", arguments={"p": "d"})))
    assert shown(full) == [("exact", "abc", 0), ("argument", "d", 3)]


@pytest.mark.parametrize(
    ("children", "max_position", "numbers"),
    [
        ([Parameter(name="p", max_tokens=10**6)] * 3, 2048, "3,000,000 position IDs.* 2,048"),
        ([Union((Module("m", (Parameter(name="p", max_tokens=2049),)),))], 2048, "2,049 .* 2,048"),
        (
            [Union(11 * (Module("m", (Parameter(name="p", max_tokens=10**6),)),))],
            None,
            "11,000,000 tokens in all, at most 10,000,000",
        ),
    ],
)  # fmt: skip
def test_lengths_are_refused_before_a_token_is_made_when_they_reserve_too_much(
    children, max_position, numbers
):
    """A few characters would take gigabytes; members of a union share positions, not memory."""

    class NoTokens(CharEncoder):
        def placeholder_id(self):
            raise AssertionError("nothing is laid out")

    with pytest.raises(LayoutError, match=numbers):
        lay_out(
            Schema("s", tuple(children)),
            NoTokens(),
            visibility=Visibility.PREFIX,
            max_position=max_position,
        )


def test_members_share_their_positions_when_their_lengths_are_summed():
    """The union reserves as much as its longest member, so all of this fits."""
    members = tuple(
        Module(f"m{i}", (Text("-"), Parameter(name="p", max_tokens=9, default="")))
        for i in range(5)
    )
    layout = lay_out(
        Schema("s", (Union(members),)),
        CharEncoder(has_bos=False),
        visibility=Visibility.PREFIX,
        max_position=10,
    )
    assert len(layout.span) == 10
