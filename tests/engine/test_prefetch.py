"""Prefetching brings entries near in the background, and never gets in a request's way."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from pc_rag.config import EngineConfig
from pc_rag.engine import PromptCache
from pc_rag.errors import CorruptEntry, PromptError, StoreError, StoreIOError
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.tiered_store import TieredStore
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import parse_prompt
from pc_rag.types import Tier
from tests.support.engines import SpyStore, tiny_engine

WAIT_SECONDS = 60
SHORT = GenerationConfig(max_new_tokens=8)
MODULE_TOKENS = 20
MODULES = {
    name: letter * MODULE_TOKENS for name, letter in zip(("a", "b", "c"), "abc", strict=True)
}
SCHEMA = f"""
<schema name="s">
  <union>{"".join(f'<module name="{n}">{text}</module>' for n, text in MODULES.items())}</union>
  <module name="last">{"d" * MODULE_TOKENS}</module>
</schema>
"""
PROMPT = parse_prompt('<prompt schema="s"><b/>So what?</prompt>')


@pytest.fixture
def restarted(tmp_path):
    """Makes an engine over a folder that holds the schema, its memory tier empty."""
    with tiny_engine(store=tmp_path, only_ascii=True) as engine:
        engine.add_schema(SCHEMA)
        loaded, bytes_per_token = engine.loaded, engine.bytes_per_token
    opened = []

    def restart(*, num_modules=4, **settings):
        near = MemoryTier(num_modules * MODULE_TOKENS * bytes_per_token)
        store = SpyStore(TieredStore([near, DiskTier(tmp_path)]))
        engine = PromptCache(loaded, store, EngineConfig(prefix_cache_bytes=0, **settings))
        engine.add_schema(SCHEMA)
        opened.append(engine)
        assert near_modules(engine) == []
        return engine

    yield restart
    for engine in opened:
        engine.close()
        assert engine.store.num_leased == 0
        engine.store.close()


def near_modules(engine):
    """Names of the modules that lie in the memory tier."""
    recipes = engine.plan(PROMPT).recipes.values()
    names = [*MODULES, "last"]
    tiers = [engine.store.lookup(recipe.address).tier for recipe in recipes]
    return [name for name, tier in zip(names, tiers, strict=True) if tier is Tier.HOST]


def finish_background(engine):
    """Wait for all that the background was given before."""
    assert engine.prefetch("s", []).result(WAIT_SECONDS) == 0


def test_entries_are_near_when_a_schema_is_announced(restarted):
    """Those of all its modules; the second time there is nothing to bring."""
    engine = restarted()
    assert engine.prefetch("s").result(WAIT_SECONDS) == 4
    assert near_modules(engine) == ["a", "b", "c", "last"]
    assert engine.prefetch("s").result(WAIT_SECONDS) == 0
    modules = engine.generate(PROMPT, SHORT).metrics.modules
    assert {use.tier for use in modules} == {Tier.HOST}


def test_only_named_entries_are_near_when_paths_are_announced(restarted):
    """Siblings stay where they are."""
    engine = restarted(prefetch_siblings=True)
    assert engine.prefetch("s", ["c"]).result(WAIT_SECONDS) == 1
    assert near_modules(engine) == ["c"]


def test_nothing_is_brought_when_the_store_has_one_tier():
    """There is nothing lower, and missing entries are not computed."""
    with tiny_engine(store=SpyStore()) as engine:
        engine.add_schema(SCHEMA)
        num_puts = engine.store.calls["put"]
        for key in engine.plan(PROMPT).recipes:
            engine.store.remove(key)
        assert engine.prefetch("s").result(WAIT_SECONDS) == 0
        assert engine.store.calls["put"] == num_puts


def test_prefetch_ends_when_the_nearest_tier_is_full_of_it(restarted):
    """What it brought is not evicted by what it brings."""
    engine = restarted(num_modules=2)
    assert engine.prefetch("s").result(WAIT_SECONDS) == 2
    assert near_modules(engine) == ["a", "b"]
    assert engine.store.stats()[0].num_evictions == 0


def test_unknown_names_are_refused_at_once_when_something_is_announced(restarted):
    """Schema and path; nothing is put into a future."""
    engine = restarted()
    with pytest.raises(PromptError, match=r"^schema 'nope' is not known; known: s\."):
        engine.prefetch("nope")
    with pytest.raises(PromptError, match="has no module 'lost'; did you mean 'last'"):
        engine.prefetch("s", ["lost"])
    with pytest.raises(PromptError, match="pass a list of paths"):
        engine.prefetch("s", "last")


def test_siblings_are_near_when_a_member_was_imported(restarted):
    """All members of the union, and nothing of what lies outside of it."""
    engine = restarted(prefetch_siblings=True)
    engine.generate(PROMPT, SHORT)
    finish_background(engine)
    assert near_modules(engine) == ["a", "b", "c"]


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 1}, {"share": False}])
def test_siblings_are_near_when_a_batch_imported_a_member(restarted, options):
    """As behind single calls; not behind a batch that computes everything."""
    engine = restarted(prefetch_siblings=True)
    engine.generate_batch([PROMPT] * 2, SHORT, reuse=False, **options)
    finish_background(engine)
    assert near_modules(engine) == []
    engine.generate_batch([PROMPT] * 2, SHORT, **options)
    finish_background(engine)
    assert near_modules(engine) == ["a", "b", "c"]


def test_siblings_stay_where_they_are_when_nobody_asked_for_them(restarted):
    """By default, in the uncached arm, and where no union is imported."""
    engine = restarted()
    engine.generate(PROMPT, SHORT)
    finish_background(engine)
    assert near_modules(engine) == ["b"]
    engine = restarted(prefetch_siblings=True)
    engine.generate(PROMPT, SHORT, reuse=False)
    engine.generate(parse_prompt('<prompt schema="s"><last/>Go</prompt>'), SHORT)
    finish_background(engine)
    assert near_modules(engine) == ["last"]


def test_siblings_wait_when_the_first_text_is_not_out(restarted):
    """They never compete with the prefill of the request that asks for them."""
    engine = restarted(prefetch_siblings=True)
    with engine.stream(PROMPT, SHORT) as stream:
        next(stream)
        finish_background(engine)
        assert near_modules(engine) == ["b"]
        next(stream)
        finish_background(engine)
        assert near_modules(engine) == ["a", "b", "c"]


def test_imported_member_stays_near_when_its_siblings_need_room(restarted):
    """Siblings take what is left, not the place of what is used."""
    engine = restarted(num_modules=2, prefetch_siblings=True)
    engine.generate(PROMPT, SHORT)
    finish_background(engine)
    assert near_modules(engine) == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "near"), [(CorruptEntry("damaged"), ["b", "c"]), (StoreIOError("gone"), ["b"])]
)
def test_request_is_as_always_when_the_store_fails_for_its_siblings(restarted, error, near):
    """A damaged entry is passed over, a failing medium ends it; the answer knows of neither."""
    expected = restarted().generate(PROMPT, SHORT)
    engine = restarted(prefetch_siblings=True)
    first_sibling = next(iter(engine.plan(PROMPT).recipes))
    engine.store.errors[first_sibling] = error
    answer = engine.generate(PROMPT, SHORT)
    assert answer.token_ids == expected.token_ids
    finish_background(engine)
    assert near_modules(engine) == near


def test_error_is_in_the_future_when_the_medium_fails(restarted):
    """And the next call works."""
    engine = restarted()
    key = next(iter(engine.plan(PROMPT).recipes))
    engine.store.errors[key] = StoreIOError("the medium failed")
    with pytest.raises(StoreIOError, match="the medium failed"):
        engine.prefetch("s").result(WAIT_SECONDS)
    del engine.store.errors[key]
    assert engine.prefetch("s").result(WAIT_SECONDS) == 4


def test_prefetch_is_refused_when_the_engine_is_closed(restarted):
    """And siblings of a request that still runs on its lent store stay where they are."""
    engine = restarted(prefetch_siblings=True)
    engine.close()
    with pytest.raises(StoreError, match="the engine is closed"):
        engine.prefetch("s")
    assert engine.generate(PROMPT, SHORT).token_ids
    assert near_modules(engine) == ["b"]


def test_waiting_calls_are_cancelled_when_the_engine_is_closed(restarted, monkeypatch):
    """What runs ends behind its entry, and resolves to what it has done."""
    engine = restarted()
    held, opens = threading.Event(), threading.Event()
    lease = engine.store.lease

    def wait(address, device):
        held.set()
        assert opens.wait(WAIT_SECONDS)
        return lease(address, device)

    monkeypatch.setattr(engine.store, "lease", wait)
    running = engine.prefetch("s")
    assert held.wait(WAIT_SECONDS)
    waiting = engine.prefetch("s", ["a"])
    waiting.add_done_callback(lambda _: opens.set())
    engine.close()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_SECONDS)
    assert running.result(WAIT_SECONDS) == 1


def test_no_thread_is_started_when_nothing_is_prefetched(restarted):
    """An engine that is only asked has no background."""
    engine = restarted(prefetch_siblings=True)
    engine.generate(parse_prompt('<prompt schema="s"><last/>Go</prompt>'), SHORT)
    assert not [t for t in threading.enumerate() if t.name.startswith("pc-rag-prefetch")]
    finish_background(engine)
    assert [t for t in threading.enumerate() if t.name.startswith("pc-rag-prefetch")]
