"""Logits of batches of real architectures against those of each request alone.

Greedy tokens hide small mistakes: slopes wrong by a tenth left most answers as they were.
"""

from __future__ import annotations

import pytest
import torch

from pc_rag.layout.plan import Fresh, RequestPlan
from pc_rag.model.batch.kv import SharedKV, assemble_sequence
from pc_rag.model.batch.runner import BatchRunner
from pc_rag.model.batch.tails import allocate_tails
from pc_rag.types import Placement, Span
from tests.support.requests import Workbench, cached
from tests.support.tiny_models import tiny_model

LATER = (11, 12, 13)


def ids(num_tokens, *, seed):
    return tuple(
        torch.randint(0, 256, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


def plan_of(shared, own, *, gap, question):
    """Fresh text, an entry that others see, more fresh text, an entry of its own, a question."""
    parts, end = [], 0
    for part in (question[:2], shared, question[2:5], own, question[5:]):
        if isinstance(part, tuple):
            parts.append(Fresh(token_ids=part, span=Span(end, end + len(part))))
        else:
            parts.append(cached(part, start=end))
        end = parts[-1].span.end + gap
    return RequestPlan(tuple(parts))


def batch_logits(bench, plans, shared):
    """Behind every prompt, then behind each later token: ``[num_sequences, vocab_size]`` each."""
    runner = bench.runner
    capacities = [plan.num_tokens + len(LATER) for plan in plans]
    tails = allocate_tails(runner.shape, capacities, dtype=runner.dtype, device=runner.device)
    kv = SharedKV({shared.address.key: shared}, runner.dtype)
    sequences = [
        assemble_sequence(plan, tail, kv, bench.entries, runner)
        for plan, tail in zip(plans, tails, strict=True)
    ]
    batch = BatchRunner(runner)
    logits = [batch.prefill(sequences)]
    for number, token_id in enumerate(LATER):
        at = [plan.end + number for plan in plans]
        logits.append(batch.decode(sequences, [token_id] * len(plans), at))
    return logits


@pytest.mark.parametrize(
    "name",
    [
        "bloom",
        "falcon-rw",
        "mpt",
        "gemma2",
        "gpt_oss",
        "deepseek_v3",
        "cohere2",
        "gpt_neo",
        "llama",
    ],
)
def test_logits_of_a_batch_equal_those_of_each_request_alone(name):
    """Linear biases, windows, soft-capping, sinks, latent attention; three requests at once."""
    bench = Workbench(tiny_model(name)[0])
    is_fixed = bench.runner.positions.placement is Placement.FIXED
    shared = bench.encode(ids(30, seed=1), start=2 if is_fixed else 0)
    owns = [
        bench.encode(ids(size, seed=size), start=35 if is_fixed else 0) for size in (20, 25, 41)
    ]
    plans = [
        plan_of(shared, own, gap=0 if is_fixed else gap, question=ids(12 + gap, seed=gap))
        for own, gap in zip(owns, (0, 3, 7), strict=True)
    ]
    alone = [bench.decode(plan, LATER, settle=True) for plan in plans]
    together = batch_logits(bench, plans, shared)
    for number, logits in enumerate(together):
        expected = torch.stack([of_plan[number] for of_plan in alone])
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
