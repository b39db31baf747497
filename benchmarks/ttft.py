"""Time to first token: reading stored KV against computing it.

What is measured: the time from a prompt in pieces (a prefix, chunks of 256 tokens, 32 tokens of a
question) to its first piece of text, everything in between included: planning, lookup, leases from
the memory tier, assembly, rotation, prefill, choosing the token, detokenising.

    cached       the chunks' KV is read from the memory tier
    uncached     the same engine and token ids with reuse=False
    transformers `model(input_ids)` over the same ids, one ordinary prefill, nothing else
    placed       `model(32 ids, cache)` with all KV in a DynamicCache already: the same forward pass
                 in stock transformers, without what makes it work (no store, no placement)
    bare         `model(32 ids)` with no context at all: no cache around transformers can be faster

Then decoding: seconds per output token of our loop behind that context, and of `model.generate`.
Then ingest: tokens per second of encoding 64 chunks, against plain batch-1 prefill of the same.
Then the store: bytes of the files against theory.

What is not measured: retrieval, the disk tier, answer quality, several requests at once.

Arms alternate in one process, after a warm-up of each; medians are quoted. The floor counts only
what no implementation can avoid: the multiplications of the fresh tokens, at this machine's
measured rate for matrix products of the same shapes, and one read of weights and KV at its measured
memory bandwidth. Correctness is asserted before anything is timed.

    python benchmarks/ttft.py [--dtype float32] [--contexts 1024 2048 4096 8000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import DynamicCache

from pc_rag.config import EngineConfig
from pc_rag.engine import EntryRecipe, PromptCache, Request
from pc_rag.kv import DiskTier
from pc_rag.kv.key import VisibilityContext
from pc_rag.layout import EntryPiece, TextPiece, plan_chunks
from pc_rag.metrics import Phase
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import PositionPolicy, Visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pc_rag.types import ModuleKey

NUM_FRESH = 32
CHUNK_TOKENS = 256
PREFIX_TOKENS = 32
SEED = 7
ARMS = ("cached", "uncached", "transformers", "placed", "bare")


class Pieces:
    """A prompt of random tokens: prefix, chunks up to ``num_context`` tokens, fresh tokens."""

    def __init__(self, engine: PromptCache, num_context: int) -> None:
        self._engine = engine
        self._pieces, self._recipes = make_pieces(engine, num_context)

    def plan(self) -> Request:
        """The request; part of what is timed."""
        plan = plan_chunks(
            self._pieces, policy=PositionPolicy.PACKED, max_position=self._engine.max_position
        )
        return Request(plan=plan, recipes=self._recipes, template="bench")


def make_pieces(
    engine: PromptCache, num_context: int
) -> tuple[list[EntryPiece | TextPiece], dict[ModuleKey, EntryRecipe]]:
    """The pieces of a prompt and how their entries are made."""
    generator = torch.Generator().manual_seed(SEED)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 4000, (count,), generator=generator).tolist())

    prefix_ids = tokens(PREFIX_TOKENS)
    module = VisibilityContext.module()
    prefix = EntryRecipe(engine.address(prefix_ids, start=0, context=module))
    context = VisibilityContext.of(Visibility.PREFIX, prefix_ids, range(PREFIX_TOKENS))
    recipes = {prefix.address.key: prefix}
    pieces: list[EntryPiece | TextPiece] = [
        EntryPiece(label="prefix", key=prefix.address.key, token_ids=prefix_ids, encoded_start=0,
                   context_is_prefix=True, is_prefix=True)
    ]  # fmt: skip
    left = num_context - PREFIX_TOKENS
    while left > 0:
        ids = tokens(min(CHUNK_TOKENS, left))
        left -= len(ids)
        address = engine.address(ids, start=PREFIX_TOKENS, context=context)
        recipes[address.key] = EntryRecipe(address, (prefix.address.key,))
        pieces.append(
            EntryPiece(label=f"chunk {len(pieces)}", key=address.key, token_ids=ids,
                       encoded_start=PREFIX_TOKENS, context_is_prefix=True)
        )  # fmt: skip
    pieces.append(TextPiece(tokens(NUM_FRESH)))
    return pieces, recipes


def check(engine: PromptCache, model: Any) -> None:
    """The uncached arm gives transformers' logits, and prefix + one chunk the full prefill's.

    The uncached arm has to be equal in every dtype. Stored KV is attended piece by piece, so in a
    narrow dtype it may differ by half as much again as two attention kernels of transformers
    differ from each other.
    """
    request = Pieces(engine, PREFIX_TOKENS + CHUNK_TOKENS).plan()
    ids = torch.tensor([request.plan.token_ids])
    with torch.inference_mode():
        expected = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        kernel = model.config._attn_implementation  # noqa: SLF001 - there is no public getter
        model.set_attn_implementation("eager")
        other = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        model.set_attn_implementation(kernel)
    rounding = 1.5 * (other - expected).abs().max().item()
    cached, uncached = request.plan, request.plan.without_reuse()
    for plan, tolerance in ((cached, max(rounding, 1e-3)), (uncached, 1e-3)):
        keys = [part.key for part in plan.cached]
        with engine.source.acquire(keys, request.recipes) as held:
            view = assemble(plan, held.entries, engine.runner)
            logits = engine.runner.prefill(view, *fresh_tokens(plan))
            engine.runner.pool.give_back(view.tail)
        difference = (logits - expected).abs().max().item()
        assert difference < tolerance, f"logits differ by {difference}"


def stock_cache(model: Any, num_tokens: int) -> DynamicCache:
    """A DynamicCache full of random KV."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, num_tokens, head_dim)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape).to(model.dtype), torch.randn(shape).to(model.dtype), layer)
    return cache


def first_piece_seconds(engine: PromptCache, pieces: Pieces, *, reuse: bool) -> tuple[float, Any]:
    """Seconds from the call to the first piece of text, and the request's metrics."""
    config = GenerationConfig(max_new_tokens=1)
    started = time.perf_counter()
    watch = engine.start_watch()
    with watch.measure(Phase.PLAN):
        request = pieces.plan()
    stream = engine.run(request, config, watch=watch, reuse=reuse)
    for _ in stream:
        break
    seconds = time.perf_counter() - started
    for _ in stream:
        pass
    return seconds, stream.completion.metrics


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    with torch.inference_mode():
        call()
    return time.perf_counter() - started


def floor_seconds(model: Any, num_context: int, rates: dict[str, float]) -> float:
    """What no implementation can avoid: see the header."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    body = sum(
        p.numel() for n, p in model.named_parameters() if "embed" not in n and "head" not in n
    )
    head = config.vocab_size * config.hidden_size
    attention = 4 * NUM_FRESH * num_context * config.num_attention_heads * head_dim
    flops = 2 * NUM_FRESH * body + 2 * head + attention * config.num_hidden_layers
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * num_context
    num_bytes = (body + head + kv) * model.dtype.itemsize
    return max(flops / rates["flops_per_second"], num_bytes / rates["bytes_per_second"])


def measure_rates(dtype: torch.dtype) -> dict[str, float]:
    """This machine's matrix-product rate and memory bandwidth, best of several."""
    left, right = torch.randn(96, 576).to(dtype), torch.randn(576, 1536).to(dtype)
    product = min(timed(lambda: [left @ right for _ in range(50)]) / 50 for _ in range(7))
    big = torch.randn(64 << 20)
    read = min(timed(big.sum) for _ in range(7))
    return {
        "flops_per_second": 2 * 96 * 576 * 1536 / product,
        "bytes_per_second": big.nbytes / read,
    }


def bench_context(
    engine: PromptCache, model: Any, num_context: int, rounds: int, rates: dict[str, float]
) -> dict[str, Any]:
    """One context length, arms alternating."""
    pieces = Pieces(engine, num_context)
    request = pieces.plan()
    engine.generate(request, GenerationConfig(max_new_tokens=1))  # encodes what is missing
    ids = torch.tensor([request.plan.token_ids])
    samples: dict[str, list[float]] = {n: [] for n in ARMS}
    assembly: list[float] = []
    names = inspect.signature(type(model).forward).parameters
    carrier = "cache" if "cache" in names else "past_key_values"
    for number in range(rounds + 1):
        is_warm_up = number == 0
        seconds, metrics = first_piece_seconds(engine, pieces, reuse=True)
        assert metrics.num_fresh_tokens == NUM_FRESH, metrics
        assert metrics.token_hit_rate > 0.9, metrics
        once = {"cached": seconds}
        cache = stock_cache(model, num_context)
        tail = {"input_ids": ids[:, num_context:], "logits_to_keep": 1, carrier: cache}
        once["placed"] = timed(lambda tail=tail: model(**tail))
        del cache, tail
        once["bare"] = timed(lambda: model(input_ids=ids[:, num_context:], logits_to_keep=1))
        # The slow arms vary little; a few rounds of them are enough.
        if is_warm_up or number <= max(2, rounds // 3):
            once["uncached"], _ = first_piece_seconds(engine, pieces, reuse=False)
            once["transformers"] = timed(lambda: model(input_ids=ids, logits_to_keep=1))
        if is_warm_up:
            continue
        for name, value in once.items():
            samples[name].append(value)
        assembly.append(metrics.assembly_seconds / seconds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "context_tokens": num_context,
        "fresh_tokens": NUM_FRESH,
        "median_seconds": medians,
        "assembly_share": statistics.median(assembly),
        "floor_seconds": floor_seconds(model, num_context, rates),
        "samples": samples,
    }


def bench_decode(engine: PromptCache, model: Any, num_context: int, rounds: int) -> dict[str, Any]:
    """Seconds per output token behind a context: ours and ``model.generate``."""
    request = Pieces(engine, num_context).plan()
    ids = torch.tensor([request.plan.token_ids])
    ours, theirs = [], []
    num_tokens = 24
    for number in range(rounds + 1):
        completion = engine.generate(request, GenerationConfig(max_new_tokens=num_tokens))
        tpot = completion.metrics.tpot_seconds
        times: list[float] = []
        streamer = _Clock(times)
        with torch.inference_mode():
            model.generate(
                ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
                streamer=streamer, pad_token_id=0,
            )  # fmt: skip
        if number and tpot is not None:
            ours.append(tpot)
            theirs.append((times[-1] - times[1]) / (len(times) - 2))
    return {
        "context_tokens": num_context,
        "ours_seconds": statistics.median(ours),
        "generate_seconds": statistics.median(theirs),
        "samples": {"ours": ours, "generate": theirs},
    }


class _Clock:
    """A streamer that notes when ``model.generate`` hands out tokens; the first is the prompt."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def put(self, _value: torch.Tensor) -> None:
        """Note the time."""
        self._times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing left to do."""


def bench_ingest(engine: PromptCache, model: Any, folder: Path, rounds: int) -> dict[str, Any]:
    """Encoding 64 chunks of mixed length, against one plain prefill per chunk; bytes on disk."""
    generator = torch.Generator().manual_seed(SEED + 1)
    lengths = torch.randint(96, 257, (64,), generator=generator).tolist()
    module = VisibilityContext.module()
    chunks = [tuple(torch.randint(100, 4000, (n,), generator=generator).tolist()) for n in lengths]
    recipes = [EntryRecipe(engine.address(ids, start=0, context=module)) for ids in chunks]
    table = {recipe.address.key: recipe for recipe in recipes}
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(timed(lambda: list(engine.source.encode(table, table))))
        started = time.perf_counter()
        with torch.inference_mode():
            for ids in chunks:
                model(input_ids=torch.tensor([ids]), logits_to_keep=1)
        theirs.append(time.perf_counter() - started)
    num_tokens = sum(lengths)
    disk = DiskTier(folder)
    for recipe in recipes:
        with engine.store.lease(recipe.address, torch.device("cpu")) as lease:
            disk.put(lease.entry)
    stored = disk.stats()[0].resident_bytes
    disk.close()
    return {
        "num_tokens": num_tokens,
        "encode_tokens_per_second": num_tokens / statistics.median(ours),
        "prefill_tokens_per_second": num_tokens / statistics.median(theirs),
        "store_bytes": stored,
        "theory_bytes": num_tokens * engine.bytes_per_token,
        "samples": {"encode": ours, "prefill": theirs},
    }


def print_tables(
    contexts: Sequence[dict[str, Any]], decodes: Sequence[dict[str, Any]], ingest: dict[str, Any]
) -> None:
    """What people read."""
    print("median ms to the first token; ratio to ordinary prefill in brackets")
    print(f"{'context':>8}" + "".join(f" {name:>15}" for name in ARMS) + "  assembly  over floor")
    for row in contexts:
        medians = row["median_seconds"]
        cells = ""
        for name in ARMS:
            ratio = medians["transformers"] / medians[name]
            cells += f" {f'{medians[name] * 1e3:.0f} ({ratio:.1f}x)':>15}"
        over_floor = medians["cached"] / row["floor_seconds"]
        print(
            f"{row['context_tokens']:>8}{cells}  {row['assembly_share']:>8.1%}  {over_floor:.2f}x"
        )
    for row in decodes:
        print(f"decode behind {row['context_tokens']}: {row['ours_seconds'] * 1e3:.0f} ms a token, "
              f"model.generate {row['generate_seconds'] * 1e3:.0f} ms")  # fmt: skip
    print(f"ingest: {ingest['encode_tokens_per_second']:.0f} tokens/s, plain prefill "
          f"{ingest['prefill_tokens_per_second']:.0f}; store {ingest['store_bytes']:,} bytes, "
          f"{ingest['store_bytes'] / ingest['theory_bytes'] - 1:+.2%} of theory")  # fmt: skip


def main() -> None:
    """Run everything and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rates = measure_rates(getattr(torch, arguments.dtype))
    config = EngineConfig(prefix_cache_bytes=0, memory_bytes="4GiB")
    with (
        PromptCache.from_pretrained(
            arguments.model, dtype=arguments.dtype, device="cpu", config=config
        ) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        model = engine.loaded.model
        check(engine, model)
        contexts = [
            bench_context(engine, model, n, arguments.rounds, rates) for n in arguments.contexts
        ]
        decodes = [bench_decode(engine, model, n, 3) for n in arguments.contexts[:3:2]]
        ingest = bench_ingest(engine, model, Path(folder), 3)
    print_tables(contexts, decodes, ingest)
    print(json.dumps({
        "benchmark": "ttft",
        "model": arguments.model,
        "dtype": arguments.dtype,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "rates": rates,
        "contexts": contexts,
        "decode": decodes,
        "ingest": ingest,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
