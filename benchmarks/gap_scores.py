"""What one answer of ``benchmarks/gap_study.py`` is scored by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from scoring import f1, kl_divergence, normalised

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a model made of one placing of a prompt.

    Attributes:
        first: Logits behind the prompt, ``[vocab_size]``, float32.
        answer_ids: The greedy answer.
        nll: Negative log-probability of the right answer, nats.
        num_right_tokens: Tokens of the right answer.
        f1: Of the greedy answer.
        exact_match: Alike; 0 or 1.
    """

    first: torch.Tensor
    answer_ids: list[int]
    nll: float
    num_right_tokens: int
    f1: float
    exact_match: float

    def against(self, gapless: Outcome, full: Outcome) -> dict[str, float]:
        """All scores.

        Args:
            gapless: The same prompt without gaps, from stored KV where this is.
            full: The same prompt without gaps, all of it computed.
        """
        return {
            "kl": kl_divergence(gapless.first, self.first),
            "kl_to_full": kl_divergence(full.first, self.first),
            "max_logit_difference": float((gapless.first - self.first).abs().max()),
            "nll": self.nll,
            "nll_to_gapless": self.nll - gapless.nll,
            "num_right_tokens": self.num_right_tokens,
            "f1": self.f1,
            "f1_to_gapless": self.f1 - gapless.f1,
            "exact_match": self.exact_match,
            "is_same_answer": float(self.answer_ids == gapless.answer_ids),
        }


def outcome_of(
    logits: torch.Tensor,
    right_ids: Sequence[int],
    answer_ids: list[int],
    answer: str,
    right_answers: Sequence[str],
) -> Outcome:
    """Score an answer.

    Args:
        logits: ``[num_right_tokens, vocab_size]``: behind the prompt, then behind all but the last
            token of the right answer.
        right_ids: The right answer.
        answer_ids: The greedy answer.
        answer: What of its text counts.
        right_answers: What counts as right.
    """
    log_p = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(right_ids)[:, None])
    return Outcome(
        first=logits[0],
        answer_ids=answer_ids,
        nll=-float(log_p.sum()),
        num_right_tokens=len(right_ids),
        f1=max(f1(answer, each) for each in right_answers),
        exact_match=float(any(normalised(answer) == normalised(each) for each in right_answers)),
    )
