"""Every example runs as a user would run it, with the real default model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart.py", ["encoded 3 chunks", "from stored KV: ", "four euros"]),
        ("prompt_markup.py", ["rome: ", "mutton stew", "exact"]),
        ("own_chain.py", ["composed (other-prefix)", "learned: 2 chunks", "exact"]),
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
    assert finished.returncode == 0, finished.stderr
    for text in expected:
        assert text in finished.stdout


def test_every_example_is_run_when_one_is_added():
    """The list above names every file of the folder."""
    mark = next(m for m in test_example_shows_what_it_promises_when_it_is_run.pytestmark
                if m.name == "parametrize")  # fmt: skip
    assert {name for name, _ in mark.args[1]} == {path.name for path in EXAMPLES.glob("*.py")}
