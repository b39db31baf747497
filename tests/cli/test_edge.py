"""The edge: every error of ours is a message and an exit code, and help costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pc_rag
from pc_rag import errors
from pc_rag.cli.edge import ExitCode, exit_code_of
from pc_rag.cli.help_pages import help_pages
from tests.support.cli import run

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "faiss", "numpy", "sentence_transformers", "lxml"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.IngestError("x"), ExitCode.REFUSED),
        (errors.LayoutError("x"), ExitCode.REFUSED),
        (errors.PMLSyntaxError("x"), ExitCode.REFUSED),
        (errors.SchemaError("x"), ExitCode.REFUSED),
        (errors.PromptError("x"), ExitCode.REFUSED),
        (errors.ConfigError("x"), ExitCode.USAGE),
        (errors.StoreFull("x"), ExitCode.FAILED),
        (errors.StoreIOError("x"), ExitCode.FAILED),
        (errors.UnsupportedModelError("x"), ExitCode.FAILED),
        (errors.GenerationError("x"), ExitCode.FAILED),
        (errors.MissingDependencyError("x", "y"), ExitCode.FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_code_tells_the_kind_when_an_error_reaches_the_edge(error, code):
    """Refused input, usage, or failure: a script can tell them apart."""
    assert exit_code_of(error) is code


def test_nothing_heavy_is_imported_when_help_is_asked_for():
    """``pc-rag --help`` answers at once: libraries load inside commands."""
    program = (
        "import sys\nfrom pc_rag.cli import app\n"
        "try:\n    app(['index', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Usage:" in done.stdout
    loaded = {name.partition(".")[0] for name in done.stdout.split("loaded:")[1].split()}
    assert not loaded & HEAVY


def test_version_is_shown_when_asked_for():
    """The package's own."""
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"pc-rag {pc_rag.__version__}\n")


def test_usage_error_is_reported_when_an_option_is_unknown():
    """Exit code 2, on stderr."""
    done = run("stats", "--no-such-option")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "no-such-option" in done.stderr


def test_page_is_current_when_commands_change():
    """``docs/cli.md`` says what the help pages say; its header says how to write it anew."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == help_pages(), "run: python -m pc_rag.cli.help_pages > docs/cli.md"


@pytest.mark.parametrize(
    "command", ["index", "ask", "stats", "gc", "remove", "check", "demo", "pml check", "pml layout"]
)
def test_json_is_offered_when_a_command_has_a_result(command):
    """Every command has --json."""
    assert "--json" in run(*command.split(), "--help").stdout
