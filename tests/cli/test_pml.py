"""``pc-rag pml`` shows problems where they are, and layouts as they will be."""

from __future__ import annotations

import pytest

from tests.support.cli import run

SCHEMA = """\
<schema name="trip">
  <system>You plan trips.</system>
  <union>
    <module name="rome">Rome</module>
    <module name="paris">Paris!</module>
  </union>
</schema>
"""
PROMPT = '<prompt schema="trip"><rome/>Plan three days.</prompt>'
BROKEN = """\
<schema name="trip">
  <module>no name</module>
  <modul name="x">misspelt</modul>
</schema>
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="file.xml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "kind"), [(SCHEMA, "schema"), (PROMPT, "prompt")], ids=["schema", "prompt"]
)
def test_file_passes_when_it_has_no_problem(file, text, kind):
    """Schemas and prompts are told apart by their root."""
    path = file(text)
    done = run("pml", "check", path)
    assert (done.exit_code, done.stdout) == (0, f"{path}: {kind} trip: no problems\n")
    expected = {"file": str(path), "kind": kind, "name": "trip", "problems": []}
    assert run("pml", "check", path, "--json").json == {"files": [expected]}


def test_every_problem_is_located_when_a_file_is_broken(file):
    """Line and column of each, exit code 1."""
    path = file(BROKEN)
    done = run("pml", "check", path)
    assert done.exit_code == 1
    assert f"{path}: line 2, column 3: " in done.stderr
    assert f"{path}: line 3, column 3: " in done.stderr
    assert done.stdout == ""


def test_problems_are_the_result_when_json_is_asked_for(file):
    """Each with line, column and message; good files beside it pass."""
    good, broken = file(SCHEMA, "good.xml"), file("<schema>AT&T</schema>", "broken.xml")
    done = run("pml", "check", good, broken, "--json")
    assert done.exit_code == 1
    first, second = done.json["files"]
    assert first["problems"] == []
    assert second["problems"][0]["line"] == 1
    assert second["problems"][0]["column"] > 8
    assert "&amp;" in second["problems"][0]["message"]


def test_files_are_included_when_their_root_is_given(file, tmp_path, tiny_model_folder):
    """Without the root src is a problem like others."""
    file("Rome!", "rome.txt")
    path = file('<schema name="trip"><module name="rome" src="rome.txt"/></schema>')
    assert "--src-root" in run("pml", "check", path).stderr
    assert run("pml", "check", path, "--src-root", tmp_path).exit_code == 0
    command = ("pml", "layout", path, "--model", tiny_model_folder, "--json")
    rows = run(*command, "--src-root", tmp_path).json["rows"]
    assert rows[0]["num_tokens"] >= len("Rome!")


@pytest.mark.parametrize("command", [("check",), ("layout",)])
def test_file_is_refused_when_it_cannot_be_read(tmp_path, command):
    """A missing file is a refused input, not a traceback."""
    done = run("pml", *command, tmp_path / "absent.xml")
    assert done.exit_code == 1
    assert "cannot be read" in done.stderr


def test_rows_are_the_layout_when_a_schema_is_laid_out(file, tiny_model_folder):
    """Members of a union share their start and reserve the longest; tokens are the model's."""
    path = file(SCHEMA)
    rows = run("pml", "layout", path, "--model", tiny_model_folder, "--json").json["rows"]
    by_path = {row["path"]: row for row in rows if row["kind"] in {"schema", "module"}}
    rome, paris = by_path["rome"], by_path["paris"]
    assert rome["span"]["start"] == paris["span"]["start"]
    assert rome["num_reserved"] == paris["num_reserved"] == len("Paris!")
    assert (rome["num_tokens"], paris["num_tokens"]) == (len("Rome"), len("Paris!"))
    assert by_path["trip"]["span"]["end"] == paris["span"]["end"]


def test_layout_is_a_tree_when_it_is_for_people(file, tiny_model_folder):
    """Nodes are indented below what holds them, with spans beside them."""
    done = run("pml", "layout", file(SCHEMA), "--model", tiny_model_folder)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["node", "span", "reserved", "tokens", "entries"]
    assert lines[1].startswith("schema trip")
    assert any(line.startswith("    module rome") for line in lines)
    assert "[0, " in lines[1]


def test_problems_are_reported_when_a_broken_schema_is_laid_out(file):
    """As check does, before a tokenizer is loaded."""
    done = run("pml", "layout", file(BROKEN), "--model", "/nowhere")
    assert done.exit_code == 1
    assert "line 2, column 3" in done.stderr


def test_model_failure_is_reported_when_there_is_no_tokenizer(file, tmp_path):
    """Exit code 3 with the path."""
    done = run("pml", "layout", file(SCHEMA), "--model", tmp_path / "absent")
    assert done.exit_code == 3
    assert "absent" in done.stderr
