"""``pc-rag ask`` answers from stored KV, and says what it cost."""

from __future__ import annotations

import re

import pytest

from tests.support.cli import run

QUESTION = "how many countries does the Danube flow through"


def test_answer_alone_is_on_stdout_when_asked(indexed):
    """What it cost goes to stderr, so that an answer can be redirected."""
    done = indexed.run("ask", QUESTION, "--max-new-tokens", 4)
    assert done.exit_code == 0
    assert re.search(r"tokens: \d+ cached, \d+ fresh; hits: .*composed", done.stderr)
    assert "TTFT" in done.stderr
    assert "TTFT" not in done.stdout
    assert "tiers: 5 disk; misses: none" in done.stderr
    assert done.stdout.endswith("\n")


def test_every_chunk_hits_when_another_process_indexed(indexed):
    """Nothing of the options of the index is repeated: the store knows them."""
    metrics = indexed.run("ask", QUESTION, "--max-new-tokens", 2, "--json").json["metrics"]
    assert metrics["module_hit_rate"] == 1.0
    assert metrics["num_cache_creation_tokens"] == 0
    assert metrics["num_cached_tokens"] > metrics["num_fresh_tokens"] > 0


def test_nearest_chunk_comes_first_when_chunks_are_shown(indexed):
    """--show-chunks prints sources and texts before the answer."""
    done = indexed.run("ask", QUESTION, "-k", 1, "--show-chunks", "--max-new-tokens", 2)
    assert done.stdout.startswith(f"[1] {indexed.documents / 'rivers.txt'} (score ")
    assert "The Danube flows through ten countries" in done.stdout
    assert "[2]" not in done.stdout


def test_markup_in_chunks_shows_as_it_is_when_printed(workspace):
    """Square brackets and emoji names of a document are not styles of the terminal."""
    text = "Use [bold]this[/bold] and :smile: for [/] smiling."
    (workspace.documents / "markup.txt").write_text(text)
    workspace.index(path=workspace.documents / "markup.txt")
    done = workspace.run("ask", "smiling", "--show-chunks", "--max-new-tokens", 2)
    assert text in done.stdout


def test_both_arms_are_shown_when_compared(indexed):
    """Two answers, two TTFTs and their ratio; and that a warm-up came before."""
    done = indexed.run("ask", QUESTION, "--compare", "--max-new-tokens", 4)
    assert done.exit_code == 0
    for heading in ("cached:", "uncached:", "TTFT cached", "TTFT uncached", "ratio"):
        assert heading in done.stdout
    assert re.search(r"\d+\.\dx", done.stdout)
    assert "warm-up" in done.stderr


def test_arms_share_the_prompt_when_compared_as_json(indexed):
    """The uncached arm computes the very same tokens, all of them."""
    done = indexed.run("ask", QUESTION, "--compare", "--max-new-tokens", 4, "--json").json
    cached, uncached = done["cached"]["metrics"], done["uncached"]["metrics"]
    assert cached["prompt_tokens"] == uncached["prompt_tokens"]
    assert uncached["num_cached_tokens"] == 0
    assert {use["miss_reason"] for use in uncached["modules"]} == {"reuse-off"}
    assert done["ttft_ratio"] == uncached["ttft_seconds"] / cached["ttft_seconds"]
    assert done["cached"]["answer"]
    assert done["uncached"]["answer"]


def test_arms_agree_when_one_chunk_is_read(indexed):
    """One chunk behind the prefix is exact, so greedy answers are the same."""
    done = indexed.run("ask", QUESTION, "--compare", "-k", 1, "--max-new-tokens", 6, "--json").json
    assert done["cached"]["answer"] == done["uncached"]["answer"]


def test_nothing_hits_when_the_model_is_another(indexed, other_model_folder):
    """Said before the answer, and every miss has the reason."""
    options = ("--model", other_model_folder, "--max-new-tokens", 2, "--json")
    done = indexed.run("ask", QUESTION, *options)
    assert done.exit_code == 0
    assert "nothing will hit" in done.stderr
    modules = done.json["metrics"]["modules"]
    assert {use["miss_reason"] for use in modules} == {"fingerprint"}


def test_documents_are_chosen_when_metadata_is_given(indexed):
    """--where reads only what fits."""
    done = indexed.run(
        "ask", QUESTION, "--where", "file_name=cats.md", "--max-new-tokens", 2, "--json"
    )
    assert {chunk["metadata"]["file_name"] for chunk in done.json["chunks"]} == {"cats.md"}


def test_lack_of_chunks_is_said_when_none_fits(indexed):
    """An answer without context is not passed off as one from the corpus."""
    done = indexed.run("ask", QUESTION, "--where", "file_name=none", "--max-new-tokens", 2)
    assert "no chunk to read" in done.stderr


@pytest.mark.parametrize("pair", ["file_name", "=x", ""])
def test_usage_error_is_reported_when_where_is_no_pair(indexed, pair):
    """Exit code 2 before anything is loaded."""
    done = indexed.run("ask", QUESTION, "--where", pair)
    assert done.exit_code == 2
    assert "is not KEY=VALUE" in done.stderr


def test_store_failure_is_reported_when_there_is_no_store(workspace):
    """The message says how to make one."""
    done = workspace.run("ask", QUESTION)
    assert done.exit_code == 3
    assert "pc-rag index" in done.stderr
    assert not workspace.store.exists()


def test_store_is_found_when_the_environment_names_it(indexed, monkeypatch):
    """PC_RAG_STORE stands for --store."""
    monkeypatch.setenv("PC_RAG_STORE", str(indexed.store))
    assert run("ask", QUESTION, "--max-new-tokens", 2).exit_code == 0


def test_prompt_is_refused_when_it_does_not_fit_the_context(indexed):
    """A question longer than the model's context: exit code 1."""
    done = indexed.run("ask", "x" * 3000)
    assert done.exit_code == 1
    assert "context overflow" in done.stderr


def test_usage_error_is_reported_when_sampling_is_malformed(indexed):
    """What the generation refuses is a usage error too."""
    assert indexed.run("ask", QUESTION, "--repetition-penalty", "-1").exit_code == 2
