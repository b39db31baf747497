"""Questions whose answer needs several documents, for ``benchmarks/scaffolds.py``."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SEED = 11
QUESTIONS_PER_ARTICLE = 4
PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Iris", "Jon", "Kim", "Leo")
HOLDERS = (
    ("boxes", "box", "pens"), ("shelves", "shelf", "books"), ("bags", "bag", "apples"),
    ("jars", "jar", "coins"), ("trays", "tray", "eggs"), ("rows", "row", "trees"),
)  # fmt: skip
ROOMS = ("cellar", "attic", "kitchen", "garage", "library", "garden", "office", "hall")
CITIES = ("Lisbon", "Oslo", "Vienna", "Madrid", "Dublin", "Warsaw", "Athens", "Prague")
FIRMS = ("Veltra", "Nordim", "Calopa", "Ruvex", "Tamsin", "Brelko", "Zindar", "Molavi")
ELSEWHERE = "The old mill by the river was painted green last spring, and its wheel turns again."


@dataclass(frozen=True, slots=True)
class Question:
    """A question that needs documents.

    Attributes:
        task: Where it comes from.
        documents: What it needs, in order.
        other: A document of something else.
        text: The question.
        answers: What counts as right; the first is scored by its log-probability.
    """

    task: str
    documents: tuple[str, ...]
    other: str
    text: str
    answers: tuple[str, ...]


def product_question(rng: random.Random) -> Question:
    """How many things, from a number of holders in one document and their size in the other."""
    people = rng.sample(PEOPLE, 2)
    asked = rng.choice(people)
    many, one, things = rng.choice(HOLDERS)
    counts = {name: rng.randint(2, 9) for name in people}
    sizes = {name: rng.randint(2, 9) for name in people}
    first = " ".join(f"{name} has {counts[name]} {many}." for name in people)
    second = " ".join(f"Each {one} of {name} holds {sizes[name]} {things}." for name in people)
    text = f"How many {things} does {asked} have in all?"
    answer = str(counts[asked] * sizes[asked])
    return Question("synthetic", (first, second), ELSEWHERE, text, (answer,))


def sum_question(rng: random.Random) -> Question:
    """How many things of two colours, of which each document counts one."""
    people = rng.sample(PEOPLE, 2)
    asked = rng.choice(people)
    things = rng.choice(HOLDERS)[2]
    red = {name: rng.randint(2, 30) for name in people}
    blue = {name: rng.randint(2, 30) for name in people}
    first = " ".join(f"{name} has {red[name]} red {things}." for name in people)
    second = " ".join(f"{name} has {blue[name]} blue {things}." for name in people)
    text = f"How many red and blue {things} does {asked} have together?"
    answer = str(red[asked] + blue[asked])
    return Question("synthetic", (first, second), ELSEWHERE, text, (answer,))


def code_question(rng: random.Random) -> Question:
    """Where something is, from its code in one document and what codes mean in the other."""
    people, rooms = rng.sample(PEOPLE, 2), rng.sample(ROOMS, 2)
    codes = [f"{rng.choice('BDFGKMRT')}{number}" for number in rng.sample(range(10, 99), 2)]
    asked = rng.randrange(2)
    pairs = list(zip(people, codes, strict=True))
    first = " ".join(f"The locker of {name} has the code {code}." for name, code in pairs)
    meanings = list(zip(codes, rooms, strict=True))
    rng.shuffle(meanings)
    second = " ".join(f"A locker with the code {code} is in the {room}." for code, room in meanings)
    text = f"In which room is the locker of {people[asked]}?"
    answer = rooms[asked]
    return Question("synthetic", (first, second), ELSEWHERE, text, (answer, f"the {answer}"))


def firm_question(rng: random.Random) -> Question:
    """In which city somebody works, by way of the firm."""
    people, firms, cities = rng.sample(PEOPLE, 2), rng.sample(FIRMS, 2), rng.sample(CITIES, 2)
    asked = rng.randrange(2)
    first = " ".join(f"{n} works for the firm {f}." for n, f in zip(people, firms, strict=True))
    homes = list(zip(firms, cities, strict=True))
    rng.shuffle(homes)
    second = " ".join(f"The firm {firm} has its only office in {city}." for firm, city in homes)
    text = f"In which city does {people[asked]} work?"
    return Question("synthetic", (first, second), ELSEWHERE, text, (cities[asked],))


def synthetic_questions(num_instances: int) -> list[Question]:
    """Instances of the four templates in turn; each is another one."""
    rng = random.Random(SEED)  # noqa: S311 - no secret
    makers = (product_question, sum_question, code_question, firm_question)
    made: dict[tuple[str, ...], Question] = {}
    while len(made) < num_instances:
        question = makers[len(made) % len(makers)](rng)
        made[(*question.documents, question.text)] = question
    return list(made.values())


def xquad_questions(path: Path, num_questions: int) -> list[Question]:
    """Questions of shuffled articles, a few of each, their paragraph among others of the article.

    The number of others goes from one to four in turn; where the paragraph stands is drawn.
    """
    rng = random.Random(SEED)  # noqa: S311 - no secret
    articles = json.loads(path.read_text())["data"]
    rng.shuffle(articles)
    questions: list[Question] = []
    for article, next_article in zip(articles, [*articles[1:], articles[0]], strict=True):
        paragraphs = [each["context"].strip() for each in article["paragraphs"]]
        asked = [(n, qa) for n, each in enumerate(article["paragraphs"]) for qa in each["qas"]]
        for number, qa in rng.sample(asked, min(QUESTIONS_PER_ARTICLE, len(asked))):
            others = [text for n, text in enumerate(paragraphs) if n != number]
            num_others = min(1 + len(questions) % 4, len(others))
            documents = [*rng.sample(others, num_others), paragraphs[number]]
            rng.shuffle(documents)
            answers = tuple(dict.fromkeys(each["text"] for each in qa["answers"]))
            other = next_article["paragraphs"][0]["context"].strip()
            questions.append(Question("xquad", tuple(documents), other, qa["question"], answers))
            if len(questions) == num_questions:
                return questions
    return questions
