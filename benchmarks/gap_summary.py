"""From the scores of single questions to what ``benchmarks/gap_study.py`` reports of a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gap_reader import Arm
from scoring import bootstrap, interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Scores = Mapping[str, float]
    """Of one question, by name."""
    Summary = dict[str, dict[str, float]]
    """By name: mean or value, and the interval."""

MEANS = (
    "kl",
    "max_logit_difference",
    "kl_to_full",
    "exact_match",
    "f1",
    "f1_to_gapless",
    "is_same_answer",
)
"""Scores whose mean is reported; perplexities are not means."""


def summary(scores: Sequence[Scores]) -> Summary:
    """Means with intervals, and perplexities of the right answers."""
    found = {name: interval([each[name] for each in scores]) for name in MEANS}
    found["perplexity"] = _perplexity(scores, "nll")
    found["perplexity_ratio"] = _perplexity(scores, "nll_to_gapless")
    return found


def _perplexity(scores: Sequence[Scores], name: str) -> dict[str, float]:
    """The exponential of a sum of negative log-probabilities over all tokens."""
    sums = np.asarray([each[name] for each in scores])
    counts = np.asarray([each["num_right_tokens"] for each in scores])
    low, high = bootstrap(
        len(scores), lambda drawn: np.exp(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    )
    return {"value": float(np.exp(sums.sum() / counts.sum())), "low": low, "high": high}


def arm_result(scores: Sequence[Scores]) -> dict[str, Any]:
    """What is reported of one cell in one arm.

    Args:
        scores: One of each question.
    """
    columns = {name: [each[name] for each in scores] for name in scores[0]}
    return {"summary": summary(scores), "scores": columns}


def rounded(value: Any) -> Any:
    """A result with six digits behind the point."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return value


def tables(results: Mapping[str, Any]) -> str:
    """What people read: the run in a sentence, then a table for each arm, in Markdown."""
    tasks = " and ".join(f"{number} {task}" for task, number in results["tasks"].items())
    tokens = results["prompt_tokens"]
    versions = results["versions"]
    run = (
        f"Model: {results['model']} ({results['architecture']}, {results['dtype']}, placement "
        f"`{results['placement']}`), trained for {results['max_position']:,} position IDs. "
        f"Questions: {tasks}. Prompts of {tokens['min']} to {tokens['max']} tokens, "
        f"{results['num_chunks']} chunks in each; {results['machine']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}."
    )
    lines = [run, "", *_levels(results)]
    for arm in Arm:
        lines += ["", f"**{arm}**", "", *_HEAD]
        lines += [_row(cell, arm) for cell in results["cells"]]
    return "\n".join(lines)


_LONG = 10_000
"""From here on numbers are written by their order of magnitude."""
_COLUMNS = (
    "gaps",
    "size of each",
    "KL",
    "max logit difference",
    "perplexity",
    "ratio to gapless",
    "EM %",
    "F1 %",
    "same answer %",
)
_HEAD = (f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|")


def _levels(results: Mapping[str, Any]) -> list[str]:
    """What the arms reach without gaps, by task."""
    lines = ["| without gaps | arm | perplexity | EM % | F1 % |", "|---|---|---|---|---|"]
    gapless = results["cells"][0]["arms"]
    for task in results["tasks"]:
        of_task = [n for n, each in enumerate(results["question_tasks"]) if each == task]
        for arm in Arm:
            columns = gapless[arm.value]["scores"]
            row = summary([{name: columns[name][n] for name in columns} for n in of_task])
            cells = [
                _written(row["perplexity"], 2),
                _written(row["exact_match"], 0, factor=100),
                _written(row["f1"], 0, factor=100),
            ]
            lines.append(f"| {task} | {arm} | " + " | ".join(cells) + " |")
    return lines


def _row(cell: Mapping[str, Any], arm: Arm) -> str:
    mark = " †" if cell["is_beyond_trained"] else ""
    count = f"{cell['num_gaps']} " if cell["num_gaps"] > 1 else ""
    head = f"| {count}{cell['place']} | {cell['size']:,}{mark} | "
    if cell["refused"]:
        return f"{head}{cell['refused']}" + " |" * (len(_COLUMNS) - 2)
    row = cell["arms"][arm.value]["summary"]
    cells = [
        _written(row["kl"], 3),
        _written(row["max_logit_difference"], 2),
        _written(row["perplexity"], 2),
        _written(row["perplexity_ratio"], 2),
        f"{100 * row['exact_match']['mean']:.0f}",
        _written(row["f1"], 0, factor=100),
        f"{100 * row['is_same_answer']['mean']:.0f}",
    ]
    return head + " | ".join(cells) + " |"


def _written(each: Mapping[str, float], digits: int, *, factor: float = 1.0) -> str:
    middle = each["mean"] if "mean" in each else each["value"]
    middle, low, high = (
        f"{value:.0e}" if value >= _LONG else f"{value:,.{digits}f}"
        for value in (factor * each for each in (middle, each["low"], each["high"]))
    )
    return f"{middle} [{low}, {high}]"
