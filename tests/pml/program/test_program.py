"""Programs say in PML what they say in Python."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Annotated, Literal, get_type_hints

import pytest

import pc_rag
from pc_rag import pml
from pc_rag.errors import PromptError
from pc_rag.layout import lay_out, plan_prompt
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
from pc_rag.pml.program import MaxTokens, Program, program
from pc_rag.types import ModuleKey, PositionPolicy, Role, Visibility
from tests.support import pml_programs as programs
from tests.support.char_encoder import CharEncoder, decode
from tests.support.pml_text import prompt_text

PROGRAMS = sorted({each for each, _ in programs.CALLS}, key=lambda each: each.__name__)


def imported(children):
    """Paths of all modules that a prompt imports."""
    for child in children:
        yield child.name
        yield from (f"{child.name}/{below}" for below in imported(child.children))


def declared(children):
    """Paths of all modules that a schema declares."""
    for child in children:
        if isinstance(child, Module):
            yield child.name
            yield from (f"{child.name}/{below}" for below in declared(child.children))
        elif isinstance(child, (Union, RoleBlock)):
            below = child.members if isinstance(child, Union) else child.children
            yield from declared(below)


def test_prompt_says_what_the_function_says_when_any_branch_is_taken():
    """if, match, calls with defaults, f-strings and loops, branch by branch (pitfall 16)."""
    for each, arguments in programs.CALLS:
        prompt = each.prompt(*arguments)
        assert prompt_text(each.schema, prompt) == "".join(each(*arguments))
        assert parse_prompt(write_prompt(prompt)) == prompt


@pytest.mark.parametrize("made", PROGRAMS, ids=lambda each: each.__name__)
def test_every_module_is_reached_when_all_branches_are_taken(made):
    """The schema declares nothing that no prompt imports, and the schema reads back equal."""
    prompts = [made.prompt(*arguments) for each, arguments in programs.CALLS if each is made]
    reached = {path for prompt in prompts for path in imported(prompt.children)}
    unreachable = {"style-is-none"}  # of a Literal without None; given here all the same
    assert set(declared(made.schema.children)) - reached <= unreachable
    assert parse_schema(write_schema(made.schema)) == made.schema


@program(name="trip", role=Role.USER)
def plan(
    city: Annotated[str, MaxTokens(10, scaffold="a city", pads_with_space=True)],
    days: Annotated[int, MaxTokens(3)],
    style: Literal["food", "art"] = "food",
    overseas: bool = False,
):
    """Plans a trip."""
    yield f"To {city} for {days} days.\n"
    if overseas:
        yield f"Passport for {city} and {city}.\n"
    match style:
        case "food":
            yield "Eat."
        case "art":
            yield "Look."
    yield "\nBye."


def test_nodes_are_the_promised_ones_when_a_program_is_compiled():
    """If is a module, match a union, an argument in text a parameter; nothing is stripped."""
    city = Parameter(name="city", max_tokens=10, scaffold="a city", pads_with_space=True)
    passport = (
        Text("Passport for "),
        city,
        Text(" and "),
        replace(city, name="city.2"),
        Text(".\n"),
    )
    assert plan.schema == Schema(
        "trip",
        (
            RoleBlock(
                Role.USER,
                (
                    Text("To "),
                    city,
                    Text(" for "),
                    Parameter(name="days", max_tokens=3),
                    Text(" days.\n"),
                    Module("overseas", passport),
                    Union((Module("food", (Text("Eat."),)), Module("art", (Text("Look."),)))),
                    Text("\nBye."),
                    Module("end"),
                ),
            ),
        ),
    )


def test_arguments_are_those_of_python_when_a_prompt_is_built():
    """By position or name, with defaults; those in text are arguments where they stand."""
    assert plan.prompt("Rome", days=3, overseas=True) == Prompt(
        "trip",
        (
            Import("overseas", arguments={"city": "Rome", "city.2": "Rome"}),
            Import("food"),
            Import("end"),
        ),
        arguments={"city": "Rome", "days": "3"},
    )


def test_nodes_know_their_lines_when_they_come_from_python():
    """Errors of the layout can name the line of the function."""
    lines, first = inspect.getsourcelines(plan.__wrapped__)
    assert plan.schema.source == __file__
    (turn,) = plan.schema.children
    places = [
        lines[child.location.line - first][child.location.column - 1 :] for child in turn.children
    ]
    assert places[5].startswith("overseas:")
    assert places[7].startswith('"\\nBye."')


def test_function_stays_itself_when_it_is_a_program():
    """Calls run the plain function; its name, docstring, hints and signature are kept."""
    assert isinstance(plan, Program)
    assert "".join(plan("Rome", 3)) == "To Rome for 3 days.\nEat.\nBye."
    assert programs.returned("Rome", is_far=False) == "To Rome."
    assert plan.__name__ == "plan"
    assert plan.__doc__ == "Plans a trip."
    assert list(inspect.signature(plan).parameters) == ["city", "days", "style", "overseas"]
    assert get_type_hints(plan)["days"] is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Rome",), "trip: missing a required argument: 'days'"),
        (("Rome", 3, "art", True, 5), "trip: too many positional arguments"),
    ],
)
def test_prompt_is_refused_when_its_arguments_do_not_fit_the_signature(arguments, message):
    """The message is Python's own, and the error one that frameworks do not swallow."""
    with pytest.raises(PromptError, match=message):
        plan.prompt(*arguments)


def test_prompt_is_refused_when_a_value_does_not_fit_its_place():
    """The line of the program is named, and what Python would have said."""
    place = r"pml_programs.py: line \d+, column \d+: "
    with pytest.raises(PromptError, match=f"{place}not days > 7 has no value .* TypeError"):
        programs.branches.prompt(True, "three", "Rome", "art")
    with pytest.raises(PromptError, match=f"{place}city has no value .* is int, not str"):
        programs.formats.prompt(3, 3, 1.0)
    with pytest.raises(PromptError, match=f"{place}days has no value .* Unknown format code 'd'"):
        programs.formats.prompt("Rome", "three", 1.0)


@pytest.mark.parametrize(
    ("member", "names"),
    [
        (programs.matching, ["food-or-wine", "rome", "none", "empty", "other"]),
        (programs.branches, ["days-below-2", "days-at-least-2-and-at-most-3-and-not-overseas"]),
        (
            programs.branches,
            ["days-in-4-or-5-or-style-is-food", "other", "overseas", "not-overseas"],
        ),
        (programs.matching, ["calm", "wild-if-days-above-3", "train-1", "train", "plane-true"]),
        (programs.matching, ["true", "false-or-none", "int-if-n-is-minus-1", "minus-2-or-3"]),
        (programs.narrowing, ["by-is-train-and-days-above-1", "by-is-plane-or-mood"]),
        (programs.calls, ["the.hotel", "night", "days-above-1", "night.2", "end"]),
    ],
)
def test_names_tell_the_condition_when_modules_are_named(member, names):
    """Names follow from conditions, so they stay when something else in the program changes."""
    assert set(names) <= {path.rpartition("/")[2] for path in declared(member.schema.children)}


def test_parameters_are_renamed_when_prompts_use_their_names_for_more():
    """``schema`` and ``xmlns`` are attributes with a meaning of their own."""
    arguments = programs.built.prompt("u", 1, "x", is_far=False).arguments
    assert arguments == {"user": "u", "schema_": "1", "xmlns_": "x"}


def test_constants_are_text_when_a_call_gives_them():
    """What is known when the program is made is stored, not filled in by every prompt."""
    nested = programs.calls.schema
    (module,) = [child for child in nested.children if getattr(child, "name", "") == "days-above-1"]
    towns = [child for child in module.children if child.name.startswith("night")]
    assert [town.children[0].text for town in towns] == [
        "Night in Bari by ",
        "Night in Pisa by ",
        "Night in Siena by ",
    ]


@program
def night(town: Annotated[str, MaxTokens(6, pads_with_space=True)], stars: int = 3):
    """Ends in a union, and pads what it says."""
    yield f"Night in {town}"
    if stars > 3:
        yield " in a palace."
    else:
        yield " in a tent."


@program(role=Role.USER)
def stay(town: Annotated[str, MaxTokens(6)] = "Bari", stars: int = 3):
    """Ends in a call."""
    yield "I go. "
    yield from night(town, stars)


@pytest.mark.parametrize("policy", list(PositionPolicy))
@pytest.mark.parametrize("arguments", [(), ("Siena", 5), ("", 1)])
def test_question_stands_at_the_end_when_a_program_ends_in_a_call(policy, arguments):
    """Behind the union that the called program ends in, and in the turn around it."""
    encoder = CharEncoder(has_bos=False)
    request = plan_prompt(
        lay_out(stay.schema, encoder, visibility=Visibility.PREFIX),
        stay.prompt(*arguments).with_text(" Why?"),
        encoder,
        policy=policy,
        entry_key=lambda index: ModuleKey(f"{index}"),
        max_position=None,
    )
    town = (*arguments, "Bari")[0]
    text = "".join(stay(*arguments)).replace(f"in {town}", f"in {town:6}", 1)
    said = "".join(decode(part.token_ids) for part in request.parts)
    assert said == f"<user>{text} Why?</user><generate>"


@pytest.mark.parametrize("policy", list(PositionPolicy))
@pytest.mark.parametrize("overseas", [True, False])
def test_question_stands_at_the_end_when_it_is_added_to_a_prompt(policy, overseas):
    """Behind all text of the program and in its turn, whatever the last import was."""
    encoder = CharEncoder(has_bos=False)
    layout = lay_out(plan.schema, encoder, visibility=Visibility.PREFIX)
    prompt = plan.prompt("Copenhagen", 300, overseas=overseas).with_text(" Plan it.")
    request = plan_prompt(
        layout,
        prompt,
        encoder,
        policy=policy,
        entry_key=lambda index: ModuleKey(f"{index}"),
        max_position=None,
    )
    said = "".join(decode(part.token_ids) for part in request.parts)
    text = "".join(plan("Copenhagen", 300, overseas=overseas))
    assert said == f"<user>{text} Plan it.</user><generate>"


def test_names_around_are_known_when_a_function_is_local():
    """Closures are read like names of the module."""
    greeting, sizes = "Hi, ", (1, 2)
    words = ["a"]

    @program
    def local(city: programs.City):
        for size in sizes:
            yield f"{greeting}{size}{city}"
        if city in words:
            yield "known"

    assert local.schema.children[1] == Parameter(name="city", max_tokens=20)
    words.append("b")
    for city in "abc":
        prompt = local.prompt(city)
        assert prompt_text(local.schema, prompt) == "".join(local(city))


def test_program_is_found_when_it_is_imported_from_the_top():
    """The names are the package's own."""
    assert pc_rag.program is pml.program is program
    assert pc_rag.MaxTokens is MaxTokens
    assert pc_rag.Program is Program
