"""Streams: closed at any token, dropped, failed, pulled from several threads."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pc_rag.config import EngineConfig
from pc_rag.errors import GenerationError
from pc_rag.metrics import Outcome
from pc_rag.model.hf_attention import model_lock
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import FinishReason
from tests.support.engines import SpyStore, chunk_request, ingest, scripted, tiny_engine

LONG = GenerationConfig(max_new_tokens=400)
BRIEF = GenerationConfig(max_new_tokens=3)  # not settled: entries stay leased to the end
SHORT = GenerationConfig(max_new_tokens=12)


@pytest.fixture
def engine():
    """An engine that has stored the chunks, over a store that knows open leases."""
    engine = tiny_engine(store=SpyStore(), only_ascii=True)
    ingest(engine, chunk_request(engine, "abc"))
    return engine


def outcomes(engine):
    """Requests by outcome, zeros left out."""
    requests = engine.stats.snapshot().total.requests
    return {outcome: count for outcome, count in requests.items() if count}


def assert_nothing_is_held(engine):
    """No lease on an entry or on the prefix cache, and the lock of the model is free."""
    assert engine.store.num_leased == 0
    assert not any(node.num_leases for node in engine.prefix_tree._by_use)
    assert not model_lock(engine.loaded.model).locked()


def idle_bytes(engine):
    return engine.runner.pool.idle_bytes


@pytest.mark.parametrize("config", [BRIEF, LONG])
def test_pitfall_26_generation_stops_when_the_stream_is_closed(engine, config):
    """Pitfall 26: next, close: cancelled, counted once, everything given back."""
    num_passes = 0

    def count(*_):
        nonlocal num_passes
        num_passes += 1

    engine.generate(chunk_request(engine, "abc"), config)
    idle = idle_bytes(engine)
    handle = engine.loaded.model.register_forward_pre_hook(count)
    stream = engine.stream(chunk_request(engine, "abc"), config)
    first = next(stream)
    stream.close()
    handle.remove()
    assert num_passes == 1
    completion = stream.completion
    assert (completion.text, completion.finish_reason) == (first, FinishReason.CANCELLED)
    assert len(completion.token_ids) == completion.metrics.num_generated_tokens == 1
    assert completion.metrics.is_cancelled
    assert outcomes(engine) == {Outcome.COMPLETED: 1, Outcome.CANCELLED: 1}
    assert_nothing_is_held(engine)
    assert idle_bytes(engine) == idle
    stream.close()
    assert list(stream) == []
    assert outcomes(engine) == {Outcome.COMPLETED: 1, Outcome.CANCELLED: 1}


def test_leaving_the_with_block_closes_the_stream_when_the_consumer_raises(engine):
    """An error of the consumer is not one of the request."""
    stream = engine.stream(chunk_request(engine, "ab"), LONG)

    def consume():
        with stream:
            next(stream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert stream.completion.finish_reason is FinishReason.CANCELLED
    assert_nothing_is_held(engine)


def test_unstarted_stream_counts_once_and_stays_closed(engine):
    """Closed before the first pull: nothing ran, and nothing runs later."""
    calls = dict(engine.store.calls)
    stream = engine.stream(chunk_request(engine, "abc"), LONG)
    stream.close()
    assert list(stream) == []
    stream.close()
    assert outcomes(engine) == {Outcome.CANCELLED: 1}
    completion = stream.completion
    assert (completion.text, completion.token_ids) == ("", ())
    assert completion.metrics.modules == ()
    assert completion.metrics.ttft_seconds is None
    assert engine.store.calls == calls


def test_dropped_stream_gives_everything_back_when_collected(engine):
    """A consumer that forgets its stream locks nothing."""
    stream = engine.stream(chunk_request(engine, "abc"), BRIEF)
    next(stream)
    assert engine.store.num_leased > 0
    del stream
    gc.collect()
    assert_nothing_is_held(engine)
    assert outcomes(engine) == {Outcome.CANCELLED: 1}


def test_stream_gives_back_its_leases_when_it_is_exhausted(engine):
    """The last ``next`` ends the request; no close is needed."""
    stream = engine.stream(chunk_request(engine, "abc"), BRIEF)
    text = "".join(stream)
    assert_nothing_is_held(engine)
    assert stream.completion.text == text
    assert outcomes(engine) == {Outcome.COMPLETED: 1}


def test_completion_is_refused_while_the_stream_runs(engine):
    """Half an answer is not an answer."""
    stream = engine.stream(chunk_request(engine, "a"), LONG)
    with pytest.raises(GenerationError, match="has not ended"):
        _ = stream.completion
    next(stream)
    with pytest.raises(GenerationError, match="has not ended"):
        _ = stream.completion
    stream.close()
    assert stream.completion.finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize(("fail_at", "max_new_tokens"), [(0, 4), (1, 4), (0, 30), (1, 30), (5, 30)])
def test_pitfall_25_error_of_the_model_reaches_the_consumer(engine, fail_at, max_new_tokens):
    """Pitfall 25: at once, as it was raised; counted once; the next request works."""
    request = chunk_request(engine, "abc")
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    expected = engine.generate(request, config, reuse=False).text
    with scripted(engine, "abcdefgh", fail_at=fail_at):
        stream = engine.stream(request, config)
        pieces = [next(stream) for _ in range(fail_at)]
        with pytest.raises(ZeroDivisionError, match="the model failed"):
            next(stream)
    assert "".join(pieces) == "abcdefgh"[:fail_at]
    assert_nothing_is_held(engine)
    assert list(stream) == []
    stream.close()
    with pytest.raises(GenerationError, match="failed"):
        _ = stream.completion
    assert outcomes(engine) == {Outcome.COMPLETED: 1, Outcome.FAILED: 1}
    assert engine.generate(request, config, reuse=False).text == expected
    assert engine.prefix_tree.stats().num_nodes == 0, "half a request was remembered"


def test_two_interleaved_streams_give_what_they_give_alone(engine):
    """Requests of one engine take turns at every token."""
    requests = [chunk_request(engine, labels) for labels in ("ab", "cb")]
    alone = [engine.generate(r, SHORT, reuse=True).text for r in requests]
    streams = [engine.stream(r, SHORT) for r in requests]
    texts = ["", ""]
    is_open = True
    while is_open:
        is_open = False
        for index, stream in enumerate(streams):
            piece = next(stream, None)
            if piece is not None:
                texts[index] += piece
                is_open = True
    assert texts == alone
    assert_nothing_is_held(engine)


def test_stream_may_be_pulled_from_several_threads_in_turn(engine):
    """Frameworks pull every piece from another worker; nothing belongs to a thread."""
    request = chunk_request(engine, "abc")
    expected = engine.generate(request, SHORT).text
    stream = engine.stream(request, SHORT)
    pools = [ThreadPoolExecutor(max_workers=1) for _ in range(3)]
    pieces = []
    for turn in range(100):
        piece = pools[turn % 3].submit(next, stream, None).result()
        if piece is None:
            break
        pieces.append(piece)
    for pool in pools:
        pool.shutdown()
    assert "".join(pieces) == expected
    assert len(pieces) > 3
    assert_nothing_is_held(engine)


def test_stream_may_be_closed_by_another_thread(engine):
    """Pulled here, closed there."""
    stream = engine.stream(chunk_request(engine, "abc"), BRIEF)
    next(stream)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(stream.close).result()
    assert_nothing_is_held(engine)
    assert stream.completion.finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("at_pass", [0, 1, 3])
def test_stream_ends_when_it_is_closed_while_another_thread_is_in_next(engine, at_pass):
    """A cancelled task closes the stream that its worker is still pulling."""
    num_passes = 0
    is_inside, may_go_on = threading.Event(), threading.Event()

    def pause(*_):
        nonlocal num_passes
        if num_passes == at_pass:
            is_inside.set()
            may_go_on.wait(timeout=10)
        num_passes += 1

    stream = engine.stream(chunk_request(engine, "abc"), LONG)
    handle = engine.loaded.model.register_forward_pre_hook(pause)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pulled = pool.submit(list, stream)
        assert is_inside.wait(timeout=10)
        stream.close()
        may_go_on.set()
        pieces = pulled.result(timeout=10)
    handle.remove()
    assert num_passes == at_pass + 1
    assert len(pieces) <= at_pass + 1
    assert stream.completion.finish_reason is FinishReason.CANCELLED
    assert outcomes(engine) == {Outcome.CANCELLED: 1}
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("prefix_cache_bytes", [0, 1 << 26])
def test_pitfall_27_eight_threads_give_what_serial_requests_give(prefix_cache_bytes):
    """Pitfall 27: different chunk sets at once, stored and missing, equal one after the other."""
    config = EngineConfig(prefix_cache_bytes=prefix_cache_bytes)
    labels = ["a", "b", "c", "ab", "ba", "bc", "cab", "abc"]
    serial = tiny_engine(config=config)
    expected = [serial.generate(chunk_request(serial, each), SHORT).token_ids for each in labels]
    assert len(set(expected)) == 8
    engine = tiny_engine(store=SpyStore(), config=config)

    def run(each):
        return engine.generate(chunk_request(engine, each), SHORT).token_ids

    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in range(2):
            assert list(pool.map(run, labels)) == expected
    assert outcomes(engine) == {Outcome.COMPLETED: 16}
    assert_nothing_is_held(engine)
