"""How benchmarks of answer quality score: words as SQuAD counts them, divergence, intervals."""

from __future__ import annotations

import collections
import re
import string
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

SEED = 11
NUM_RESAMPLES = 2000


def normalised(text: str) -> list[str]:
    """Words as SQuAD compares them: lower case, without punctuation and articles."""
    bare = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall over words."""
    given, wanted = normalised(answer), normalised(right)
    num_common = sum((collections.Counter(given) & collections.Counter(wanted)).values())
    return 2 * num_common / (len(given) + len(wanted)) if num_common else 0.0


def first_sentence(text: str) -> str:
    """What of a generated text counts as the answer."""
    return re.split(r"\n|\.(?:\s|$)", text.lstrip())[0]


def kl_divergence(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """KL divergence of a distribution from the reference's, nats."""
    wanted = torch.log_softmax(reference.double(), dim=-1)
    given = torch.log_softmax(logits.double(), dim=-1)
    return float((wanted.exp() * (wanted - given)).sum())


def bootstrap(
    num_items: int, statistic: Callable[[NDArray[np.int64]], NDArray[np.float64]]
) -> tuple[float, float]:
    """The 95 % interval of a statistic over items that are drawn anew.

    Args:
        num_items: How many there are.
        statistic: Of drawn indices ``[num_resamples, num_items]``, one value per row.
    """
    rng = np.random.default_rng(SEED)
    drawn = statistic(rng.integers(num_items, size=(NUM_RESAMPLES, num_items)))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and the mean's 95 % interval by bootstrap."""
    array = np.asarray(values, dtype=np.float64)
    low, high = bootstrap(len(array), lambda drawn: array[drawn].mean(axis=1))
    return {
        "mean": float(array.mean()),
        "low": low,
        "high": high,
        "median": float(np.median(array)),
    }


def default_xquad() -> Path | None:
    """The file in a folder ``shared/data`` above the repository."""
    places = (
        each / "shared" / "data" / "xquad.en.json" for each in Path(__file__).resolve().parents
    )
    return next((place for place in places if place.is_file()), None)
