"""Batches as calls: what is refused, given back, counted, and held in memory."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from pc_rag.config import EngineConfig
from pc_rag.errors import ConfigError, GenerationError, LayoutError, PromptError
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.metrics import Stopwatch
from pc_rag.model.batch.tails import allocate_tails
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import MissReason
from tests.support.engines import (
    CHUNKS,
    PREFIX,
    QUESTION,
    SpyStore,
    chunk_request,
    ingest,
    misses,
    tiny_engine,
)

SHORT = GenerationConfig(max_new_tokens=6)
SHARED_TOKENS = len(PREFIX) + len(CHUNKS["a"])
OWN_TOKENS = len("\n") + len(QUESTION)
CAN_ANSWER = SHORT.max_new_tokens - 1


def spied_engine(**config):
    store = SpyStore()
    engine = tiny_engine(store=store, config=EngineConfig(prefix_cache_bytes=0, **config))
    return engine, store


def failing(engine, *, at, error=ZeroDivisionError):
    """Let the forward pass number ``at``, counted from 0, raise."""
    count = 0

    def fail(*_):
        nonlocal count
        count += 1
        if count > at:
            raise error

    return engine.loaded.model.register_forward_pre_hook(fail)


def test_batch_is_empty_when_there_are_no_prompts():
    """No prompt, no answer, nothing counted."""
    engine = tiny_engine()
    assert engine.generate_batch([]) == []
    assert engine.generate_batch([], []) == []
    assert engine.stats.snapshot().total.num_requests == 0


def test_shared_modules_are_held_once_and_never_copied():
    """The tails of five requests have no row for what all of them read in place."""
    engine, _ = spied_engine()
    requests = [chunk_request(engine, "a") for _ in range(5)]
    ingest(engine, requests[0])
    shared = engine.prepare_batch(requests, SHORT)
    unshared = engine.prepare_batch(requests, SHORT, share=False)
    assert [c.token_ids for c in shared.run()] == [c.token_ids for c in unshared.run()]
    own = 5 * (OWN_TOKENS + CAN_ANSWER)
    assert shared.memory.tail_bytes == own * engine.bytes_per_token
    assert shared.memory.shared_bytes == SHARED_TOKENS * engine.bytes_per_token
    assert unshared.memory.shared_bytes == 0
    assert unshared.memory.num_bytes == (own + 5 * SHARED_TOKENS) * engine.bytes_per_token


def test_modules_that_one_prompt_reads_are_copied_and_given_back_at_once():
    """They are not held twice: only shared entries stay leased while a batch runs."""
    engine, store = spied_engine()
    requests = [chunk_request(engine, labels) for labels in ("ab", "a", "ac")]
    for request in requests:
        ingest(engine, request)
    leased = []
    handle = engine.loaded.model.register_forward_pre_hook(
        lambda *_: leased.append(store.num_leased)
    )
    engine.generate_batch(requests, SHORT)
    handle.remove()
    assert leased == [2] * SHORT.max_new_tokens  # the prefix and chunk a
    assert store.num_leased == 0


def watched_buffers(engine, monkeypatch):
    """How many buffers of a batch are held at each forward pass, and a function that counts now."""
    held, found = [], []

    def allocate(*arguments, **options):
        tails = allocate_tails(*arguments, **options)
        held.extend(
            weakref.ref(each) for each in {id(t.block): t.block.keys for t in tails}.values()
        )
        return tails

    def num_held():
        return sum(each() is not None for each in held)

    monkeypatch.setattr("pc_rag.engine.batch_group.allocate_tails", allocate)
    engine.loaded.model.register_forward_pre_hook(lambda *_: found.append(num_held()))
    return found, num_held


def test_buffer_goes_when_the_last_of_its_sequences_ends(monkeypatch):
    """Two that end at once, and one that goes on; nothing is left behind the batch."""
    engine, _ = spied_engine()
    found, num_held = watched_buffers(engine, monkeypatch)
    configs = [GenerationConfig(max_new_tokens=length) for length in (2, 6, 2)]
    batch = engine.prepare_batch(["x" * 50, "x", "x" * 50], configs)
    batch.run()
    assert found == [2, 2, 1, 1, 1, 1]
    assert num_held() == 0


@pytest.mark.parametrize("at", [0, 2])
def test_buffers_go_when_a_batch_fails_that_somebody_holds(at, monkeypatch):
    """Whoever keeps a failed batch keeps no KV of it."""
    engine, _ = spied_engine()
    _, num_held = watched_buffers(engine, monkeypatch)
    batch = engine.prepare_batch(["one", "two" * 20], SHORT)
    failing(engine, at=at)
    with suppress(ZeroDivisionError):
        batch.run()
    gc.collect()
    assert num_held() == 0


def test_prompt_has_a_pass_of_its_own_when_it_is_too_long_for_one(monkeypatch):
    """First or last: no pass is empty."""
    monkeypatch.setattr("pc_rag.engine.batch_group._PASS_TOKENS", 8)
    engine, _ = spied_engine()
    passes = []
    engine.loaded.model.register_forward_pre_hook(
        lambda _module, _args, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    engine.generate_batch(["x" * 20, "abc", "abcd", "x" * 9], GenerationConfig(max_new_tokens=1))
    assert passes == [20, 7, 9]


def test_shared_entries_are_leased_once_when_many_read_them():
    """One lease of each entry for the whole group."""
    engine, store = spied_engine()
    requests = [chunk_request(engine, "ab") for _ in range(6)]
    ingest(engine, requests[0])
    store.calls.clear()
    engine.generate_batch(requests, SHORT)
    assert store.calls["lease"] == 3


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_leases_come_back_when_a_batch_fails(at, error):
    """An error or an interrupt in any pass; requests are counted as failed, and the next works."""
    engine, store = spied_engine(tenant="t")
    requests = [chunk_request(engine, labels) for labels in ("ab", "ba", "c")]
    for request in requests:
        ingest(engine, request)
    handle = failing(engine, at=at, error=error)
    with pytest.raises(error):
        engine.generate_batch(requests, SHORT)
    handle.remove()
    assert store.num_leased == 0
    snapshot = engine.stats.snapshot()
    (group,) = snapshot.groups
    assert (group.template, group.tenant) == ("chunks", "t")
    assert (snapshot.total.requests["failed"], snapshot.total.num_requests) == (3, 3)
    assert len(engine.generate_batch(requests, SHORT)) == 3


def test_completed_requests_stay_counted_when_a_later_group_fails():
    """What had ended was completed; only the others failed."""
    engine, _ = spied_engine()
    handle = failing(engine, at=SHORT.max_new_tokens)
    with pytest.raises(ZeroDivisionError):
        engine.generate_batch(["one", "two", "three"], SHORT, max_batch_size=1)
    handle.remove()
    requests = engine.stats.snapshot().total.requests
    assert (requests["completed"], requests["failed"]) == (1, 2)


def test_refused_prompts_are_named_together_before_anything_is_computed():
    """All of them by index, in one error; the good ones are not run."""
    engine, store = spied_engine(context_limit=40)
    handle = failing(engine, at=0)
    with pytest.raises(PromptError) as refusal:
        engine.generate_batch(["fine", "", "x" * 41, "fine", []], SHORT)
    handle.remove()
    text = str(refusal.value)
    assert [f"prompt {index} of 5" in text for index in range(5)] == [0, 1, 1, 0, 1]
    assert "the prompt is empty" in text
    assert "context overflow" in text
    assert not store.calls
    assert engine.stats.snapshot().total.num_requests == 0


def test_refusal_is_of_one_kind_when_all_prompts_are_refused_alike():
    """Who catches a context overflow of a single call catches that of a batch."""
    engine = tiny_engine(config=EngineConfig(context_limit=40))
    with pytest.raises(LayoutError, match="prompt 1 of 2: context overflow"):
        engine.generate_batch(["fine", "x" * 41])


@pytest.mark.parametrize("max_batch_size", [0, -1, True])
def test_batch_is_refused_when_its_size_is_no_size(max_batch_size):
    """At least one prompt runs at a time."""
    with pytest.raises(ConfigError, match="max_batch_size"):
        tiny_engine().generate_batch(["a"], max_batch_size=max_batch_size)


def test_batch_is_refused_when_configurations_do_not_match():
    """One for all, or one for each."""
    with pytest.raises(ConfigError, match="3 prompts and 2 configurations"):
        tiny_engine().generate_batch(["a", "b", "c"], [SHORT, SHORT])


def test_text_in_place_of_a_list_is_refused():
    """A text is a sequence of characters, too; nobody means that."""
    with pytest.raises(PromptError, match="one text"):
        tiny_engine().generate_batch("hello")


def test_batch_runs_once():
    """Its answers are full; another run would go on behind their ends."""
    batch = tiny_engine().prepare_batch(["a"], SHORT)
    batch.run()
    with pytest.raises(GenerationError, match="run before"):
        batch.run()


def test_prefix_cache_is_neither_read_nor_fed():
    """What a batch computes is not remembered, and what is remembered is computed."""
    engine = tiny_engine()
    prompt = "The quick brown fox jumps"
    engine.generate_batch([prompt, prompt], SHORT)
    assert engine.generate(prompt, SHORT).metrics.num_reused_tokens == 0
    assert engine.generate(prompt, SHORT).metrics.num_reused_tokens > 0
    (again,) = engine.generate_batch([prompt], SHORT)
    assert again.metrics.num_reused_tokens == 0


def test_metrics_tell_of_every_request():
    """Tokens by kind, TTFT within the call, and one encoding counted once."""
    engine, _ = spied_engine()
    requests = [chunk_request(engine, "a") for _ in range(3)]
    metrics = [c.metrics for c in engine.generate_batch(requests, SHORT)]
    assert [m.num_cache_creation_tokens for m in metrics] == [SHARED_TOKENS, 0, 0]
    assert misses(metrics[0])["a"] is MissReason.NOT_STORED
    assert [m.num_fresh_tokens for m in metrics] == [OWN_TOKENS] * 3
    for each in metrics:
        assert each.num_decode_steps == CAN_ANSWER
        assert 0 < each.prefill_seconds <= each.ttft_seconds
        assert each.decode_seconds > 0
    assert engine.stats.snapshot().total.num_requests == 3


def ticking_engine(monkeypatch):
    """An engine whose clock ticks with every forward pass, and with nothing else."""
    engine = tiny_engine(only_ascii=True)
    now = 0.0

    def tick(*_):
        nonlocal now
        now += 1

    engine.loaded.model.base_model.register_forward_pre_hook(tick)  # encoding needs no more
    monkeypatch.setattr(engine, "start_watch", lambda: Stopwatch(read_clock=lambda: now))
    return engine


def test_passes_are_charged_to_those_who_take_part_when_answers_differ_in_length(monkeypatch):
    """Who has ended pays for no further pass; who waits for other prompts has no first token."""
    engine = ticking_engine(monkeypatch)
    monkeypatch.setattr("pc_rag.engine.batch_group._PASS_TOKENS", 6)
    configs = [GenerationConfig(max_new_tokens=length) for length in (2, 6, 4)]
    metrics = [c.metrics for c in engine.generate_batch(["one", "two", "three"], configs)]
    assert [each.ttft_seconds for each in metrics] == [1.0, 1.0, 2.0]
    assert [each.prefill_seconds for each in metrics] == [1.0] * 3
    assert [each.decode_seconds for each in metrics] == [1.0, 5.0, 3.0]


@pytest.mark.parametrize(
    ("size", "ttft"), [(1, [1.0, 7.0, 13.0]), (2, [1.0, 1.0, 7.0]), (3, [1.0, 1.0, 1.0])]
)
def test_wait_for_earlier_groups_is_part_of_ttft(size, ttft, monkeypatch):
    """On a clock that ticks with every pass; a pass is charged to everyone who takes part."""
    engine = ticking_engine(monkeypatch)
    found = engine.generate_batch(["one", "two", "three"], SHORT, max_batch_size=size)
    metrics = [completion.metrics for completion in found]
    assert [each.ttft_seconds for each in metrics] == ttft
    assert [each.prefill_seconds for each in metrics] == [1.0] * 3
    assert [each.decode_seconds for each in metrics] == [CAN_ANSWER] * 3


def test_group_pays_for_its_own_entries_when_earlier_groups_encoded_others(monkeypatch):
    """Its clock goes on from the call, and knows nothing of what others waited for."""
    engine = ticking_engine(monkeypatch)
    requests = [chunk_request(engine, label, prefix="") for label in "aaabb"]
    found = engine.generate_batch(requests, SHORT, max_batch_size=3)
    encoding = [completion.metrics.encode_seconds for completion in found]
    assert encoding == [1.0] * 5


def test_rate_is_not_learned_when_a_pass_attends_much_that_is_stored(monkeypatch):
    """Such a pass is slower per token than the plain prefill that the rate stands for."""
    monkeypatch.setattr("pc_rag.metrics.rate.MIN_PASS_TOKENS", 8)
    engine, _ = spied_engine()
    requests = [chunk_request(engine, "a") for _ in range(2)]
    for _ in range(3):
        found = engine.generate_batch(requests, SHORT)
    assert found[0].metrics.prefill_tokens_per_second is None
    for _ in range(2):
        (plain,) = engine.generate_batch(["x" * 20], SHORT)
    assert plain.metrics.prefill_tokens_per_second > 0


def test_batch_works_when_the_store_keeps_nothing():
    """What was encoded serves this batch anyway."""
    store = SpyStore(is_full=True)
    engine = tiny_engine(store=store, config=EngineConfig(prefix_cache_bytes=0))
    requests = [chunk_request(engine, labels) for labels in ("ab", "a")]
    found = [c.token_ids for c in engine.generate_batch(requests, SHORT)]
    kept = tiny_engine(store=MemoryTier(1 << 30), config=EngineConfig(prefix_cache_bytes=0))
    expected = [
        kept.generate(chunk_request(kept, labels), SHORT).token_ids for labels in ("ab", "a")
    ]
    assert found == expected


def test_batches_and_single_calls_interleave_when_threads_run_them():
    """Each gives what it gives alone; nothing is locked between passes."""
    engine, _ = spied_engine()
    requests = [chunk_request(engine, labels) for labels in ("ab", "ba", "abc", "c")]
    expected = [engine.generate(request, SHORT).token_ids for request in requests]
    with ThreadPoolExecutor(4) as pool:
        batches = [pool.submit(engine.generate_batch, requests, SHORT) for _ in range(3)]
        singles = [pool.submit(engine.generate, request, SHORT) for request in requests]
        for batch in batches:
            assert [c.token_ids for c in batch.result()] == expected
        assert [single.result().token_ids for single in singles] == expected
