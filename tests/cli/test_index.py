"""``pc-rag index`` takes in what it can, says what it cannot, and never leaves half a store."""

from __future__ import annotations

import shutil
from typing import NamedTuple

import pytest
from rich.progress import Progress

from pc_rag.cli.store_folder import StoreFolder
from tests.support.cli import NUM_CHUNKS, run
from tests.support.pdf import make_pdf


class Usage(NamedTuple):
    """What ``shutil.disk_usage`` returns."""

    total: int
    used: int
    free: int


def test_every_readable_file_is_indexed_when_a_folder_is_given(workspace):
    """Markdown, text and HTML become documents; the report counts them."""
    done = workspace.index("--json")
    assert done.exit_code == 0
    assert done.json["report"]["num_added"] == 3
    assert done.json["report"]["num_encoded"] == NUM_CHUNKS
    assert done.json["model"] == str(workspace.model)
    assert done.json["dtype"] == "float32"


def test_unreadable_files_are_listed_with_reasons_when_skipped(workspace):
    """Nothing is left out silently."""
    done = workspace.index("--json")
    reasons = {entry["path"]: entry["reason"] for entry in done.json["skipped"]}
    names = {workspace.documents / "image.bin", workspace.documents / "latin.txt"}
    assert set(reasons) == {str(name) for name in names}
    for path in reasons:
        assert f"skipped {path}: byte" in done.stderr


def test_needs_are_said_when_indexing_starts(workspace):
    """Documents, chunks, tokens and bytes stand on stderr, the result alone on stdout."""
    done = workspace.index()
    estimate = workspace.index("--json").json["estimate"]
    assert estimate["num_chunks"] == 0
    assert "3 documents; to encode: 6 chunks, 489 tokens, 375.6 kB in the store" in done.stderr
    assert "to encode" not in done.stdout
    assert "3 added" in done.stdout


def test_nothing_is_encoded_when_indexed_again(indexed):
    """Unchanged documents cost nothing."""
    report = indexed.index("--json").json["report"]
    assert report["num_encoded"] == 0
    assert report["num_unchanged"] == 3


def test_model_and_settings_are_remembered_when_indexed_again_without_options(indexed):
    """The second index needs neither --model nor --chunk-tokens to leave all as it is."""
    done = run("index", indexed.documents, "--store", indexed.store, "--json")
    assert done.json["report"]["num_encoded"] == 0
    assert done.json["report"]["num_unchanged"] == 3
    assert done.json["model"] == str(indexed.model)


def test_option_wins_when_the_store_remembers_another_setting(indexed):
    """What is remembered ranks below what is given."""
    done = run("index", indexed.documents, "--store", indexed.store, "--chunk-tokens", 40, "--json")
    assert done.json["report"]["num_updated"] == 3
    assert StoreFolder(indexed.store).manifest().settings["chunk_tokens"] == "40"


def test_all_is_encoded_when_the_model_is_another(indexed, other_model_folder):
    """Entries of one model are never another's."""
    done = indexed.index("--model", other_model_folder, "--json")
    assert done.json["report"]["num_encoded"] == NUM_CHUNKS


def test_indexing_is_refused_when_the_disk_has_no_room(workspace, monkeypatch):
    """The numbers are compared before the first chunk is encoded."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 10**6 - 1000, 1000))
    done = workspace.index()
    assert done.exit_code == 3
    assert "1.0 kB free; nothing was encoded" in done.stderr
    assert done.stdout == ""
    assert StoreFolder(workspace.store).manifest() is None


def test_indexing_starts_when_the_disk_is_full_but_nothing_is_needed(indexed, monkeypatch):
    """A full disk does not hinder a run that encodes nothing."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**6, 10**6, 0))
    assert indexed.index().exit_code == 0


def test_index_is_refused_when_a_path_is_missing(workspace):
    """A typing error is found before the model is loaded."""
    done = workspace.index(path=workspace.documents / "absent.md")
    assert done.exit_code == 1
    assert "absent.md: no such file" in done.stderr
    assert not workspace.store.exists()


def test_index_is_refused_when_every_file_is_skipped(workspace):
    """No document is an error, and the reasons are still listed."""
    done = workspace.index(path=workspace.documents / "image.bin")
    assert done.exit_code == 1
    assert "no document to index" in done.stderr
    assert "skipped" in done.stderr


def test_usage_error_is_reported_when_no_source_is_given(workspace):
    """Neither a path nor the reference: exit code 2."""
    done = run("index", "--store", workspace.store)
    assert done.exit_code == 2
    assert "--python-reference" in done.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "float12"), ("--device", "abacus"), ("--config", "absent")]
)
def test_usage_error_is_reported_when_a_setting_is_malformed(workspace, option, value):
    """The message names the value."""
    done = workspace.index(option, value)
    assert done.exit_code == 2
    assert value in done.stderr


def test_model_failure_is_reported_when_there_is_no_model(workspace):
    """Exit code 3, one message, no traceback."""
    done = run(
        "index", workspace.documents, "--store", workspace.store, "--model", workspace.documents
    )
    assert done.exit_code == 3
    assert "holds no config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_are_read_when_a_config_file_is_given(workspace, tmp_path):
    """A file's settings reach the engine."""
    settings = tmp_path / "pc-rag.toml"
    settings.write_text('visibility = "module"\nstorage_dtype = "bfloat16"\n')
    assert workspace.index("--config", settings).exit_code == 0
    entries = workspace.run("stats", "--json").json["entries"]
    assert [each["dtype"] for each in entries] == ["bfloat16"]


def test_store_stays_consistent_when_interrupted(workspace, monkeypatch):
    """Ctrl-C exits with 130; what was encoded stays and the next run does the rest."""
    calls = []

    def interrupt(*_args, **_kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", interrupt)
        done = workspace.index()
    assert done.exit_code == 130
    assert done.stdout == ""
    assert "interrupted" in done.stderr
    assert workspace.run("check", "--json").json == {"num_checked": 3, "damaged": []}
    assert workspace.run("stats", "--json").json["catalog"]["num_documents"] == 0
    assert workspace.index("--json").json["report"]["num_encoded"] == NUM_CHUNKS - 2


def test_every_entry_is_reclaimed_when_an_interrupted_run_went_on(workspace, monkeypatch):
    """Entries that the interrupted run stored belong to the documents of the next run."""

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", interrupt)
        workspace.index()
    workspace.index()
    ids = [workspace.documents / name for name in ("cats.md", "rivers.txt", "page.html")]
    assert workspace.run("remove", *ids).exit_code == 0
    assert workspace.run("gc", "--json").json["num_entries"] == NUM_CHUNKS


def test_documents_of_vanished_files_go_when_pruning(workspace):
    """A file that is gone takes its document with it, but only with --prune."""
    workspace.index()
    (workspace.documents / "cats.md").unlink()
    assert workspace.index("--json").json["removed"] == []
    done = workspace.index("--prune", "--json")
    assert done.json["removed"] == [str(workspace.documents / "cats.md")]
    assert workspace.run("stats", "--json").json["catalog"]["num_documents"] == 2


def test_documents_stay_when_pruning_another_folder(workspace, tmp_path):
    """Pruning looks at the given folders alone."""
    workspace.index()
    (workspace.documents / "cats.md").unlink()
    other = tmp_path / "other"
    other.mkdir()
    (other / "note.txt").write_text("A note about nothing.")
    assert workspace.index("--prune", "--json", path=other).json["removed"] == []


def test_document_stays_when_its_file_became_unreadable(workspace):
    """A file that is there is not gone, whatever it holds now."""
    workspace.index()
    (workspace.documents / "cats.md").write_bytes(b"\0")
    assert workspace.index("--prune", "--json").json["removed"] == []


def test_lost_pages_go_when_pruning_a_shorter_pdf(workspace):
    """A page that a file no longer has is gone like a file."""
    paper = workspace.documents / "paper.pdf"
    paper.write_bytes(make_pdf("First page", "Second page"))
    workspace.index()
    paper.write_bytes(make_pdf("First page"))
    assert workspace.index("--prune", "--json").json["removed"] == [f"{paper}#page=2"]


def test_entries_are_pinned_when_asked_for(workspace):
    """--pinned reaches the store."""
    workspace.index("--pinned")
    assert len(list((workspace.store / "kv" / "pins").iterdir())) == NUM_CHUNKS
