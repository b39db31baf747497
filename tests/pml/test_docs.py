"""The PML reference says what is true: its examples are run."""

from __future__ import annotations

import doctest
import re
from itertools import pairwise
from pathlib import Path

import pytest

from pc_rag import pml
from pc_rag.errors import PMLError, PromptError
from pc_rag.pml.attributes import MAX_PARAMETER_LENGTH, TAG_ATTRIBUTES
from pc_rag.pml.included import MAX_FILE_BYTES
from pc_rag.pml.names import MAX_NAME_LENGTH, MAX_PATH_LENGTH, RESERVED_NAMES
from pc_rag.pml.source import ENCODINGS
from pc_rag.pml.tree import MAX_ATTRIBUTES, MAX_DEPTH

PAGE = (Path(__file__).parents[2] / "docs" / "pml.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([a-z ]+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def parse(document):
    parser = pml.parse_prompt if document.startswith("<prompt") else pml.parse_schema
    return parser(document, source="example")


@pytest.mark.parametrize("document", [body for kind, body in BLOCKS if kind == "xml"])
def test_example_parses_when_it_is_shown_as_good(document):
    """Readers can copy it."""
    assert parse(document).children


@pytest.mark.parametrize(
    ("document", "message"),
    [(body, message) for (kind, body), (_, message) in pairwise(BLOCKS) if kind == "xml refused"],
)
def test_message_is_the_one_shown_when_an_example_is_refused(document, message):
    """Readers find the message they got."""
    with pytest.raises((PMLError, PromptError)) as caught:
        parse(document)
    assert str(caught.value) == message.rstrip("\n")


def test_sessions_run_as_shown_when_they_are_python():
    """Output on the page is output of the code."""
    session = "\n".join(body for kind, body in BLOCKS if kind == "python")
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/pml.md", None, 0)
    results = doctest.DocTestRunner().run(test)
    assert results.attempted > 5
    assert results.failed == 0


def test_page_names_everything_when_rules_have_lists():
    """Tags, reserved names, encodings and limits of the code stand on the page."""
    for name in RESERVED_NAMES:
        assert f"`{name}`" in PAGE
    for tag in TAG_ATTRIBUTES.values():
        for attribute in (*tag.required, *tag.optional):
            assert f"`{attribute}`" in PAGE
    for encoding in ENCODINGS:
        assert encoding.upper() in PAGE
    assert f"deeper than {MAX_DEPTH} levels" in PAGE
    assert f"more than {MAX_ATTRIBUTES:,} attributes" in PAGE
    assert f"from 1 to {MAX_PARAMETER_LENGTH:,}" in PAGE
    assert f"UTF-8, of {MAX_FILE_BYTES:,} bytes at most" in PAGE
    assert f"{MAX_NAME_LENGTH} characters at most" in PAGE
    assert f"{MAX_PATH_LENGTH:,} characters at most" in PAGE
