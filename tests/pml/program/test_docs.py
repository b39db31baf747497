"""The page about programs says what is true: its examples are run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from pc_rag.errors import SchemaError
from pc_rag.pml import write_prompt, write_schema
from pc_rag.pml.program.loops import MAX_TURNS
from pc_rag.pml.program.naming import MAX_LENGTH
from tests.support.modules import import_text

PAGE = (Path(__file__).parents[3] / "docs" / "programs.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([a-z ]+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(kind, number=0):
    return [body for each, body in BLOCKS if each == kind][number]


@pytest.fixture
def example(tmp_path):
    return import_text(block("python"), tmp_path)


def test_documents_are_those_shown_when_the_example_is_written(example):
    """Readers see what their program becomes."""
    assert write_schema(example.trip.schema) == block("xml schema").rstrip("\n")
    prompt = example.trip.prompt("Oslo", 3, "art", example.Train("F2"))
    assert write_prompt(prompt) == block("xml prompt").rstrip("\n")


def test_sessions_run_as_shown_when_they_are_python(example):
    """Output on the page is output of the code."""
    session = "\n".join(body for kind, body in BLOCKS if kind == "python" and ">>>" in body)
    test = doctest.DocTestParser().get_doctest(session, dict(vars(example)), "programs.md", None, 0)
    results = doctest.DocTestRunner().run(test)
    assert results.attempted > 5
    assert results.failed == 0


def test_message_is_the_one_shown_when_the_example_is_refused(tmp_path):
    """Readers find the message they got."""
    with pytest.raises(SchemaError) as caught:
        import_text(block("python refused"), tmp_path)
    shown = str(caught.value).replace(caught.value.source, "story.py")
    assert shown == block("text", 1).rstrip("\n")


def test_page_names_limits_when_the_code_has_them():
    """Numbers on the page are those of the code."""
    assert f"at most {MAX_TURNS:,} turns" in PAGE
    assert f"cut at {MAX_LENGTH} characters" in PAGE
