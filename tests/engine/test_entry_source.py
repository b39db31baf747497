"""Entries are served to the right request, never changed, and encoded where the store fails."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from pc_rag.config import EngineConfig
from pc_rag.engine import EntryRecipe, PromptCache, Request
from pc_rag.errors import CorruptEntry, StoreFull, StoreIOError
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.key import VisibilityContext
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.layout.plan import Cached, Fresh, RequestPlan
from pc_rag.model.loading import wrap_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import HitKind, MissReason, Span, Tier, Visibility
from tests.support.engines import (
    CHUNKS,
    PREFIX,
    PREFIX_LABEL,
    SpyStore,
    chunk_request,
    ingest,
    misses,
    reference_ids,
    stored_bytes,
    tiny_engine,
)
from tests.support.tiny_models import tiny_model

NO_PREFIX_CACHE = EngineConfig(prefix_cache_bytes=0)
SHORT = GenerationConfig(max_new_tokens=8)


@pytest.mark.parametrize("config", [EngineConfig(), NO_PREFIX_CACHE])
@pytest.mark.parametrize("max_new_tokens", [2, 12])
def test_e5_entries_stay_as_they_are_when_requests_read_them(config, max_new_tokens):
    """E5, pitfall 1: same bytes, same length, same tokens, with and without settling."""
    engine = tiny_engine(config=config)
    request = chunk_request(engine, "abc", repair="link:4")
    ingest(engine, request)
    before = stored_bytes(engine, request)
    generation = GenerationConfig(max_new_tokens=max_new_tokens)
    answers = {engine.generate(request, generation).token_ids for _ in range(4)}
    assert len(answers) == 1
    after = stored_bytes(engine, request)
    for key, tensors in before.items():
        for ours, theirs in zip(tensors, after[key], strict=True):
            assert torch.equal(ours, theirs)
    assert engine.store.check_integrity().damaged == ()


def test_e5_answer_is_the_reference_when_repeated_after_other_requests():
    """Pitfalls 1 and 5: [A], [B A], [B C] and again; each is served its own chunks."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    requests = [chunk_request(engine, labels) for labels in ("a", "ba", "bc")]
    ingest(engine, chunk_request(engine, "abc"))
    expected = [reference_ids(engine, request, 8) for request in requests]
    assert len(set(expected)) == 3
    for _ in range(2):
        answers = [engine.generate(request, SHORT) for request in requests]
        assert [answer.token_ids for answer in answers] == expected
        assert all(use.is_hit for answer in answers for use in answer.metrics.modules)


def test_pitfall_2_the_same_chunk_twice_stands_at_two_places():
    """Pitfall 2: one entry, two spans, and the output of the reference; one encode."""
    engine = tiny_engine(store=SpyStore(), config=NO_PREFIX_CACHE)
    request = chunk_request(engine, "aa")
    answer = engine.generate(request, SHORT)
    assert answer.token_ids == reference_ids(engine, request, 8)
    assert engine.store.calls["put"] == 2
    uses = [use for use in answer.metrics.modules if use.label == "a"]
    assert [use.num_tokens for use in uses] == [len(CHUNKS["a"])] * 2
    once = chunk_request(engine, "a")
    assert engine.generate(once, SHORT).token_ids != answer.token_ids


def test_pitfall_2_a_chunk_twice_in_a_row_counts_as_two_modules_when_reuse_is_off():
    """Occurrences that touch are told apart in both arms."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    request = chunk_request(engine, "aa", separator="")
    for reuse in (True, False):
        modules = engine.generate(request, SHORT, reuse=reuse).metrics.modules
        size = len(CHUNKS["a"])
        assert [use.num_tokens for use in modules] == [len(PREFIX), size, size]


def test_pitfall_4_a_missing_chunk_is_encoded_and_reported():
    """Pitfall 4: A and C are read, B is computed, said so, and stored for the next request."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    ingest(engine, chunk_request(engine, "ac"))
    request = chunk_request(engine, "abc")
    answer = engine.generate(request, SHORT)
    assert answer.token_ids == reference_ids(engine, request, 8)
    expected = {PREFIX_LABEL: None, "a": None, "b": MissReason.NOT_STORED, "c": None}
    assert misses(answer.metrics) == expected
    size = len(CHUNKS["b"])
    assert [use.num_encoded_tokens for use in answer.metrics.modules] == [0, 0, size, 0]
    assert answer.metrics.num_cache_creation_tokens == size
    again = engine.generate(request, SHORT)
    assert again.token_ids == answer.token_ids
    assert all(use.is_hit for use in again.metrics.modules)


def test_pitfall_6_a_prompt_of_stored_chunks_only_computes_one_token():
    """Pitfall 6: no question; the last token is recomputed for its logits."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    request = chunk_request(engine, "ab", question="", separator="")
    ingest(engine, request)
    answer = engine.generate(request, SHORT)
    metrics = answer.metrics
    assert answer.token_ids == reference_ids(engine, request, 8)
    assert (metrics.num_repaired_tokens, metrics.num_fresh_tokens) == (1, 0)
    assert [use.label for use in metrics.modules] == [PREFIX_LABEL, "a", "b"]
    assert all(use.is_hit for use in metrics.modules)


def test_pitfall_7_one_fresh_token_behind_stored_text_equals_full_prefill():
    """Pitfall 7: prefix, one chunk and a one-token question give the uncached arm's tokens."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    request = chunk_request(engine, "a", separator="", question="?")
    ingest(engine, request)
    cached = engine.generate(request, SHORT)
    uncached = engine.generate(request, SHORT, reuse=False)
    assert cached.token_ids == uncached.token_ids
    assert {use.hit_kind for use in cached.metrics.modules} == {HitKind.EXACT}


def test_e6_another_model_of_the_same_shapes_gets_no_entry(tmp_path):
    """E6, pitfall 3: every lookup misses with reason fingerprint, and the output is right."""
    with tiny_engine(seed=0, store=tmp_path) as engine:
        ingest(engine, chunk_request(engine, "ab"))
    with tiny_engine(seed=1, store=tmp_path) as other:
        request = chunk_request(other, "ab")
        for recipe in request.recipes.values():
            assert other.store.lookup(recipe.address).miss_reason is MissReason.FINGERPRINT
        answer = other.generate(request, SHORT)
        assert set(misses(answer.metrics).values()) == {MissReason.FINGERPRINT}
        assert answer.token_ids == reference_ids(other, request, 8)
    with tiny_engine(seed=0, store=tmp_path) as engine:
        answer = engine.generate(chunk_request(engine, "ab"), SHORT)
        assert {use.tier for use in answer.metrics.modules} == {Tier.DISK}


def _other_tokenizer(change):
    model, tokenizer = tiny_model("llama")
    return wrap_model(model, change(tokenizer))


def _retemplated(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def _respecialised(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        (lambda: wrap_model(*tiny_model("llama", dtype=torch.bfloat16)), MissReason.FINGERPRINT),
        (lambda: _other_tokenizer(_retemplated), MissReason.FINGERPRINT),
        (lambda: _other_tokenizer(_respecialised), MissReason.FINGERPRINT),
        (lambda: wrap_model(*tiny_model("llama", rope_theta=5e4)), MissReason.FINGERPRINT),
    ],
    ids=["dtype", "chat-template", "tokenizer", "rope"],
)
def test_e6_a_model_that_differs_in_one_thing_gets_no_entry(tmp_path, loaded, expected):
    """E6: dtype, chat template, tokenizer or RoPE parameters changed, weights alike."""
    with tiny_engine(store=tmp_path) as engine:
        ingest(engine, chunk_request(engine, "a"))
    with PromptCache.from_pretrained(loaded(), store=tmp_path) as other:
        answer = other.generate(chunk_request(other, "a"), SHORT)
        assert set(misses(answer.metrics).values()) == {expected}


@pytest.mark.parametrize(
    "config", [EngineConfig(tenant="b"), EngineConfig(tenant="a", storage_dtype="bfloat16")]
)
def test_e6_another_tenant_or_storage_dtype_gets_no_entry(tmp_path, config):
    """E6: the salt and the stored dtype are part of the key."""
    with tiny_engine(store=tmp_path, config=EngineConfig(tenant="a")) as engine:
        ingest(engine, chunk_request(engine, "a"))
    with tiny_engine(store=tmp_path, config=config) as other:
        answer = other.generate(chunk_request(other, "a"), SHORT)
        assert not any(use.is_hit for use in answer.metrics.modules)


def test_entries_are_of_the_storage_dtype_when_it_is_not_the_compute_dtype():
    """bfloat16 entries of a float32 model: half the bytes, logits close to the reference."""
    engine = tiny_engine(config=EngineConfig(storage_dtype="bfloat16", prefix_cache_bytes=0))
    request = chunk_request(engine, "ab")
    engine.generate(request, SHORT)
    tensors = [t for pair in stored_bytes(engine, request).values() for t in pair]
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    answer = engine.generate(request, GenerationConfig(max_new_tokens=1))
    assert answer.token_ids == reference_ids(engine, request, 1)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"broken": {"lease"}}, MissReason.IO),
        ({"broken": {"lease", "lookup", "put"}}, MissReason.IO),
        ({"broken": {"lookup"}}, MissReason.IO),
        ({"broken": {"put"}}, MissReason.NOT_STORED),
        ({"is_full": True}, MissReason.NOT_STORED),
    ],
    ids=["lease", "all", "lookup", "put", "full"],
)
def test_request_is_right_when_the_store_fails(fault, reason):
    """A failing or full store costs time, never an answer; the reason is told."""
    engine = tiny_engine(store=SpyStore(**fault), config=NO_PREFIX_CACHE)
    request = chunk_request(engine, "abc")
    for _ in range(2 if "put" in fault.get("broken", ()) or "is_full" in fault else 1):
        answer = engine.generate(request, SHORT)
        assert set(misses(answer.metrics).values()) == {reason}
        assert answer.token_ids == reference_ids(engine, request, 8)
    assert engine.store.num_leased == 0


def test_only_the_damaged_entry_is_encoded_when_one_is_corrupt():
    """A damaged entry is a miss with reason corrupt; its neighbours are hits."""
    engine = tiny_engine(store=SpyStore(), config=NO_PREFIX_CACHE)
    request = chunk_request(engine, "ab")
    ingest(engine, request)
    bad = next(
        k for k, r in request.recipes.items() if len(r.address.token_ids) == len(CHUNKS["b"])
    )
    engine.store.errors[bad] = CorruptEntry("a flipped byte")
    answer = engine.generate(request, SHORT)
    assert misses(answer.metrics) == {PREFIX_LABEL: None, "a": None, "b": MissReason.CORRUPT}
    assert answer.token_ids == reference_ids(engine, request, 8)


def test_a_damaged_file_is_encoded_again(tmp_path):
    """E10 at the engine: a flipped byte on disk is a corrupt miss once, and a hit afterwards."""
    with tiny_engine(store=tmp_path) as engine:
        request = chunk_request(engine, "ab")
        ingest(engine, request)
        expected = engine.generate(request, SHORT).token_ids
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 0xFF
        file.write_bytes(data)
    with tiny_engine(store=tmp_path) as engine:
        answer = engine.generate(request, SHORT)
        assert set(misses(answer.metrics).values()) == {MissReason.CORRUPT}
        assert answer.token_ids == expected
    with tiny_engine(store=tmp_path) as engine:
        answer = engine.generate(request, SHORT)
        assert {use.tier for use in answer.metrics.modules} == {Tier.DISK}
        assert answer.token_ids == expected


def test_ingestion_tells_refusals_and_faults_when_the_store_fails():
    """``encode`` says which entries found no room, and raises when the medium fails."""
    engine = tiny_engine(store=SpyStore(is_full=True))
    request = chunk_request(engine, "a")
    encoded = list(engine.source.encode(request.recipes, request.recipes))
    assert {each.key for each in encoded} == set(request.recipes)
    assert all(isinstance(each.refusal, StoreFull) for each in encoded)
    broken = tiny_engine(store=SpyStore(broken={"put"}))
    with pytest.raises(StoreIOError):
        ingest(broken, request)


def _staircase(engine, num_steps):
    """Runs of which each attends all before it, as a schema's always-included text does."""
    recipes, keys, ids = {}, (), ()
    parts = []
    for step in range(num_steps):
        own = tuple(range(40 + 3 * step, 43 + 3 * step))
        context = VisibilityContext.of(Visibility.PREFIX, ids, range(len(ids)))
        address = engine.address(own, start=len(ids), context=context)
        recipes[address.key] = EntryRecipe(address, keys)
        parts.append(
            Cached(
                label=f"step {step}",
                key=address.key,
                token_ids=own,
                span=address.span,
                rows=Span(0, 3),
                encoded_start=address.start,
            )
        )
        keys, ids = (*keys, address.key), ids + own
    last = Fresh(token_ids=(7, 8), span=Span(len(ids), len(ids) + 2))
    return Request(plan=RequestPlan((*parts, last)), recipes=recipes)


@pytest.mark.parametrize("order", [1, -1])
def test_every_entry_is_encoded_once_when_the_store_keeps_nothing(order):
    """Contexts of contexts are encoded once a request, not once for every entry behind them."""
    engine = tiny_engine(store=SpyStore(is_full=True), config=NO_PREFIX_CACHE)
    request = _staircase(engine, 10)
    keys = list(request.recipes)[::order]
    with engine.source.acquire(keys, request.recipes) as acquired:
        assert set(acquired.entries) == set(keys)
        assert list(acquired.served) == keys
    assert engine.store.calls["put"] <= 2 * len(keys)
    answer = engine.generate(request, SHORT)
    assert answer.token_ids == reference_ids(engine, request, 8)


def test_leases_are_given_back_when_an_entry_cannot_be_acquired():
    """An error half-way leaves nothing leased."""
    engine = tiny_engine(store=SpyStore())
    request = chunk_request(engine, "abc")
    ingest(engine, request)
    assert engine.store.num_leased == 0
    *_, last = request.recipes
    engine.store.errors[last] = ZeroDivisionError("a bug in the store")
    with pytest.raises(ZeroDivisionError):
        engine.source.acquire(request.recipes, request.recipes)
    assert engine.store.num_leased == 0


def test_leases_are_given_back_before_the_last_token_when_the_request_settles():
    """A long answer holds no entry: the store may evict what its prompt was made of."""
    engine = tiny_engine(store=SpyStore())
    request = chunk_request(engine, "ab")
    ingest(engine, request)
    with engine.stream(request, GenerationConfig(max_new_tokens=40)) as stream:
        pieces = [next(stream) for _ in range(3)]
        assert engine.store.num_leased == 0
        for recipe in request.recipes.values():
            engine.store.remove(recipe.address.key)
        pieces += list(stream)
    fresh = tiny_engine()
    assert "".join(pieces) == fresh.generate(request, GenerationConfig(max_new_tokens=40)).text


def test_a_tier_that_holds_one_entry_still_serves_three_chunks():
    """Encoded entries are used from the request's own hands when the store evicts them."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    request = chunk_request(engine, "abc")
    largest = max(r.address.span.end - r.address.start for r in request.recipes.values())
    capacity = engine.runner.shape.bytes_per_token(engine.runner.dtype) * largest
    small = PromptCache(engine.loaded, MemoryTier(capacity), NO_PREFIX_CACHE)
    assert small.generate(request, SHORT).token_ids == reference_ids(engine, request, 8)
    (stats,) = small.store.stats()
    assert stats.resident_bytes <= capacity


def test_one_disk_store_serves_two_engines_at_once(tmp_path):
    """Two engines of one model over one folder: what one stored is a hit for the other."""
    first = tiny_engine(store=DiskTier(tmp_path))
    second = tiny_engine(store=DiskTier(tmp_path))
    request = chunk_request(first, "ab")
    answer = first.generate(request, SHORT)
    threads = [threading.Thread(target=second.generate, args=(request, SHORT)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = second.generate(request, SHORT)
    assert again.token_ids == answer.token_ids
    assert all(use.is_hit for use in again.metrics.modules)
