"""The facade: what a prompt may be, what it becomes, and how an engine is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from pc_rag.config import EngineConfig
from pc_rag.engine import PromptCache, Request
from pc_rag.errors import ConfigError, LayoutError, ModelError, PromptError, StoreError
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.layout import RequestPlan
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import parse_prompt
from pc_rag.types import Role, StorageDtype, Tier
from tests.support.engines import chunk_request, scripted, tiny_engine

BOS = 257
SHORT = GenerationConfig(max_new_tokens=3)
CHAT = [ChatMessage(Role.SYSTEM, "Be kind."), ChatMessage(Role.USER, "<s> hi")]


@pytest.mark.parametrize("add_bos", [True, False])
def test_pitfall_20_exactly_one_bos_stands_at_the_start(add_bos):
    """Pitfall 20: text, chat and PML; a literal BOS in a text stays text."""
    engine = tiny_engine(add_bos=add_bos)
    engine.add_schema('<schema name="s">Read.<module name="m">Text &lt;s&gt;</module></schema>')
    prompts = ["<s> hello", CHAT, parse_prompt('<prompt schema="s"><m/>and &lt;s&gt;?</prompt>')]
    for prompt in prompts:
        ids = engine.plan(prompt).plan.token_ids
        assert ids.count(BOS) == int(add_bos)
        assert (ids[0] == BOS) is add_bos
        assert engine.generate(prompt, SHORT).metrics.prompt_tokens == len(ids)


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt_is_refused(prompt):
    """There is nothing to compute."""
    engine = tiny_engine()
    with pytest.raises(PromptError):
        engine.generate(prompt)
    assert engine.stats.snapshot().total.num_requests == 0


def test_planning_and_streaming_compute_nothing_before_the_first_pull():
    """Prefill starts at the first ``next``."""
    engine = tiny_engine()
    with scripted(engine, "a", fail_at=0):
        engine.plan("hello")
        stream = engine.stream("hello")
        with pytest.raises(ZeroDivisionError):
            next(stream)


def test_templates_label_the_requests():
    """Text, chat and schema are told apart in the metrics."""
    engine = tiny_engine()
    engine.add_schema('<schema name="s"><module name="m">Text</module></schema>')
    pml = parse_prompt('<prompt schema="s"><m/>?</prompt>')
    found = [engine.generate(p, SHORT).metrics.template for p in ("hi", CHAT, pml)]
    assert found == ["text", "chat", "s"]


def test_engine_switches_reuse_off_for_every_request_when_configured():
    """``reuse`` of a call beats the configuration, both ways."""
    engine = tiny_engine(config=EngineConfig(reuse=False))
    request = chunk_request(engine, "a")
    assert engine.generate(request, SHORT).metrics.num_cached_tokens == 0
    assert engine.generate(request, SHORT, reuse=True).metrics.num_cached_tokens > 0


def test_folder_makes_a_memory_and_a_disk_tier(tmp_path):
    """``store=folder`` outlives the process, behind a memory tier."""
    config = EngineConfig(memory_bytes=1 << 20, disk_bytes=1 << 22)
    with tiny_engine(store=tmp_path, config=config) as engine:
        stats = engine.store.stats()
    assert [s.tier for s in stats] == [Tier.HOST, Tier.DISK]
    assert [s.capacity_bytes for s in stats] == [1 << 20, 1 << 22]
    (only,) = tiny_engine(config=config).store.stats()
    assert (only.tier, only.capacity_bytes) == (Tier.HOST, 1 << 20)


def test_engine_closes_the_store_that_it_opened(tmp_path):
    """Closing twice is harmless; a request behind it is refused."""
    engine = tiny_engine(store=tmp_path)
    request = chunk_request(engine, "a")
    engine.close()
    engine.close()
    with pytest.raises(StoreError, match="closed"):
        engine.generate(request, SHORT)
    assert engine.stats.snapshot().total.num_requests == 1


def test_lent_store_stays_open_when_an_engine_is_closed():
    """Engines of several tenants may share a store; closing one leaves the others alone."""
    store = MemoryTier(1 << 20)
    tiny_engine(store=store, config=EngineConfig(tenant="a")).close()
    engine = tiny_engine(store=store, config=EngineConfig(tenant="b"))
    assert engine.generate(chunk_request(engine, "a"), SHORT).token_ids


def test_engine_is_refused_when_its_dtype_cannot_be_stored():
    """Entries of float64 have no storage dtype; the message names those there are."""
    with pytest.raises(ConfigError, match="stored as float64"):
        tiny_engine(dtype=torch.float64)


def test_engines_of_one_model_take_turns_when_they_run_at_once():
    """Two tenants over one model: the attention of one is not swapped under the other."""
    one = tiny_engine(config=EngineConfig(tenant="a", prefix_cache_bytes=0))
    two = PromptCache.from_pretrained(
        one.loaded, config=EngineConfig(tenant="b", prefix_cache_bytes=0)
    )
    before = one.loaded.model.config._attn_implementation
    expected = one.generate(chunk_request(one, "abc"), SHORT).token_ids
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(lambda each: each.generate(chunk_request(each, "abc"), SHORT), each)
            for each in (one, two) * 6
        ]
        assert {run.result().token_ids for run in runs} == {expected}
    assert one.loaded.model.config._attn_implementation == before


def test_request_is_refused_when_its_plan_ends_in_stored_tokens():
    """The last token's logits give the first new one, so it has to be computed."""
    engine = tiny_engine()
    request = chunk_request(engine, "a")
    with pytest.raises(LayoutError, match="with_fresh_end"):
        Request(plan=RequestPlan(request.plan.parts[:1]), recipes=request.recipes)


def test_model_is_refused_when_it_is_in_training_mode():
    """Dropout would be stored under the fingerprint of the model without it."""
    engine = tiny_engine()
    engine.loaded.model.train()
    with pytest.raises(ModelError, match="training mode"):
        engine.generate("x", SHORT)
    engine.loaded.model.eval()
    assert engine.generate("x", SHORT).token_ids


def test_schema_is_refused_when_it_reserves_more_than_the_context():
    """Before anything is encoded, with both numbers."""
    engine = tiny_engine(config=EngineConfig(context_limit=32))
    with pytest.raises(LayoutError, match="reserves 40 position IDs, the model has 32"):
        engine.add_schema(f'<schema name="s"><module name="m">{"x" * 40}</module></schema>')


def test_storage_dtype_follows_the_compute_dtype_when_auto():
    """And is what was configured otherwise."""
    assert tiny_engine().storage_dtype is StorageDtype.FLOAT32
    config = EngineConfig(storage_dtype="float16")
    assert tiny_engine(config=config).storage_dtype is StorageDtype.FLOAT16


def test_context_limit_never_exceeds_the_model():
    """The smaller of the two holds."""
    small = tiny_engine(config=EngineConfig(context_limit=50))
    assert small.max_position == 50
    assert tiny_engine(config=EngineConfig(context_limit=10**6)).max_position == 2048


def test_request_without_a_recipe_is_refused_by_name():
    """A request that was planned elsewhere and lacks a recipe says what it lacks."""
    engine = tiny_engine()
    request = chunk_request(engine, "a")
    with pytest.raises(LayoutError, match="'prefix': there is no recipe"):
        replace(request, recipes={})
    chunk_only = {key: recipe for key, recipe in request.recipes.items() if recipe.context}
    with pytest.raises(LayoutError, match="no recipe"):
        replace(request, recipes=chunk_only)


def test_loaded_model_may_be_shared_by_two_engines():
    """Two engines with stores of their own over one model give the same answer."""
    first = tiny_engine()
    second = PromptCache.from_pretrained(first.loaded)
    request = chunk_request(first, "ab")
    assert first.generate(request, SHORT).token_ids == second.generate(request, SHORT).token_ids
