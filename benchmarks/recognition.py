"""Time to find corpus chunks in a plain prompt, on one core.

Measured: ``Recognizer.find`` of a 20,000-character prompt against a corpus of ``--chunks`` chunks
(100,000 by default, 200 to 1,400 characters each), for corpora and prompts that are hard in
different ways; the time to add the chunks at once, and one by one to a corpus that is there; memory
beyond the texts themselves. Not measured: tokenising, planning, the catalog. The limit is held
against the CPU time of the call, which on a free core is the wall time that stands beside it.
Prompts alternate, so that no arm has the caches to itself. Before timing, every whole chunk found
is compared with ``str.find``, and every part with the chunk that it is said to be of.

    python benchmarks/recognition.py [--chunks 100000] [--repeats 30] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np

from pc_rag.corpus.recognition import ChunkPart, Recognizer

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT_CHARS = 20_000
LIMIT_MS = 10.0
HEADER = ("Licensed under a licence; you may use this text in compliance with it only. " * 3)[:200]
FOOTER = HEADER[::-1]
NUM_NESTED = 2_000
NUM_WARM_UP = 3
REPEATED = "one repeated character"
Chunks = list[tuple[str, str]]


def make_texts(rng: random.Random, num_texts: int, prefix: str = "") -> Chunks:
    """Chunks of 200 to 1,400 characters of made-up words behind a prefix."""
    vocabulary = [f"{rng.getrandbits(rng.choice((12, 20, 28))):x}" for _ in range(20_000)]
    chunks = []
    for number in range(num_texts):
        num_chars = max(100, rng.randint(200, 1_400) - len(prefix))
        words = rng.choices(vocabulary, k=max(5, num_chars // 6))
        chunks.append(
            (str(number), f"{prefix}{' '.join(words)}"[: len(prefix) + num_chars].strip())
        )
    return chunks


def nested(num_texts: int, character: str, end: str) -> Chunks:
    """Chunks that all begin alike: runs of one character, each one longer than the last."""
    return [(f"run {n}", character * (32 + n) + end) for n in range(num_texts)]


def prompt_of(rng: random.Random, chunks: Chunks) -> str:
    """Retrieved chunks with headers between them, cut to the measured length."""
    parts = [f"Source: file {rng.random()}\n{text}" for _, text in rng.sample(chunks, 120)]
    return "\n\n".join(parts)[:PROMPT_CHARS]


def parts_prompt(rng: random.Random, chunks: Chunks) -> str:
    """As ``prompt_of``, of heads and tails of chunks, as a caller that splits them makes it."""
    halves = [
        text[:end] if rng.random() < 0.5 else text[-end:]
        for _, text in rng.sample(chunks, 120)
        for end in (len(text) * 3 // 4,)
    ]
    return "\n---\n".join(halves)[:PROMPT_CHARS]


def found_by_search(chunks: Chunks, prompt: str) -> list[str]:
    """Ids of the chunks in the prompt by ``str.find``: leftmost first, the longest at a place."""
    places = sorted(
        (place, -len(text), chunk_id)
        for chunk_id, text in chunks
        if (place := prompt.find(text)) >= 0
    )
    found, end = [], 0
    for place, negative_length, chunk_id in places:
        if place >= end:
            found.append(chunk_id)
            end = place - negative_length
    return found


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def build(chunks: Chunks) -> tuple[Recognizer, dict[str, float]]:
    """A recognizer over the chunks, and what building it took."""
    recognizer = Recognizer()
    tracemalloc.start()
    recognizer.add_all(chunks)
    table_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    seconds = timed(lambda: Recognizer().add_all(chunks))
    singles = [
        timed(lambda n=n: recognizer.add(f"+{n}", f"one more chunk {n}")) for n in range(200)
    ]
    return recognizer, {
        "add_all_seconds": seconds,
        "add_one_ms_mean": statistics.fmean(singles) * 1e3,
        "add_one_ms_max": max(singles) * 1e3,
        "bytes_per_chunk_beyond_text": table_bytes / len(chunks),
    }


def measure(
    recognizer: Recognizer, prompts: dict[str, str], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall milliseconds of ``find`` for each prompt, prompts alternating."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in prompts}
    for repeat in range(repeats + NUM_WARM_UP):
        for name, prompt in prompts.items():
            cpu, wall = time.thread_time(), time.perf_counter()
            recognizer.find(prompt)
            sample = (time.thread_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
            if repeat >= NUM_WARM_UP:
                samples[name].append(sample)
    return samples


def check(recognizer: Recognizer, chunks: Chunks, prompts: dict[str, str]) -> dict[str, int]:
    """Compare every result with ``str.find``; numbers of matches."""
    texts = dict(chunks)
    num_found = {}
    for name, prompt in prompts.items():
        matches = recognizer.find(prompt)
        for match in matches:
            text, standing = texts[match.chunk_id], prompt[match.start : match.end]
            is_head, is_tail = text.startswith(standing), text.endswith(standing)
            assert is_tail if match.part is ChunkPart.TAIL else is_head
            assert match.part is not ChunkPart.WHOLE or text == standing
        if name != REPEATED:  # a run stands at many places, of which str.find gives the first
            ids = [match.chunk_id for match in matches if match.part is ChunkPart.WHOLE]
            assert list(dict.fromkeys(ids)) == found_by_search(chunks, prompt), name
        num_found[name] = len(matches)
    return num_found


def make_corpora(rng: random.Random, num_chunks: int) -> dict[str, Chunks]:
    """Corpora that are hard in different ways."""
    num_random = num_chunks - NUM_NESTED
    return {
        "random": make_texts(rng, num_chunks),
        "shared 200-character header": make_texts(rng, num_chunks, HEADER),
        "shared 200-character footer": [
            (name, f"{text} {FOOTER}") for name, text in make_texts(rng, num_chunks)
        ],
        "2,000 of them runs of a": make_texts(rng, num_random) + nested(NUM_NESTED, "a", ""),
        "2,000 of them runs of a, then b": make_texts(rng, num_random)
        + nested(NUM_NESTED, "a", "b"),
        "2,000 of them 250 a, then words": make_texts(rng, num_random)
        + [(f"run {name}", text) for name, text in make_texts(rng, NUM_NESTED, "a" * 250)],
        "2,000 of them words, then 250 a": make_texts(rng, num_random)
        + [(f"run {name}", f"{text} {'a' * 250}") for name, text in make_texts(rng, NUM_NESTED)],
    }


def run(corpus: str, chunks: Chunks, rng: random.Random, repeats: int) -> dict[str, Any]:
    """Check and measure one corpus, and print its rows."""
    prompts = {
        "retrieved chunks": prompt_of(rng, chunks[:-NUM_NESTED]),
        REPEATED: "a" * PROMPT_CHARS,
        "repeated shared header": (HEADER * PROMPT_CHARS)[:PROMPT_CHARS],
        "repeated shared footer": (FOOTER * PROMPT_CHARS)[:PROMPT_CHARS],
        "parts of chunks": parts_prompt(rng, chunks[:-NUM_NESTED]),
        "nothing to find": prompt_of(rng, make_texts(rng, 200)),
    }
    recognizer, building = build(chunks)
    num_found = check(recognizer, chunks, prompts)
    samples = measure(recognizer, prompts, repeats)
    medians = {
        name: [statistics.median(times) for times in zip(*values, strict=True)]
        for name, values in samples.items()
    }
    for name, (cpu, wall) in medians.items():
        print(f"{corpus:32} {name:24} {num_found[name]:5} {cpu:8.2f} {wall:8.2f}")
    print("  " + ", ".join(f"{name} {value:.2f}" for name, value in building.items()))
    return {
        "num_found": num_found,
        "median_cpu_ms": {name: cpu for name, (cpu, _) in medians.items()},
        "median_wall_ms": {name: wall for name, (_, wall) in medians.items()},
        "cpu_and_wall_ms": samples,
        **building,
    }


def main() -> None:
    """Measure, print a table and a last line of JSON."""
    parser = argparse.ArgumentParser(description="Time to find corpus chunks in a plain prompt.")
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rng = random.Random(options.seed)  # noqa: S311 - made-up texts
    print(f"{'corpus':32} {'prompt':24} {'found':>5} {'CPU ms':>8} {'wall ms':>8}")
    results = {
        corpus: run(corpus, chunks, rng, options.repeats)
        for corpus, chunks in make_corpora(rng, options.chunks).items()
    }
    worst = max(max(result["median_cpu_ms"].values()) for result in results.values())
    print(f"worst median {worst:.2f} ms; the limit is {LIMIT_MS} ms")
    report = {
        "benchmark": "recognition",
        "hardware": f"{platform.machine()}, 1 of {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "num_chunks": options.chunks,
        "prompt_chars": PROMPT_CHARS,
        "seed": options.seed,
        "worst_median_cpu_ms": worst,
        "results": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
