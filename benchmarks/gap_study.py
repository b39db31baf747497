"""What gaps between position IDs do to answers.

Prompt Cache (arXiv 2311.04934) reserves position IDs for the longest member of a union and for the
longest argument; what is shorter leaves a gap. Its section 4.2 expects that gaps do little. Here
they are varied: how many position IDs one leaves out (0 to 100,000), how many gaps there are, and
where they stand (before the first chunk, between chunks, before the question).

    uncached   every token is computed with the gaps: what a gap itself does
    module     chunks are stored entries that saw themselves only (the paper)
    prefix     chunks are stored entries that saw the prompt's beginning (this project's default)

What is measured, for each cell and arm, over the same tokens, against the same arm without gaps:
the KL divergence of the answer's first token and the largest difference of its logits, the
perplexity of the right answer, exact match and F1 (as SQuAD counts them) of the greedy answer, and
how often it is the same answer. 95 % intervals by bootstrap over questions. `kl_to_full` in the
JSON is the divergence from full prefill without gaps.

Two tasks. `synthetic`: five people, a chunk with the same six facts about each; one fact is asked
for. `xquad`: a question of XQuAD (English) about its paragraph and one more of the article, cut
into five chunks at ends of sentences; the file is not part of the repository.

The planner refuses position IDs beyond those a model was trained for. The study goes below it, and
marks such cells. Where a model has a table of positions, cells beyond it cannot be computed and are
reported as refused.

What is not measured: speed, repair, other lengths of context, sampled answers.

    python benchmarks/gap_study.py [--model smollm2] [--synthetic 10] [--questions 10] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from gap_cells import COUNTS, SIZES, grid
from gap_prompts import Prompt, prompt_of
from gap_questions import Question, synthetic_questions, xquad_questions
from gap_reader import Answerer, Arm, PromptReader
from gap_scores import Outcome, outcome_of
from gap_summary import arm_result, rounded, tables
from scoring import SEED, default_xquad, first_sentence

from pc_rag.model.attention.kv_view import KVView
from pc_rag.model.detection.detect import runner_of
from pc_rag.model.loading import LoadedModel, load_model
from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gap_cells import Cell

    from pc_rag.model.runner import Runner

NUM_CHUNKS = 5
MAX_ANSWER_TOKENS = 8
QUICK_SIZES = (64, 100_000)


class Study:
    """One model, asked questions in every cell and arm.

    Args:
        loaded: The model.
        cells: What is varied; the one without gaps first.
    """

    def __init__(self, loaded: LoadedModel, cells: Sequence[Cell]) -> None:
        self.loaded = loaded
        self.cells = cells
        self.runner = runner_of(loaded.model, loaded.detection)
        self._answerer = Answerer(loaded, self.runner, max_tokens=MAX_ANSWER_TOKENS)

    def results(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Everything that is reported of the cells, with the scores of single questions."""
        prompts = [prompt_of(each, self.loaded.tokenizer) for each in questions]
        ends = {cell: max(end_of(prompt, cell) for prompt in prompts) for cell in self.cells}
        limit = find_limit(self.loaded, self.runner, max(ends.values()))
        read = [cell for cell in self.cells if limit is None or ends[cell] <= limit]
        scores = []
        for number, (question, prompt) in enumerate(zip(questions, prompts, strict=True), 1):
            scores.append(self._ask(question, prompt, read))
            print(f"\r{number} of {len(questions)} questions", end="", file=sys.stderr)
        print(file=sys.stderr)
        tasks = [question.task for question in questions]
        counts = [prompt.num_tokens for prompt in prompts]
        return {
            "placement": self.runner.positions.placement.value,
            "max_position": self.loaded.max_position,
            "num_chunks": NUM_CHUNKS,
            "tasks": {task: tasks.count(task) for task in dict.fromkeys(tasks)},
            "question_tasks": tasks,
            "prompt_tokens": {"min": min(counts), "max": max(counts)},
            "cells": [
                self._record(cell, ends[cell], limit)
                | {
                    "arms": {
                        arm.value: arm_result([each[cell, arm] for each in scores])
                        for arm in (Arm if cell in read else ())
                    }
                }
                for cell in self.cells
            ],
        }

    def _record(self, cell: Cell, end: int, limit: int | None) -> dict[str, Any]:
        is_refused = limit is not None and end > limit
        return {
            "place": cell.place.value,
            "num_gaps": cell.num_gaps,
            "size": cell.size,
            "total": cell.total,
            "end": end,
            "is_beyond_trained": end > self.loaded.max_position,
            "refused": f"refused: {end:,} position IDs, the model has {limit:,}"
            if is_refused
            else None,
        }

    def _ask(
        self, question: Question, prompt: Prompt, cells: Sequence[Cell]
    ) -> dict[tuple[Cell, Arm], dict[str, float]]:
        """Scores of one question. The first of the cells is without gaps."""
        reader = PromptReader(self.loaded, self.runner, prompt)
        full: Outcome | None = None
        scores = {}
        for arm in Arm:
            gapless: Outcome | None = None
            for cell in cells:
                reading = reader.read(arm, prompt.spans(cell))
                given = self._answerer.answer(reading, gapless.answer_ids if gapless else ())
                outcome = outcome_of(
                    reading.logits.cpu(),
                    prompt.right,
                    given,
                    first_sentence(self._answerer.text(given)),
                    question.answers,
                )
                gapless = gapless or outcome
                full = full or outcome
                scores[cell, arm] = outcome.against(gapless, full)
        return scores


def end_of(prompt: Prompt, cell: Cell) -> int:
    """The first position ID behind the prompt and any answer that is computed."""
    return prompt.spans(cell)[-1].end + max(len(prompt.right), MAX_ANSWER_TOKENS) - 1


def find_limit(loaded: LoadedModel, runner: Runner, end: int) -> int | None:
    """How many position IDs the model can compute at all; ``None`` where ``end`` are no matter.

    Rotations and biases go on for ever; learned positions end with their table, and so do rotations
    that a model has tabulated.
    """
    if runner.positions.placement is Placement.FIXED:
        return loaded.max_position
    try:
        runner.prefill(KVView((), runner.pool.take(1)), [0], [end - 1])
    except IndexError:
        return loaded.max_position
    return None


def ask_for(arguments: argparse.Namespace, loaded: LoadedModel) -> list[Question]:
    """The questions of both tasks."""
    questions = synthetic_questions(arguments.synthetic, NUM_CHUNKS)
    if arguments.questions and arguments.xquad is None:
        print("xquad: skipped; no shared/data/xquad.en.json above the repository, pass --xquad")
    elif arguments.questions:
        questions += xquad_questions(
            arguments.xquad,
            arguments.questions,
            NUM_CHUNKS,
            lambda text: len(loaded.tokenizer.encode_text(text)),
        )
    return questions


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a name, a folder or a .gguf file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--synthetic", type=int, default=10, help="synthetic questions")
    parser.add_argument("--questions", type=int, default=10, help="of XQuAD")
    parser.add_argument("--xquad", type=Path, default=default_xquad(), help="XQuAD as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="IDS")
    parser.add_argument("--quick", action="store_true", help="two synthetic questions, two sizes")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.synthetic, parsed.questions, parsed.sizes = 2, 0, QUICK_SIZES
    if parsed.synthetic + parsed.questions < 1 or min(parsed.sizes) < 1:
        parser.error("at least one question, and sizes of at least one position ID")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study and print tables and one line of JSON."""
    parsed = parse(arguments)
    started = time.perf_counter()
    loaded = load_model(parsed.model, dtype=parsed.dtype, device=parsed.device)
    study = Study(loaded, list(grid(parsed.sizes, COUNTS)))
    results = study.results(ask_for(parsed, loaded))
    described = {
        "benchmark": "gap-study",
        "model": loaded.name,
        "architecture": loaded.architecture,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "seed": SEED,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip
    line = json.dumps(rounded(described | results))
    if parsed.out is not None:
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(line + "\n", encoding="utf-8")
    print(tables(json.loads(line)))
    print(line)


if __name__ == "__main__":
    main()
