"""Streams that the garbage collector ends: no lock is taken, and nothing stays held."""

from __future__ import annotations

import gc
from operator import attrgetter
from threading import Thread

import pytest

from pc_rag.engine.ending import Endings, is_collecting
from pc_rag.model.sampling import GenerationConfig
from tests.support.engines import SpyStore, chunk_request, ingest, tiny_engine

BRIEF = GenerationConfig(max_new_tokens=3)
LOCKS = {
    "answers": "_machinery.answers._lock",
    "buffers": "runner.pool._lock",
    "prefix tree": "prefix_tree._lock",
    "store": "store.inner._lock",
}


class Knot:
    """Refers to itself, so that only the garbage collector finds it."""

    def __init__(self, held):
        self.held = held
        self.itself = self


@pytest.fixture
def engine():
    with tiny_engine(store=SpyStore(), only_ascii=True) as engine:
        ingest(engine, chunk_request(engine, "abc"))
        yield engine


def forget(engine):
    """Leave a stream half-way, in a cycle."""
    stream = engine.stream(chunk_request(engine, "abc"), BRIEF)
    next(stream)
    Knot(stream)


@pytest.mark.parametrize("name", LOCKS)
def test_collector_waits_for_no_lock_when_it_ends_a_stream(engine, name):
    """A collection may begin anywhere, also where its own thread holds a lock."""
    lock = attrgetter(LOCKS[name])(engine)

    def collect():
        with lock:
            gc.collect()

    gc.disable()
    try:
        forget(engine)
        thread = Thread(target=collect, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        gc.enable()
    assert engine.stats.snapshot().total.requests["cancelled"] == 1


@pytest.mark.parametrize("touch", ["stats", "request", "schema", "close", "completion"])
def test_forgotten_stream_is_ended_when_the_engine_is_used_next(engine, touch):
    """Its leases and its buffer come back."""
    other = engine.stream(chunk_request(engine, "c"), BRIEF)
    other.close()
    gc.disable()
    try:
        forget(engine)
        gc.collect()
        assert engine.store.num_leased > 0
        num_idle_bytes = engine.runner.pool.idle_bytes
        if touch == "stats":
            assert engine.stats
        elif touch == "request":
            engine.run(chunk_request(engine, "a"), BRIEF, watch=engine.start_watch())
        elif touch == "schema":
            engine.add_schema("<schema name='s'><module name='m'>text</module></schema>")
        elif touch == "close":
            engine.close()
        else:
            assert other.completion
        assert engine.store.num_leased == 0
        assert engine.runner.pool.idle_bytes > num_idle_bytes
    finally:
        gc.enable()


def test_started_request_frees_buffers_when_a_stream_was_forgotten_since_its_call(engine):
    """Prefill begins at the first ``next``, and so does the need for room."""
    stream = engine.stream(chunk_request(engine, "a"), BRIEF)
    gc.disable()
    try:
        forget(engine)
        gc.collect()
        next(stream)
        assert engine.store.num_leased == 2  # its own: the prefix and a chunk
        stream.close()
    finally:
        gc.enable()


def test_stream_ends_at_once_when_its_last_holder_lets_it_go(engine):
    """No collector is at work, so nothing is put off."""
    gc.disable()
    try:
        stream = engine.stream(chunk_request(engine, "abc"), BRIEF)
        next(stream)
        num_idle_bytes = engine.runner.pool.idle_bytes
        assert engine.store.num_leased > 0
        del stream
        assert engine.store.num_leased == 0
        assert engine.runner.pool.idle_bytes > num_idle_bytes
    finally:
        gc.enable()


def test_ending_is_done_once_when_it_was_deferred():
    """By whoever ends something next, and by no collection."""
    endings, done = Endings(), []

    class Finalized(Knot):
        def __del__(self):
            assert is_collecting()
            endings.do(lambda: done.append("deferred"))
            endings.do_deferred()

    Finalized(None)
    gc.collect()
    assert (done, is_collecting()) == ([], False)
    endings.do(lambda: done.append("own"))
    endings.do_deferred()
    assert done == ["own", "deferred"]


def test_completion_is_told_once_when_the_collector_ended_the_stream(engine):
    """Who waits for the completion hears of it from the call that comes by next."""
    told = []
    stream = engine.stream(chunk_request(engine, "abc"), BRIEF)
    next(stream)
    stream.when_completed(lambda: told.append("waited"))
    Knot(stream)
    del stream
    gc.collect()
    assert told == []
    _ = engine.stats
    _ = engine.stats
    assert told == ["waited"]


def test_completion_is_told_at_once_when_it_is_there(engine):
    """A stream that was closed has it; one that failed never has."""
    told = []
    stream = engine.stream(chunk_request(engine, "abc"), BRIEF)
    next(stream)
    stream.close()
    stream.when_completed(lambda: told.append(stream.completion))
    assert told == [stream.completion]
