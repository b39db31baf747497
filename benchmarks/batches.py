"""Many requests over one module: shared batch, unshared batch, and one by one.

The case of Prompt Cache (arXiv 2311.04934), section 3.4: requests of 2K tokens that share a module
of 1K, each with a private text of 1K behind it, and a few generated tokens.

    shared       one batch of all requests; the module's KV is held once and read in place
    unshared     the same batch with share=False; every request has a copy of the module's KV
    one by one   `generate` for each request, which reads the stored module, too

What is measured, for each arm: the bytes of KV held at once (buffers allocated, and stored entries
that are read in place or copied from), the wall time, the tokens generated over it, the rate of the
prompts (their fresh tokens over all time that is not decoding), and the rate of decoding.

What is not measured: encoding the module (done before), answer quality, requests that come in
while others run. The tokens are random, so prompts of all requests are of equal length; answers end
early where the model ends them.

Arms alternate in one process, after a warm-up of each with two requests; medians are quoted. The
floor of a decode step counts one read of the weights and of the KV that the step attends, at this
machine's measured memory bandwidth. Correctness is asserted before anything is timed: a batch gives
the tokens of single calls. Answers of the long prompts are compared, too; where the two likeliest
tokens are nearly equal, rounding may choose differently, so the share of equal answers is told.

    python benchmarks/batches.py [--num-requests 100] [--num-single 100] [--rounds 1]
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from ttft import SEED, measure_rates

from pc_rag.config import EngineConfig
from pc_rag.engine import EntryRecipe, PromptCache, Request
from pc_rag.kv.key import VisibilityContext
from pc_rag.layout import EntryPiece, TextPiece, plan_chunks
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import PositionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pc_rag.engine import Completion

ARMS = ("shared", "unshared", "one by one")
MOST_HELD = 0.55
"""Limit on the KV of the shared arm over that of the unshared one."""


@dataclass(frozen=True)
class Run:
    """One arm, run once."""

    completions: Sequence[Completion]
    wall_seconds: float
    decode_seconds: float
    num_bytes: int


def make_requests(
    engine: PromptCache, num_requests: int, module_tokens: int, private_tokens: int
) -> list[Request]:
    """Requests over one stored module of random tokens, each with a text of its own."""
    generator = torch.Generator().manual_seed(SEED)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(100, 4000, (count,), generator=generator).tolist())

    address = engine.address(tokens(module_tokens), start=0, context=VisibilityContext.module())
    recipes = {address.key: EntryRecipe(address)}
    list(engine.source.encode(recipes, recipes))
    module = EntryPiece(label="module", key=address.key, token_ids=address.token_ids,
                        encoded_start=0, context_is_prefix=True, is_prefix=True)  # fmt: skip
    requests = []
    for _ in range(num_requests):
        plan = plan_chunks(
            [module, TextPiece(tokens(private_tokens))],
            policy=PositionPolicy.PACKED,
            max_position=engine.max_position,
        )
        requests.append(Request(plan=plan, recipes=recipes, template="bench"))
    return requests


def run_batch(
    engine: PromptCache, requests: Sequence[Request], config: GenerationConfig, *, share: bool
) -> Run:
    """All requests side by side."""
    started = time.perf_counter()
    batch = engine.prepare_batch(requests, config, share=share, max_batch_size=len(requests))
    completions = batch.run()
    wall = time.perf_counter() - started
    # Every step is charged to everyone who takes part; the longest answer took part in all.
    decode = max(completion.metrics.decode_seconds for completion in completions)
    return Run(completions, wall, decode, batch.memory.num_bytes)


def run_single(engine: PromptCache, requests: Sequence[Request], config: GenerationConfig) -> Run:
    """One request behind the other; its buffers are in the pool when it is done."""
    started = time.perf_counter()
    completions = [engine.generate(request, config) for request in requests]
    wall = time.perf_counter() - started
    decode = sum(completion.metrics.decode_seconds for completion in completions)
    entries = len(requests[0].plan.cached[0].token_ids) * engine.bytes_per_token
    return Run(completions, wall, decode, engine.runner.pool.idle_bytes + entries)


def check(engine: PromptCache) -> None:
    """Both batches give the tokens of single calls."""
    requests = make_requests(engine, 3, 64, 24)
    config = GenerationConfig(max_new_tokens=8)
    expected = [engine.generate(request, config).token_ids for request in requests]
    for share in (True, False):
        found = engine.generate_batch(requests, config, share=share)
        assert [completion.token_ids for completion in found] == expected, share


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a forward pass reads; of tied embeddings the head does."""
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if tied else total - embedding.nbytes


def floor_step_seconds(
    engine: PromptCache, plan: Any, num_requests: int, bandwidth: float
) -> dict[str, float]:
    """Least time of a decode step of all requests: see the header."""
    weights = weight_bytes(engine.loaded.model)
    module = len(plan.cached[0].token_ids) * engine.bytes_per_token
    private = sum(len(part.token_ids) for part in plan.fresh) * engine.bytes_per_token
    num_bytes = {
        "shared": weights + module + num_requests * private,
        "unshared": weights + num_requests * (module + private),
        "one by one": num_requests * (weights + module + private),
    }
    return {name: count / bandwidth for name, count in num_bytes.items()}


def summarize(runs: Sequence[Run], floor: float, num_requests: int) -> dict[str, Any]:
    """What the table and the JSON say of one arm."""
    fresh = sum(each.metrics.num_fresh_tokens for each in runs[0].completions)
    generated = sum(len(each.token_ids) for each in runs[0].completions)
    steps = sum(each.metrics.num_decode_steps for each in runs[0].completions)
    wall = statistics.median(run.wall_seconds for run in runs)
    decode = statistics.median(run.decode_seconds for run in runs)
    num_run = len(runs[0].completions)
    return {
        "num_requests": num_run,
        "kv_bytes": runs[0].num_bytes,
        "wall_seconds": wall,
        "seconds_per_request": wall / num_run,
        "generated_tokens_per_second": generated / wall,
        "prefill_tokens_per_second": fresh / (wall - decode),
        "decode_tokens_per_second": steps / decode,
        "floor_decode_tokens_per_second": num_requests / floor,
        "samples": [[run.wall_seconds, run.decode_seconds] for run in runs],
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """What people read."""
    print(f"{'arm':>11} {'requests':>9} {'KV MiB':>8} {'wall s':>8} {'s/request':>10} "
          f"{'prefill tok/s':>14} {'decode tok/s':>13} {'of floor':>9}")  # fmt: skip
    for name, row in results.items():
        share = row["decode_tokens_per_second"] / row["floor_decode_tokens_per_second"]
        print(
            f"{name:>11} {row['num_requests']:>9} {row['kv_bytes'] / 2**20:>8.0f} "
            f"{row['wall_seconds']:>8.1f} {row['seconds_per_request']:>10.2f} "
            f"{row['prefill_tokens_per_second']:>14.0f} {row['decode_tokens_per_second']:>13.1f} "
            f"{share:>9.0%}"
        )


def parse_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--num-single", type=int, help="of them, run one by one; by default all")
    parser.add_argument("--module-tokens", type=int, default=1024)
    parser.add_argument("--private-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


def run_arms(
    engine: PromptCache, requests: Sequence[Request], arguments: argparse.Namespace
) -> dict[str, list[Run]]:
    """Every arm, once a round, after a warm-up of each."""
    singles = requests[: arguments.num_single or len(requests)]
    config = GenerationConfig(max_new_tokens=arguments.new_tokens)
    arms: dict[str, Callable[[int], Run]] = {
        "shared": lambda count: run_batch(engine, requests[:count], config, share=True),
        "unshared": lambda count: run_batch(engine, requests[:count], config, share=False),
        "one by one": lambda count: run_single(engine, singles[:count], config),
    }
    for run in arms.values():
        run(2)
    runs: dict[str, list[Run]] = {name: [] for name in ARMS}
    order = list(ARMS)
    for _ in range(arguments.rounds):
        for name in order:
            runs[name].append(arms[name](len(requests)))
        order.append(order.pop(0))  # no arm always follows the same one
    return runs


def equal_answers(runs: dict[str, list[Run]]) -> dict[str, float]:
    """For each of the batches, the share of its answers that single calls gave, too."""
    ids = {name: [each.token_ids for each in runs[name][0].completions] for name in ARMS}
    expected = ids["one by one"]
    return {
        name: statistics.mean(map(operator.eq, ids[name][: len(expected)], expected))
        for name in ARMS[:2]
    }


def main() -> None:
    """Run everything and print a table and one line of JSON."""
    arguments = parse_arguments()
    rates = measure_rates(getattr(torch, arguments.dtype))
    engine = PromptCache.from_pretrained(
        arguments.model,
        dtype=arguments.dtype,
        device="cpu",
        config=EngineConfig(prefix_cache_bytes=0),
    )
    check(engine)
    requests = make_requests(
        engine, arguments.num_requests, arguments.module_tokens, arguments.private_tokens
    )
    runs = run_arms(engine, requests, arguments)
    floors = floor_step_seconds(engine, requests[0].plan, len(requests), rates["bytes_per_second"])
    results = {name: summarize(runs[name], floors[name], len(requests)) for name in ARMS}
    equal = equal_answers(runs)
    ratio = results["shared"]["kv_bytes"] / results["unshared"]["kv_bytes"]
    print_table(results)
    print(f"KV of the shared batch over that of the unshared one: {ratio:.1%} "
          f"(limit {MOST_HELD:.0%})")  # fmt: skip
    print(f"answers equal to those of single calls: shared {equal['shared']:.0%}, "
          f"unshared {equal['unshared']:.0%}")  # fmt: skip
    print(json.dumps({
        "benchmark": "batches",
        "model": arguments.model,
        "dtype": arguments.dtype,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                     "python": platform.python_version()},
        "rates": rates,
        "tokens": {"module": arguments.module_tokens, "private": arguments.private_tokens,
                   "new": arguments.new_tokens},
        "kv_ratio": ratio,
        "equal_answers": equal,
        "arms": results,
    }))  # fmt: skip
    if arguments.num_requests > 1 and ratio > MOST_HELD:
        raise SystemExit(f"the shared batch holds {ratio:.1%} of the unshared one's KV")


if __name__ == "__main__":
    main()
