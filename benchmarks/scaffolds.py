"""Answer quality of scaffolds: questions whose answer needs several documents read together.

What is measured: how far stored KV leads a model away from full prefill of the same tokens, where
the documents of a question are encoded apart or together. Greedy answers (exact match and F1, as
SQuAD counts them), the log-probability of the right answer, and the KL divergence of the first
token from full prefill's. Every answer is begun with "The answer is:".

    module     every document is an entry that saw itself only (the Prompt Cache paper)
    prefix     every document is an entry that saw the prompt's beginning (this project's default)
    scaffold   the question's documents are one entry, `Corpus.scaffold`
    full       the same tokens without reuse: what the others are compared with

Each question is asked twice: its documents stand `first` in the prompt, where a scaffold is what
full prefill computes (promise E4, asserted), and `behind` a document of something else, which the
scaffold never saw.

Two tasks. `synthetic`: two documents made here; one says how many boxes each person has, the other
how many pens a box of each holds, or one names a code and the other what codes mean: neither alone
has the answer. `xquad`: a question of XQuAD (English), its paragraph among one to four others of
its article; the answer stands in one paragraph. The file is not part of the repository.

What is not measured: speed, retrieval, repair, larger models. SmolLM2-135M is weak at arithmetic:
look at log-probabilities and KL rather than at exact matches. Questions of one article share
paragraphs, which the intervals (95 %, bootstrap over questions) do not account for.

    python benchmarks/scaffolds.py [--instances 80] [--questions 24] [--xquad PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from scaffold_questions import Question, synthetic_questions, xquad_questions
from scoring import (
    SEED,
    default_xquad,
    f1,
    first_sentence,
    interval,
    kl_divergence,
    normalised,
)

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus, Document, PromptFormat, chunk_id_of
from pc_rag.engine import PromptCache
from pc_rag.layout import Fresh, RequestPlan
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.loading import load_model
from pc_rag.types import Span, Visibility

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pc_rag.engine import Request

    Scores = dict[str, dict[str, float]]
    """By arm: what it is scored by."""

ARMS = ("module", "prefix", "scaffold", "full")
PLACES = ("first", "behind")
PROMPT_FORMAT = PromptFormat(
    prefix="You answer questions about the given context with a few words and nothing else."
)
LEAD = "The answer is:"
"""Begins every answer, in all arms: small models would begin with anything but the answer."""
EXACT_KL = 1e-4


class Bench:
    """One model under two visibilities, and a corpus for each."""

    def __init__(self, engines: Mapping[str, PromptCache], corpora: Mapping[str, Corpus]) -> None:
        self._corpora = corpora
        self._engine = engines["prefix"]
        self._engines = engines

    def ask(self, question: Question, max_tokens: int) -> dict[str, Scores]:
        """One question, by place."""
        documents = {
            place: (question.other, *question.documents)
            if place == "behind"
            else question.documents
            for place in PLACES
        }
        requests = {place: self._apart(question, documents[place]) for place in PLACES}
        corpus = self._corpora["prefix"]
        own = [chunk_id_of(each) for each in question.documents]
        corpus.scaffold(own)
        for place in PLACES:
            prompt = PROMPT_FORMAT.messages(question.text, documents[place])
            requests[place]["scaffold"] = corpus.plan(prompt)
        scores = {place: self._scores(question, requests[place], max_tokens) for place in PLACES}
        corpus.unscaffold(own)
        assert scores["first"]["scaffold"]["kl"] < EXACT_KL, scores
        return scores

    def _apart(self, question: Question, documents: Sequence[str]) -> dict[str, Request]:
        ids = [chunk_id_of(each) for each in documents]
        requests = {}
        for arm, corpus in self._corpora.items():
            corpus.add([Document.of_chunks(documents, id=" ".join(ids))])
            requests[arm] = corpus.plan(PROMPT_FORMAT.messages(question.text, documents))
            labels = [part.label for part in requests[arm].plan.cached if part.label in ids]
            assert labels == ids, f"recognised {labels}"
        return requests

    def _scores(
        self, question: Question, requests: Mapping[str, Request], max_tokens: int
    ) -> Scores:
        full = self._led(requests["prefix"].plan.without_reuse())
        scores: Scores = {}
        reference, scores["full"] = self._run(requests["prefix"], full, question, max_tokens)
        scores["full"]["kl"] = 0.0
        for arm, request in requests.items():
            plan = self._led(request.plan)
            assert plan.token_ids == full.token_ids
            engine = self._engines.get(arm)
            logits, scores[arm] = self._run(request, plan, question, max_tokens, engine=engine)
            scores[arm]["kl"] = kl_divergence(reference, logits)
        return scores

    def _led(self, plan: RequestPlan) -> RequestPlan:
        """A plan that goes on with the beginning of an answer."""
        lead = self._engine.loaded.tokenizer.encode_text(LEAD)
        part = Fresh(token_ids=lead, span=Span(plan.end, plan.end + len(lead)))
        return RequestPlan((*plan.parts, part))

    def _run(
        self,
        request: Request,
        plan: RequestPlan,
        question: Question,
        max_tokens: int,
        *,
        engine: PromptCache | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Logits of the first token, and the scores of a plan's answer."""
        engine = engine or self._engine
        runner, tokenizer = engine.runner, engine.loaded.tokenizer
        right = tokenizer.encode_text(f" {question.answers[0]}")
        keys = [part.key for part in plan.cached]
        with engine.source.acquire(keys, request.recipes) as held:
            view = assemble(plan, held.entries, runner, num_new_tokens=1)
            first = runner.prefill(view, *fresh_tokens(plan))
            runner.settle(view, max(max_tokens, len(right)) + 1)
        num_prompt_rows = view.tail.num_rows
        logits, given = first, []
        while (token_id := int(logits.argmax())) not in tokenizer.control_ids:
            given.append(token_id)
            if len(given) == max_tokens:
                break
            logits = runner.decode(view, token_id, plan.end + len(given) - 1)
        view.tail.num_rows = num_prompt_rows  # once more from the prompt's end, the right answer
        logits, log_probability = first, 0.0
        for number, token_id in enumerate(right):
            log_probability += float(torch.log_softmax(logits, dim=-1)[token_id])
            if number < len(right) - 1:
                logits = runner.decode(view, token_id, plan.end + number)
        runner.pool.give_back(view.tail)
        answer = first_sentence(tokenizer.decode(given))
        return first, {
            "exact_match": float(
                any(normalised(answer) == normalised(r) for r in question.answers)
            ),
            "f1": max(f1(answer, each) for each in question.answers),
            "log_probability": log_probability,
        }


def summary(scores: Sequence[Scores]) -> dict[str, Any]:
    """By arm and score: means with intervals; log-probabilities against full prefill's too."""
    table: dict[str, Any] = {}
    for arm in ARMS:
        table[arm] = {
            name: interval([each[arm][name] for each in scores]) for name in scores[0][arm]
        }
        table[arm]["log_probability_to_full"] = interval(
            [each[arm]["log_probability"] - each["full"]["log_probability"] for each in scores]
        )
    return table


def run_task(
    bench: Bench, questions: Sequence[Question], max_tokens: int
) -> Iterator[dict[str, Any]]:
    """Both places of one task, each as a dictionary with raw scores."""
    scores = []
    for number, question in enumerate(questions, 1):
        scores.append(bench.ask(question, max_tokens))
        print(f"\r{question.task}: {number} of {len(questions)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    for place in PLACES:
        of_place = [each[place] for each in scores]
        yield {
            "task": questions[0].task,
            "place": place,
            "num_questions": len(questions),
            "summary": summary(of_place),
            "scores": of_place,
        }


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """What people read."""
    print(
        "means with 95 % intervals; log p: of the right answer, nats; KL: of the first token, nats"
    )
    print("| task | place | n | arm | EM % | F1 % | log p | log p - full | KL | median KL |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        for arm in ARMS:
            row = result["summary"][arm]
            cells = [
                _cell(row["exact_match"], 100, 0),
                _cell(row["f1"], 100, 0),
                _cell(row["log_probability"], 1, 2),
                _cell(row["log_probability_to_full"], 1, 2),
                _cell(row["kl"], 1, 3),
                f"{row['kl']['median']:.3f}",
            ]
            head = f"| {result['task']} | {result['place']} | {result['num_questions']} | {arm} | "
            print(head + " | ".join(cells) + " |")


def _cell(each: Mapping[str, float], factor: float, digits: int) -> str:
    low, high = each["low"] * factor, each["high"] * factor
    return f"{each['mean'] * factor:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    """Run both tasks and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--instances", type=int, default=80, help="of the synthetic task; 0 leaves it out"
    )
    parser.add_argument("--questions", type=int, default=24, help="of XQuAD; 0 leaves it out")
    parser.add_argument("--xquad", type=Path, default=default_xquad(), help="XQuAD as JSON")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, dtype="float32", device="cpu")
    results: list[dict[str, Any]] = []
    with ExitStack() as opened:
        engines: dict[str, PromptCache] = {}
        corpora: dict[str, Corpus] = {}
        for visibility in (Visibility.MODULE, Visibility.PREFIX):
            config = EngineConfig(
                visibility=visibility, prefix_cache_bytes=0, memory_bytes="2GiB", chunk_tokens=2000
            )
            engine = opened.enter_context(PromptCache.from_pretrained(loaded, config=config))
            corpus = Corpus(engine, prompt_format=PROMPT_FORMAT, has_retrieval=False)
            engines[visibility], corpora[visibility] = engine, opened.enter_context(corpus)
        bench = Bench(engines, corpora)
        if arguments.instances:
            results += run_task(bench, synthetic_questions(arguments.instances), 6)
        if arguments.xquad is None:
            print("xquad: skipped; no shared/data/xquad.en.json above the repository, pass --xquad")
        elif arguments.questions:
            results += run_task(bench, xquad_questions(arguments.xquad, arguments.questions), 12)
    print_table(results)
    print(json.dumps({
        "benchmark": "scaffolds",
        "model": arguments.model,
        "dtype": "float32",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "seed": SEED,
        "results": results,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
