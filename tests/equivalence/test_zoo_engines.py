"""E2, E5, E7, batches and bfloat16 on every architecture, through whole engines."""

from __future__ import annotations

import pytest
import torch

from pc_rag.config import EngineConfig
from pc_rag.engine import PromptCache
from pc_rag.layout.plan import Fresh, RequestPlan
from pc_rag.model.loading import wrap_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import Span
from tests.support.architectures import ARCHITECTURES
from tests.support.engines import chunk_request, ingest, reference_ids, stored_bytes
from tests.support.reference import full_logits
from tests.support.requests import Workbench, cached
from tests.support.tiny_models import tiny_model

ANSWER = GenerationConfig(max_new_tokens=12)
SHORT = GenerationConfig(max_new_tokens=6)
PROMPT = "Answer from these texts.\nRain fell on the hills all night.\nWhere did it fall?"
END_ID = 259


def engine_of(name):
    """An engine whose model does not end its answers by itself."""
    model, tokenizer = tiny_model(name)
    model.get_output_embeddings().weight.data[END_ID] = 0
    config = EngineConfig(prefix_cache_bytes=0)
    return PromptCache.from_pretrained(wrap_model(model, tokenizer), config=config)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_answers_equal_those_of_generate_the_reference_and_a_batch(name):
    """E7 for the uncached arm, E2 and E5 for the cached one, and batches against single calls.

    One engine for all of it: an engine of every architecture takes a while to make.
    """
    engine = engine_of(name)
    check_generate(engine)
    requests = [
        chunk_request(engine, labels, question=question, repair=repair)
        for labels, question, repair in (
            ("ab", "\nWho sat?", "none"),
            ("bca", "\nWhy?", "link:2"),
            ("a", "\nHow long was it closed?", "none"),
        )
    ]
    ingest(engine, requests[1])
    before = stored_bytes(engine, requests[1])
    single = [engine.generate(request, SHORT).token_ids for request in requests]
    assert single[1] == reference_ids(engine, requests[1], SHORT.max_new_tokens)
    for share in (True, False):
        batch = engine.generate_batch(requests, SHORT, share=share)
        assert [completion.token_ids for completion in batch] == single
    assert len(set(single)) > 1, "answers that are all alike would show nothing"
    for key, states in stored_bytes(engine, requests[1]).items():
        assert all(map(torch.equal, states, before[key]))


def check_generate(engine):
    """E7: the uncached arm's greedy answer is that of the stock model."""
    ours = engine.generate(PROMPT, ANSWER, reuse=False).token_ids
    prompt = engine.plan(PROMPT).plan.token_ids
    theirs = engine.loaded.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=ANSWER.max_new_tokens, do_sample=False, pad_token_id=0,
    )[0, len(prompt) :].tolist()  # fmt: skip
    assert len(ours) == ANSWER.max_new_tokens
    assert list(ours) == theirs


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt_neox", "cohere2", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "mpt",
     "bloom", "falcon-rw", "gpt2", "gpt_neo"],
)  # fmt: skip
def test_e2_bfloat16_is_as_near_the_truth_as_stock_attention(name):
    """The error against the same weights in float32 is no more than the row states."""
    row = ARCHITECTURES[name]
    exact = tiny_model(name, **row.bfloat16_fields)[0]
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    low = tiny_model(name, dtype=torch.bfloat16, **row.bfloat16_fields)[0]
    bench = Workbench(low)
    ours, theirs = [], []
    for seed in range(3):
        ids = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        prefix = bench.encode(tuple(ids[:17]), start=0)
        chunk = bench.encode(tuple(ids[17:55]), start=17, context=(prefix,))
        question = Fresh(token_ids=tuple(ids[55:]), span=Span(55, 60))
        plan = RequestPlan((cached(prefix, start=0), cached(chunk, start=17), question))
        truth = full_logits(exact, ids, range(60))
        ours.append((bench.logits(plan) - truth).norm())
        theirs.append((full_logits(low, ids, range(60)).float() - truth).norm())
    assert sum(ours) <= row.bfloat16 * sum(theirs)
    assert sum(ours) > 0
