"""Programs say in PML what they say in Python."""

from __future__ import annotations

import pytest

from pc_rag.pml import (
    Module,
    RoleBlock,
    Union,
    parse_prompt,
    parse_schema,
    write_prompt,
    write_schema,
)
from tests.support import pml_programs as programs
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
    for program, arguments in programs.CALLS:
        prompt = program.prompt(*arguments)
        assert prompt_text(program.schema, prompt) == "".join(program(*arguments))
        assert parse_prompt(write_prompt(prompt)) == prompt


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_every_module_is_reached_when_all_branches_are_taken(program):
    """The schema declares nothing that no prompt imports, and the schema reads back equal."""
    prompts = [program.prompt(*arguments) for each, arguments in programs.CALLS if each is program]
    reached = {path for prompt in prompts for path in imported(prompt.children)}
    unreachable = {"style-is-none"}  # of a Literal without None; given here all the same
    assert set(declared(program.schema.children)) - reached <= unreachable
    assert parse_schema(write_schema(program.schema)) == program.schema
