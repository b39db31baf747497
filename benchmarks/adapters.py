"""What the benchmarks of the adapters share: a tiny model, and arms that are run in turn."""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib.metadata import version
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pc_rag.cli.demo_script import QUESTIONS, TOPICS
from pc_rag.corpus import Corpus
from pc_rag.engine import PromptCache
from pc_rag.model.conversation import ChatMessage, Conversation
from pc_rag.model.loading import load_tokenizer, wrap_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pc_rag.model.loading import LoadedModel

MAX_TOKENS = 16
CHUNK_CHARS = 1000
OVERHEAD_LIMIT_MS = 5.0
STREAMED_TOKENS = 64


def tiny_model() -> LoadedModel:
    """Random weights behind SmolLM2's tokenizer: what is left of a call is the software around."""
    tokenizer = load_tokenizer("smollm2").hf_tokenizer
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    return wrap_model(model.eval(), tokenizer, name="tiny")


def overhead(
    arms_of: Callable[[Corpus, str, str], tuple[Callable[[], object], Callable[[], object]]],
    *,
    head: str,
    rounds: int,
) -> dict[str, Any]:
    """What an adapter adds to the engine, in milliseconds; ends the program where it is too much.

    Args:
        arms_of: From a corpus, a system text and a question to the adapter's call of one token,
            and its stream of ``STREAMED_TOKENS``.
        head: What the system text begins with; four chunks of the corpus follow.
        rounds: How often each arm is run, behind two warm-ups.
    """
    with (
        PromptCache.from_pretrained(tiny_model()) as engine,
        Corpus(engine, has_retrieval=False) as corpus,
    ):
        texts = [topics[name][:CHUNK_CHARS] for name in TOPICS[:4]]
        corpus.add(texts)
        system, question = head + "\n\n".join(texts), QUESTIONS[0]
        prompt = Conversation((ChatMessage(Role.SYSTEM, system), ChatMessage(Role.USER, question)))
        call, stream = arms_of(corpus, system, question)
        many = GenerationConfig(max_new_tokens=STREAMED_TOKENS)
        arms = {
            "engine": lambda: corpus.generate(prompt, GenerationConfig(max_new_tokens=1)),
            "call": call,
            "engine stream": lambda: list(corpus.stream_prompt(prompt, many)),
            "stream": stream,
        }
        return _compared(arms, rounds)


def _compared(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Run arms in turn, and print what the adapter adds."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms.items())
    for number in range(rounds + 2):
        order.append(order.pop(0))  # no arm always follows the same one
        for name, run in order:
            start = time.perf_counter()
            run()
            if number >= 2:
                samples[name].append(1000 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    added = medians["call"] - medians["engine"]
    per_token = (medians["stream"] - medians["engine stream"]) / STREAMED_TOKENS
    print(
        f"\nadapter: {added:.2f} ms a call on {medians['engine']:.2f} ms "
        f"(limit {OVERHEAD_LIMIT_MS} ms), {per_token:.3f} ms a streamed token"
    )
    if added > OVERHEAD_LIMIT_MS:
        raise SystemExit(f"the adapter adds {added:.2f} ms a call")
    return {
        "call_overhead_ms": added,
        "stream_overhead_ms_per_token": per_token,
        "median_ms": medians,
        "samples_ms": samples,
    }


def surroundings(*packages: str) -> dict[str, Any]:
    """What a report says about where it was measured."""
    return {
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "num_threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", *packages)},
        "model": "SmolLM2-135M-Instruct",
    }
