"""The gap study reads what it says it reads, and its page shows what its results say."""

from __future__ import annotations

import json

import pytest
import torch

from pc_rag.errors import MissingDependencyError
from pc_rag.model.detection.detect import runner_of
from pc_rag.model.loading import wrap_model
from pc_rag.types import Visibility
from tests.support.reference import Module, assembled_logits, full_logits
from tests.support.tiny_models import tiny_model

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
CELLS = (
    ("NOWHERE", 0, 0),
    ("BEFORE_CHUNKS", 1, 40),
    ("BETWEEN_CHUNKS", 2, 40),
    ("BETWEEN_CHUNKS", 1, 100_000),
    ("BEFORE_QUESTION", 1, 40),
)


def reader_of(name):
    """A reader of a short prompt, and the model."""
    from gap_prompts import prompt_of  # noqa: PLC0415 - neighbours are found while a test runs
    from gap_questions import Question  # noqa: PLC0415
    from gap_reader import PromptReader  # noqa: PLC0415

    model, tokenizer = tiny_model(name)
    loaded = wrap_model(model, tokenizer)
    chunks = ("Oslo lies in Norway.", "Lima lies in Peru.", "Rome is old.", "x", "Cats sleep.")
    question = Question("test", chunks, "Where is Oslo?", "It lies in", ("Norway",))
    runner = runner_of(model, loaded.detection)
    return PromptReader(loaded, runner, prompt_of(question, loaded.tokenizer))


def cells(reader):
    """Those that the model can compute."""
    from gap_cells import Cell, Place  # noqa: PLC0415

    found = [Cell(Place[place], count, size) for place, count, size in CELLS]
    has_table = reader.runner.positions.placement == "fixed"
    return [cell for cell in found if cell.size < reader.loaded.max_position or not has_table]


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gpt2"])
def test_uncached_arm_is_stock_transformers_when_there_are_gaps(name):
    """Logits behind the prompt and behind the tokens of the right answer, in every cell."""
    from gap_reader import Arm  # noqa: PLC0415

    reader = reader_of(name)
    right = reader.prompt.right
    ids = [i for run in reader.prompt.runs for i in run]
    for cell in cells(reader):
        spans = reader.prompt.spans(cell)
        positions = [p for span in spans for p in range(span.start, span.end)]
        logits = reader.read(Arm.UNCACHED, spans).logits
        end = spans[-1].end
        for count in (0, len(right) - 1):
            known = right[:count]
            expected = full_logits(
                reader.loaded.model, [*ids, *known], [*positions, *range(end, end + count)]
            )
            torch.testing.assert_close(logits[count], expected, **CLOSE)


@pytest.mark.parametrize("arm", ["module", "prefix"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gpt2"])
def test_stored_arms_are_the_reference_when_there_are_gaps(name, arm):
    """Each chunk alone as its visibility says, moved, and the question densely behind."""
    from gap_reader import Arm  # noqa: PLC0415

    reader = reader_of(name)
    prefix = reader.prompt.runs[0]
    for cell in cells(reader):
        spans = reader.prompt.spans(cell)
        logits = reader.read(Arm(arm), spans).logits
        plan = reader._stored(Visibility(arm), spans)
        modules = {}
        for part in plan.cached:
            sees_prefix = arm == "prefix" and part.token_ids != prefix
            context = (prefix, tuple(range(len(prefix)))) if sees_prefix else ((), ())
            modules[part.key] = Module(part.token_ids, part.encoded_start, *context)
        expected = assembled_logits(reader.loaded.model, plan, modules)
        torch.testing.assert_close(logits[0], expected, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_answer_is_the_same_when_a_draft_is_right_in_part(name):
    """Drafts save passes, and change no token."""
    from gap_cells import GAPLESS  # noqa: PLC0415
    from gap_reader import Answerer, Arm  # noqa: PLC0415

    reader = reader_of(name)
    answerer = Answerer(reader.loaded, reader.runner, max_tokens=6)
    reading = reader.read(Arm.PREFIX, reader.prompt.spans(GAPLESS))
    plain = answerer.answer(reading)
    for known in range(len(plain) + 1):
        draft = [*plain[:known], *((each + 1) % 250 for each in plain[known:])]
        assert answerer.answer(reading, draft) == plain


def quick(folder, name):
    """Results of a smoke run with a tiny model."""
    import gap_study  # noqa: PLC0415

    model, tokenizer = tiny_model(name)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    out = folder / "results.json"
    gap_study.main(["--model", str(folder / name), "--quick", "--out", str(out)])
    return json.loads(out.read_text())


def test_every_cell_is_reported_when_the_study_runs(tmp_path, capsys):
    """Nothing differs without a gap; cells beyond the trained range are computed and marked."""
    results = quick(tmp_path, "llama")
    cells = results["cells"]
    assert len(cells) == 1 + 5 * 2
    for arm in ("uncached", "module", "prefix"):
        gapless, *others = [cell["arms"][arm]["summary"] for cell in cells]
        assert gapless["kl"]["mean"] == gapless["max_logit_difference"]["mean"] == 0
        assert gapless["is_same_answer"]["mean"] == gapless["perplexity_ratio"]["value"] == 1
        assert all(each["max_logit_difference"]["mean"] > 1e-3 for each in others)
    assert {cell["size"] for cell in cells if cell["is_beyond_trained"]} == {100_000}
    assert not any(cell["refused"] for cell in cells)
    assert "| 4 between chunks | 100,000 † |" in capsys.readouterr().out


def test_cells_are_refused_with_numbers_when_positions_are_a_table(tmp_path, capsys):
    """A model with learned positions has no more of them; what lies within is still read."""
    results = quick(tmp_path, "gpt2")
    assert results["placement"] == "fixed"
    for cell in results["cells"]:
        assert bool(cell["refused"]) == (cell["size"] == 100_000) == (not cell["arms"])
    assert "position IDs, the model has 2,048 |" in capsys.readouterr().out


def test_page_shows_the_results_when_it_is_read(benchmarks):
    """``docs/gap_study.md`` holds the tables of the results beside the benchmark."""
    from gap_report import with_tables  # noqa: PLC0415

    results = json.loads((benchmarks / "results" / "gap-study-float32-cpu.json").read_text())
    page = (benchmarks.parent / "docs" / "gap_study.md").read_text(encoding="utf-8")
    assert with_tables(page, results) == page


def test_extra_is_named_when_matplotlib_is_absent(tmp_path, monkeypatch):
    """Only the plot needs it."""
    from gap_report import draw  # noqa: PLC0415

    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pc-rag\[bench\]"):
        draw({"cells": []}, tmp_path / "plot.svg")


def test_gaps_stand_where_the_cell_says_when_a_prompt_is_placed():
    """Before the first chunk, before the question, or spread evenly between chunks."""
    from gap_cells import COUNTS, SIZES, Cell, Place, grid  # noqa: PLC0415
    from gap_prompts import Prompt  # noqa: PLC0415

    prompt = Prompt(((1, 1), (2,), (3,), (4,), (5,), (6,), (7, 7, 7)), (8,))

    def starts(cell):
        return [span.start for span in prompt.spans(cell)]

    assert starts(Cell()) == [0, 2, 3, 4, 5, 6, 7]
    assert starts(Cell(Place.BEFORE_CHUNKS, 1, 10)) == [0, 12, 13, 14, 15, 16, 17]
    assert starts(Cell(Place.BETWEEN_CHUNKS, 1, 10)) == [0, 2, 3, 4, 15, 16, 17]
    assert starts(Cell(Place.BETWEEN_CHUNKS, 2, 10)) == [0, 2, 3, 14, 15, 26, 27]
    assert starts(Cell(Place.BETWEEN_CHUNKS, 4, 10)) == [0, 2, 13, 24, 35, 46, 47]
    assert starts(Cell(Place.BEFORE_QUESTION, 1, 10)) == [0, 2, 3, 4, 5, 6, 17]
    for cell in grid(SIZES, COUNTS):
        assert sum(cell.gaps(5)) == cell.total
        assert prompt.spans(cell)[-1].end == prompt.num_tokens + cell.total


def test_chunks_hold_the_whole_text_when_a_context_is_cut():
    """At ends of sentences only, none of them empty; too few sentences are none."""
    from gap_questions import cut  # noqa: PLC0415

    text = "One. Two is longer than one! Three? Four. Five is the longest of all. Six."
    for num_chunks in range(1, 7):
        chunks = cut(text, num_chunks)
        assert len(chunks) == num_chunks
        assert " ".join(chunks) == text
        assert all(chunk[-1] in ".!?" for chunk in chunks)
    assert cut(text, 7) is None
