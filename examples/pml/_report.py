"""Runs a prompt from stored KV and computing every token, and shows both side by side.

Measured is the time to the first token, the arms in turn behind a warm-up of both. Encoding the
schema comes before and is not measured, nor is the quality of answers: they are there to be read.
"""

from __future__ import annotations

import textwrap
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

from pc_rag import EngineConfig, GenerationConfig

if TYPE_CHECKING:
    from pc_rag import Completion, PromptCache
    from pc_rag.pml import Prompt

NUM_ROUNDS = 3
COLUMN = 46

ENGINE = EngineConfig(prefix_cache_bytes=0)
"""Every round reads the schema's entries: nothing is kept of the round before."""


def compare(engine: PromptCache, prompt: Prompt, *, max_new_tokens: int) -> None:
    """Have both arms answer, then time their first tokens in turn, and print what came out.

    Args:
        engine: Has the schema.
        prompt: Run as it is by both arms: the same tokens at the same positions.
        max_new_tokens: Length of the answers.
    """
    answer = GenerationConfig(max_new_tokens=max_new_tokens)  # a warm-up, too
    cached, uncached = (engine.generate(prompt, answer, reuse=reuse) for reuse in (True, False))
    one_token = GenerationConfig(max_new_tokens=1)
    rounds = [
        [engine.generate(prompt, one_token, reuse=reuse) for reuse in (True, False)]
        for _ in range(NUM_ROUNDS)
    ]
    _show_modules(engine, prompt, cached)
    _show_numbers(*zip(*rounds, strict=True))
    _show_answers(cached.text, uncached.text)


def _show_modules(engine: PromptCache, prompt: Prompt, cached: Completion) -> None:
    print("\nread from stored KV:")
    for use in cached.metrics.modules:
        how = f"{use.hit_kind} hit" if use.is_hit else f"miss: {use.miss_reason}"
        print(f"  {use.label}: {use.num_tokens} tokens, {how}")
    decode = engine.loaded.tokenizer.decode
    print("computed:")
    for part in engine.plan(prompt).plan.fresh:
        label = f"{part.label}: " if part.label else ""
        print(f"  {label}{len(part.token_ids)} tokens, {decode(part.token_ids)!r}")


def _show_numbers(cached: tuple[Completion, ...], uncached: tuple[Completion, ...]) -> None:
    arms = [arm[0].metrics for arm in (cached, uncached)]
    seconds = [
        median(answer.metrics.ttft_seconds or 0 for answer in arm) for arm in (cached, uncached)
    ]
    print(f"\n{'':<24}{'cached':>10}{'uncached':>10}")
    _show_row("prompt tokens", *(f"{each.prompt_tokens}" for each in arms))
    _show_row("cached tokens", *(f"{each.num_cached_tokens}" for each in arms))
    _show_row("TTFT, median", *(f"{each * 1e3:.0f} ms" for each in seconds))
    print(f"ratio: {seconds[1] / seconds[0]:.1f}")


def _show_row(name: str, *cells: str) -> None:
    print(f"{name:<24}" + "".join(f"{cell:>10}" for cell in cells))


def _show_answers(cached: str, uncached: str) -> None:
    print(f"\n{'cached':<{COLUMN}}  uncached")
    columns = [
        [part for line in text.strip().splitlines() for part in textwrap.wrap(line, COLUMN) or [""]]
        for text in (cached, uncached)
    ]
    for left, right in zip_longest(*columns, fillvalue=""):
        print(f"{left:<{COLUMN}}  {right}".rstrip())
