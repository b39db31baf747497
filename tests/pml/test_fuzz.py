"""The parser raises nothing but its own errors, whatever it is fed."""

from __future__ import annotations

import time
from random import Random

import pytest

from pc_rag.errors import SchemaError
from pc_rag.pml import Import, Module, Prompt, Schema, Text, Turn
from pc_rag.types import Role
from tests.fuzz import pml_fuzz
from tests.fuzz.pml_documents import random_document

NUM_INPUTS = 5_000


@pytest.fixture
def parse(tmp_path):
    """The parsers as the fuzz target has them."""
    return pml_fuzz.parsers(pml_fuzz.make_root(tmp_path))


def test_only_own_errors_are_raised_when_documents_are_random(parse):
    """A short run of the fuzz target: all kinds of nodes are reached, nothing is broken."""
    report = pml_fuzz.fuzz(NUM_INPUTS, 1, parse)
    assert report.num_inputs == NUM_INPUTS
    assert 0.1 < report.accepted_share < 0.9
    assert report.node_kinds == {
        "Import", "Module", "Parameter", "Prompt", "RoleBlock", "Scaffold", "Schema", "Text",
        "Turn", "Union",
    }  # fmt: skip


def test_input_is_the_same_when_its_number_is():
    """A failure can be run again alone."""
    documents = [random_document(Random(f"0:{number}")) for number in range(200)]
    assert documents == [random_document(Random(f"0:{number}")) for number in range(200)]
    assert len(set(documents)) > 190


def fail(_):
    raise ValueError("not ours")


def refuse_without_problems(_):
    raise SchemaError(())


def never_end(_):
    end = time.process_time() + 1.1 * pml_fuzz.MAX_SECONDS
    while time.process_time() < end:
        pass


def same_names(_):
    return Schema("s", (Module("a"), Module("a")))


def empty_text(_):
    return Schema("s", (Text(""),))


@pytest.mark.parametrize(
    "broken", [fail, refuse_without_problems, never_end, same_names, empty_text]
)
def test_fuzzing_fails_when_a_parser_breaks_a_promise(parse, broken):
    """The target sees foreign errors, endless work and malformed nodes, and names the input."""
    with pytest.raises(pml_fuzz.FuzzFailure, match="input 7 of seed 0"):
        pml_fuzz.fuzz(1, 0, (broken, parse[1]), first=7)


@pytest.mark.parametrize(
    "child",
    [
        Text(""),
        Import("1"),
        Import("a", arguments={"b c": ""}),
        Turn(Role.USER, (Import("a", (Turn(Role.USER),)),)),
    ],
)
def test_fuzzing_fails_when_a_prompt_is_malformed(parse, child):
    """Texts, paths, arguments and turns are looked at."""
    with pytest.raises(pml_fuzz.FuzzFailure):
        pml_fuzz.fuzz(1, 0, (parse[0], lambda _: Prompt("s", (child,))))
