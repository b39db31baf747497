"""Every example runs as a user would run it, with the real default model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARED = {"langchain/island.py", "pml/_report.py"}
"""What other examples import."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart.py", ["encoded 3 chunks", "from stored KV: ", "four euros"]),
        ("prompt_markup.py", ["rome: ", "mutton stew", "exact"]),
        ("own_chain.py", ["composed (other-prefix)", "learned: 2 chunks", "exact"]),
        (
            "pml/code_generation.py",
            [
                "scanner.py: ",
                "exact hit",
                "tool.py: ",
                "composed hit",
                "Write a program that reads",
                "ratio: ",
            ],
        ),
        (
            "pml/personalisation.py",
            [
                "= 324 people",
                "age.parent: 41 tokens, exact hit",
                "home.harbour: 31 tokens, composed hit",
                "'Where should I go on Thursday evening, and why?'",
                "prompt tokens                  253       253",
                "cached tokens                  236         0",
            ],
        ),
        (
            "pml/trip_planning.py",
            [
                "plan.city.markets: ",
                "plan: 2 tokens, ' three days'",
                "' Lisbon ",
                "plan.coast.north: ",
                "plan: 2 tokens, ' two days'",
                "ratio: ",
            ],
        ),
        (
            "pml/trip_program.py",
            [
                "evening.music: ",
                "not-with_children: ",
                "(anonymous): 3 tokens, 'Lisbon'",
                "with_children: ",
                "evening.quiet: ",
                "'12'",
                "ratio: ",
            ],
        ),
        ("langchain/retrieval_chain.py", ["hit 3 of 3 retrieved documents", "misses: none"]),
        ("langchain/retrieval_qa.py", ["hit 3 of 3 retrieved documents", "misses: none"]),
        ("langchain/lcel.py", ["hit 3 of 3", "learned: 4 chunks", "4 of 4 (100.0%)"]),
        ("langchain/agent_prompt.py", ["hit 3 of 3 retrieved documents", "misses: none"]),
        ("langchain/agent_tool.py", ["called: [('search'", "hit 2 of 2 retrieved documents"]),
        (
            "langchain/indexing.py",
            ["again:", "'num_skipped': 4", "encoded 0", "encoded 1", "free on Sundays"],
        ),
        ("llama_index/query_engine.py", ["euros", "hit 2 of 2 retrieved files", "read 154 of"]),
        (
            "llama_index/chat_engine.py",
            [
                "euros",
                "hit 2 of 2 notices",
                ", 0 of them as earlier",
                "52 of them as earlier",
            ],
        ),
        (
            "llama_index/side_by_side.py",
            ["HuggingFaceLLM: ", "ratio: ", "12 of 12 (100.0%)", "4 retrieved, 4 hit"],
        ),
        (
            "llama_index/ingestion.py",
            [
                "first: encoded 3\nagain: encoded 0\none text edited: encoded 1\n",
                "hidden metadata edited: encoded 0\none dropped: encoded 0\nremoved: ('inn',)\n",
                "reclaimed: 2 entries",
                "from stored KV: ",
            ],
        ),
    ],
)
def test_example_shows_what_it_promises_when_it_is_run(name, expected):
    """The output holds the hits and answers that the example is about."""
    finished = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for text in expected:
        assert text in finished.stdout


def test_every_example_is_run_when_one_is_added():
    """The list above names every file of the folder."""
    mark = next(m for m in test_example_shows_what_it_promises_when_it_is_run.pytestmark
                if m.name == "parametrize")  # fmt: skip
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert {name for name, _ in mark.args[1]} == found - SHARED
