"""Questions about a context of several chunks, for ``benchmarks/gap_study.py``."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scaffold_questions import CITIES, FIRMS, PEOPLE, ROOMS
from scoring import SEED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUESTIONS_PER_ARTICLE = 2
CONTEXT_TOKENS = (220, 360)
"""Fewest and most tokens of a context of XQuAD."""
JOBS = ("baker", "tailor", "nurse", "painter", "teacher", "pilot", "gardener", "plumber")
INSTRUMENTS = ("piano", "violin", "trumpet", "guitar", "flute", "cello", "drums", "harp")
ANIMALS = ("horse", "parrot", "rabbit", "turtle", "goat", "donkey", "pigeon", "hamster")
LIFE = (
    "{name} was born in {city}. {name} earns a living as a {job}. {name} is employed by the firm "
    "{firm}. The desk of {name} stands in the {room}. The instrument that {name} plays is the "
    "{instrument}. On Sundays {name} takes a walk along the river with a {animal}."
)
ASKED = {
    "city": ("In which city was {name} born?", "{name} was born in"),
    "job": ("What is the job of {name}?", "{name} earns a living as a"),
    "firm": ("For which firm does {name} work?", "{name} is employed by the firm"),
    "room": ("In which room does the desk of {name} stand?", "The desk of {name} stands in the"),
    "instrument": ("What does {name} play?", "The instrument that {name} plays is the"),
    "animal": ("Who walks along the river with {name}?", "{name} takes a walk with a"),
}
"""Of each fact: the question, and how the answer begins. Small models would begin with anything."""
LEAD = "The answer is:"
"""Of other questions."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context.

    Attributes:
        task: Where it comes from.
        chunks: The context, in order.
        text: The question.
        lead: How the answer begins, in all arms.
        answers: What counts as right; the first is scored by its perplexity.
    """

    task: str
    chunks: tuple[str, ...]
    text: str
    lead: str
    answers: tuple[str, ...]


def synthetic_questions(num_questions: int, num_chunks: int) -> list[Question]:
    """One fact about one of several people, each of whom has a chunk with the same six facts."""
    rng = random.Random(SEED)  # noqa: S311 - no secret
    values = {
        "city": CITIES, "job": JOBS, "firm": FIRMS, "room": ROOMS,
        "instrument": INSTRUMENTS, "animal": ANIMALS,
    }  # fmt: skip
    questions = []
    for number in range(num_questions):
        people = rng.sample(PEOPLE, num_chunks)
        drawn = {fact: rng.sample(choices, num_chunks) for fact, choices in values.items()}
        lives = [
            {"name": name} | {fact: drawn[fact][index] for fact in values}
            for index, name in enumerate(people)
        ]
        asked, fact = rng.choice(lives), tuple(ASKED)[number % len(ASKED)]
        questions.append(
            Question(
                "synthetic",
                tuple(LIFE.format_map(life) for life in lives),
                *(text.format_map(asked) for text in ASKED[fact]),
                answers=(asked[fact],),
            )
        )
    return questions


def xquad_questions(
    path: Path, num_questions: int, num_chunks: int, count_tokens: Callable[[str], int]
) -> list[Question]:
    """Questions of shuffled articles; the context is their paragraph and one more of the article.

    It is cut at ends of sentences into chunks of like length. Contexts that are longer or shorter
    than ``CONTEXT_TOKENS``, or have fewer sentences than chunks, are passed over.
    """
    rng = random.Random(SEED)  # noqa: S311 - no secret
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    rng.shuffle(articles)
    questions: list[Question] = []
    for article in articles:
        paragraphs = article["paragraphs"]
        asked = [(index, qa) for index, each in enumerate(paragraphs) for qa in each["qas"]]
        rng.shuffle(asked)
        num_before = len(questions)
        for index, qa in asked:
            if len(questions) - num_before == QUESTIONS_PER_ARTICLE:
                break
            pair = [paragraphs[index], paragraphs[index - 1]]
            rng.shuffle(pair)
            text = " ".join(each["context"].strip() for each in pair)
            chunks = cut(text, num_chunks)
            fewest, most = CONTEXT_TOKENS
            if chunks is not None and fewest <= count_tokens(text) <= most:
                answers = tuple(dict.fromkeys(each["text"] for each in qa["answers"]))
                questions.append(Question("xquad", chunks, qa["question"], LEAD, answers))
        if len(questions) >= num_questions:
            break
    return questions[:num_questions]


def cut(text: str, num_chunks: int) -> tuple[str, ...] | None:
    """A text in chunks of like length, cut at ends of sentences; ``None`` where it has too few."""
    sentences = re.split(r"(?<=[.!?])\s+", text)
    if len(sentences) < num_chunks:
        return None
    chunks: list[list[str]] = [[]]
    num_written = 0
    for number, sentence in enumerate(sentences):
        num_left = len(sentences) - number
        is_due = num_written >= len(text) * len(chunks) / num_chunks
        must = num_left == num_chunks - len(chunks)
        if chunks[-1] and len(chunks) < num_chunks and (is_due or must):
            chunks.append([])
        chunks[-1].append(sentence)
        num_written += len(sentence)
    return tuple(" ".join(chunk) for chunk in chunks)
