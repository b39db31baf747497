"""Swap the model under a chain and see what changes: times to the first token, hits, answers.

``python -m langchain_pc_rag.compare mychain:build --baseline mychain:baseline --candidate
mychain:candidate --questions questions.txt``
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from langchain_pc_rag.answers import AnswerText
from langchain_pc_rag.callbacks import CacheHitHandler, RunReport, TTFTHandler
from pc_rag.errors import ConfigError, GenerationError
from pc_rag.metrics import Plain, to_plain
from pc_rag.metrics.text import misses_text, rate_text, seconds_text, table_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from langchain_core.runnables import Runnable


class Arm(StrEnum):
    """Which of the two models."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question, asked once.

    Attributes:
        arm: The model that answered.
        round_number: The round, from 0; round 0 is the warm-up.
        question_index: The question, from 0.
        ttft_seconds: From the chain's start, retrieval included, to the first token; ``None`` where
            the model does not stream.
        total_seconds: From the chain's start to its end.
        answer: The chain's answer as text.
        run: What the run found in the cache.
    """

    arm: Arm
    round_number: int
    question_index: int
    ttft_seconds: float | None
    total_seconds: float
    answer: str
    run: RunReport

    @property
    def is_warm_up(self) -> bool:
        """Whether it is of the first round, which is in no median."""
        return self.round_number == 0

    def to_dict(self) -> dict[str, Plain]:
        """Every field and every derived number, as JSON can say them."""
        return {
            "arm": self.arm.value,
            "round_number": self.round_number,
            "question_index": self.question_index,
            "ttft_seconds": self.ttft_seconds,
            "total_seconds": self.total_seconds,
            "answer": self.answer,
            "run": self.run.to_dict(),
            "is_warm_up": self.is_warm_up,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionResult:
    """One question, asked of both models.

    Attributes:
        question: The question.
        baseline_ttft_seconds: Median over the rounds behind the warm-up; ``None`` where the model
            does not stream.
        candidate_ttft_seconds: Likewise.
        hit_rate: Share of the module uses in the candidate's prompts that were hits; ``None`` where
            there was nothing to hit.
        baseline_answer: Its answer in the last round.
        candidate_answer: Likewise.
    """

    question: str
    baseline_ttft_seconds: float | None
    candidate_ttft_seconds: float | None
    hit_rate: float | None
    baseline_answer: str
    candidate_answer: str

    @property
    def ttft_ratio(self) -> float | None:
        """How many times longer the baseline takes to its first token."""
        return _ratio(self.baseline_ttft_seconds, self.candidate_ttft_seconds)

    def to_dict(self) -> dict[str, Plain]:
        """Every field and every derived number, as JSON can say them."""
        plain = to_plain(self)
        return (plain if isinstance(plain, dict) else {}) | {"ttft_ratio": self.ttft_ratio}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both models on the same chain and questions.

    Attributes:
        questions: The questions, in order.
        samples: Every answer, the warm-up's too, in the order they were asked.
    """

    questions: tuple[str, ...]
    samples: tuple[Sample, ...] = field(repr=False)

    def measured(self, arm: Arm, question_index: int | None = None) -> list[Sample]:
        """Samples of a model behind the warm-up, of one question or of all."""
        return [
            each
            for each in self.samples
            if each.arm is arm
            and not each.is_warm_up
            and question_index in {None, each.question_index}
        ]

    @property
    def results(self) -> tuple[QuestionResult, ...]:
        """One result for each question, in order."""
        return tuple(self._result(index) for index in range(len(self.questions)))

    def _result(self, index: int) -> QuestionResult:
        baseline, candidate = (self.measured(arm, index) for arm in Arm)
        return QuestionResult(
            question=self.questions[index],
            baseline_ttft_seconds=_median_ttft(baseline),
            candidate_ttft_seconds=_median_ttft(candidate),
            hit_rate=_hit_rate(candidate),
            baseline_answer=baseline[-1].answer,
            candidate_answer=candidate[-1].answer,
        )

    @property
    def baseline_ttft_seconds(self) -> float | None:
        """Median over all questions and rounds behind the warm-up."""
        return _median_ttft(self.measured(Arm.BASELINE))

    @property
    def candidate_ttft_seconds(self) -> float | None:
        """Median over all questions and rounds behind the warm-up."""
        return _median_ttft(self.measured(Arm.CANDIDATE))

    @property
    def ttft_ratio(self) -> float | None:
        """How many times longer the baseline takes to its first token, by the medians."""
        return _ratio(self.baseline_ttft_seconds, self.candidate_ttft_seconds)

    @property
    def hit_rate(self) -> float | None:
        """Share of all module uses in the candidate's prompts that were hits."""
        return _hit_rate(self.measured(Arm.CANDIDATE))

    def to_dict(self) -> dict[str, Plain]:
        """Results, medians and raw samples, as JSON can say them."""
        return {
            "questions": [result.to_dict() for result in self.results],
            "baseline_ttft_seconds": self.baseline_ttft_seconds,
            "candidate_ttft_seconds": self.candidate_ttft_seconds,
            "ttft_ratio": self.ttft_ratio,
            "hit_rate": self.hit_rate,
            "samples": [sample.to_dict() for sample in self.samples],
        }

    def table(self) -> str:
        """The comparison as text for people: the warm-up, the medians, misses, both answers."""
        header = ("question", "round", "TTFT baseline", "TTFT candidate", "ratio", "hit")
        rows = [
            *self._warm_up_rows(),
            *(_row(_short(each.question), "median", each) for each in self.results),
            _row("all questions", "median", self),
        ]
        lines = [table_text(header, rows), "", *self._misses()]
        for result in self.results:
            lines += ["", f"question: {result.question}"]
            if result.baseline_answer == result.candidate_answer:
                lines.append(f"  both: {result.candidate_answer}")
            else:
                lines.append(f"  baseline: {result.baseline_answer}")
                lines.append(f"  candidate: {result.candidate_answer}")
        return "\n".join(lines)

    def _warm_up_rows(self) -> Iterator[tuple[str, ...]]:
        for index, question in enumerate(self.questions):
            baseline, candidate = (
                [
                    each
                    for each in self.samples
                    if each.is_warm_up and each.arm is arm and each.question_index == index
                ]
                for arm in Arm
            )
            warm = QuestionResult(
                question=question,
                baseline_ttft_seconds=_median_ttft(baseline),
                candidate_ttft_seconds=_median_ttft(candidate),
                hit_rate=_hit_rate(candidate),
                baseline_answer="",
                candidate_answer="",
            )
            yield _row(_short(question), "warm-up", warm)

    def _misses(self) -> list[str]:
        measured = self.measured(Arm.CANDIDATE)
        if _hit_rate(measured) is None and measured:
            return [f"the candidate's cache: {measured[-1].run.describe()}"]
        runs = [each.run for each in measured]
        counts = {
            reason: sum(run.module_misses.get(reason, 0) for run in runs)
            for reason in (runs[0].module_misses if runs else ())
        }
        return misses_text(counts, title="the candidate's misses")


def _row(name: str, kind: str, each: QuestionResult | Comparison) -> tuple[str, ...]:
    return (
        name,
        kind,
        _ttft_text(each.baseline_ttft_seconds),
        _ttft_text(each.candidate_ttft_seconds),
        "-" if each.ttft_ratio is None else f"{each.ttft_ratio:.2f}x",
        "nothing to hit" if each.hit_rate is None else rate_text(each.hit_rate),
    )


def _ttft_text(seconds: float | None) -> str:
    return "not streamed" if seconds is None else seconds_text(seconds)


def _short(question: str, limit: int = 40) -> str:
    line = " ".join(question.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _ratio(baseline: float | None, candidate: float | None) -> float | None:
    return baseline / candidate if baseline and candidate else None


def _median_ttft(samples: Sequence[Sample]) -> float | None:
    known = [each.ttft_seconds for each in samples if each.ttft_seconds is not None]
    return statistics.median(known) if known else None


def _hit_rate(samples: Sequence[Sample]) -> float | None:
    hits = sum(each.run.num_module_hits for each in samples)
    uses = hits + sum(sum(each.run.module_misses.values()) for each in samples)
    return hits / uses if uses else None


def compare_chains(
    build: Callable[[Any], Runnable[Any, Any]],
    questions: Sequence[str],
    *,
    baseline: Any,
    candidate: Any,
    rounds: int = 3,
    as_input: Callable[[str], Any] = str,
    on_progress: Callable[[str], None] | None = None,
    read_clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Ask both models every question through the same chain, in turns, in this process.

    Each chain is built once and asked with ``stream``. The first round warms up: it is reported,
    and in no median. Which model goes first changes from question to question, so that neither has
    the caches of the machine to itself.

    Args:
        build: Makes the chain for a model; called once for each.
        questions: What to ask.
        baseline: The model to compare with.
        candidate: The model to judge.
        rounds: How often every question is asked, the warm-up included.
        as_input: Makes the chain's input of a question; the text itself by default.
        on_progress: Told what is asked next.
        read_clock: Seconds on a monotonic clock.

    Raises:
        ConfigError: There is no question, or there are fewer than two rounds.
        GenerationError: A chain failed; the message says where, the cause says why.
    """
    if not questions:
        raise ConfigError("compare_chains: there is no question; give at least one")
    if rounds < 2:  # noqa: PLR2004 - said in the message
        raise ConfigError(
            f"compare_chains: rounds is {rounds}; it must be at least 2, a warm-up and one to "
            "measure"
        )
    chains = {Arm.BASELINE: build(baseline), Arm.CANDIDATE: build(candidate)}
    samples = []
    for round_number in range(rounds):
        for index, question in enumerate(questions):
            arms = tuple(Arm) if (round_number + index) % 2 == 0 else tuple(Arm)[::-1]
            for arm in arms:
                where = f"round {round_number + 1} of {rounds}, question {index + 1}, {arm}"
                if on_progress is not None:
                    on_progress(where)
                asking = _Asking(arm, round_number, index, read_clock)
                try:
                    samples.append(asking.ask(chains[arm], as_input(question)))
                except Exception as error:
                    raise GenerationError(
                        f"{where}: the chain failed with {type(error).__name__}: {error}. Make "
                        "sure that the chain answers this question alone first"
                    ) from error
    return Comparison(tuple(questions), tuple(samples))


@dataclass(frozen=True, slots=True)
class _Asking:
    """One question to one model."""

    arm: Arm
    round_number: int
    question_index: int
    read_clock: Callable[[], float]

    def ask(self, chain: Runnable[Any, Any], chain_input: object) -> Sample:
        times = TTFTHandler(max_runs=1, read_clock=self.read_clock)
        hits = CacheHitHandler(max_runs=1)
        text = AnswerText()
        started = self.read_clock()
        for piece in chain.stream(chain_input, config={"callbacks": [times, hits]}):
            text.add(piece)
        ended = self.read_clock()
        run, report = times.last_run, hits.last_run
        return Sample(
            arm=self.arm,
            round_number=self.round_number,
            question_index=self.question_index,
            ttft_seconds=None if run is None else run.ttft_seconds,
            total_seconds=ended - started,
            answer=text.value,
            run=report or RunReport(run_id=""),
        )


if __name__ == "__main__":
    from langchain_pc_rag.compare_command import main

    sys.exit(main())
