"""Streams and threads: errors arrive, consumers leave, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.pc_rag import PcRagLLM

from tests.support.corpora import CAT, DOG, FISH
from tests.support.engines import scripted
from tests.support.llama_index_calls import (
    STREAMS,
    WAYS,
    ask,
    call,
    heard,
    pieces,
    spans,
    text_of,
)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture(params=STREAMS)
def stream_way(request):
    return request.param


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


async def first_piece(llm, way, prompt, **kwargs):
    """A stream and its first piece."""
    stream = call(llm, way, prompt, **kwargs)
    if way.startswith("a"):
        stream = await stream
        return stream, await anext(stream)
    return stream, next(stream)


async def rest_of(stream):
    return [piece async for piece in stream] if hasattr(stream, "__anext__") else list(stream)


async def close(stream):
    await stream.aclose() if hasattr(stream, "aclose") else stream.close()


# --- errors


async def test_consumer_gets_the_error_at_once_when_the_model_fails(llm, corpus, way):
    """Pitfall 25: the second token's error arrives as it is; the next request works."""
    with heard() as events, scripted(corpus.engine, "abcdef", fail_at=1):
        if "stream" in way:
            stream, first = await first_piece(llm, way, "Hi")
            assert first.delta == "a"
            with pytest.raises(ZeroDivisionError):
                await rest_of(stream)
            (told,) = events.of("ExceptionEvent")
            assert isinstance(told.exception, ZeroDivisionError)
        else:
            with pytest.raises(ZeroDivisionError):
                await ask(llm, way, "Hi")
    assert events.of("PromptCacheEvent") == []
    assert corpus.engine.stats.snapshot().total.requests["failed"] == 1
    with scripted(corpus.engine, "fine"):
        assert text_of(await ask(llm, way, "Hi")) == "fine"


# --- consumers that leave


@pytest.mark.parametrize("how", ["close", "forget"])
async def test_everything_comes_back_when_the_consumer_leaves(spied, stream_way, how):
    """Pitfall 26: within a token, one request, cancelled; also while a handler keeps the error."""
    llm, engine, store = spied
    idle_bytes = engine.runner.pool.idle_bytes
    with heard() as events, scripted(engine, "a" * 100):
        stream, _ = await first_piece(llm, stream_way, CAT)
        assert store.num_leased > 0
        if how == "close":
            await close(stream)
        else:
            del stream
            gc.collect()
            await asyncio.sleep(0)  # asyncio closes forgotten generators in a task
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert store.num_leased == 0
        assert engine.runner.pool.idle_bytes >= idle_bytes > 0
        total = engine.stats.snapshot().total
        assert total.requests["cancelled"] == 1
        assert total.num_requests == 2
        assert total.num_generated_tokens <= 3
    (told,) = events.of("PromptCacheEvent")
    assert told.finish_reason == "cancelled"
    assert told.request_metrics.is_cancelled
    assert events.names.index("PromptCacheEvent") < events.names.index("ExceptionEvent")
    (failed,) = events.of("ExceptionEvent")
    assert isinstance(failed.exception, GeneratorExit)
    assert told.span_id == failed.span_id
    assert not any(name.endswith("EndEvent") for name in events.names)
    with scripted(engine, "next"):
        assert text_of(await ask(llm, stream_way, "Hi")) == "next"


async def test_event_is_told_late_when_the_collector_ends_a_stream(spied, stream_way):
    """Inside a cycle the collector may not take locks: the next request does and tells it."""
    llm, engine, store = spied
    with heard() as events, scripted(engine, "a" * 100):
        stream, _ = await first_piece(llm, stream_way, CAT)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
        for _ in range(5):
            await asyncio.sleep(0)
        await ask(llm, stream_way, "Hi")
    (left, whole) = events.of("PromptCacheEvent")
    assert left.finish_reason == "cancelled" != whole.finish_reason
    assert left.request_metrics.modules
    assert left.span_id == events.events[0].span_id != whole.span_id
    assert store.num_leased == 0


async def test_nothing_is_computed_when_a_stream_is_never_pulled(llm, corpus, stream_way):
    """The prefill starts at the first piece."""
    stream = call(llm, stream_way, "Hi")
    if stream_way.startswith("a"):
        stream = await stream
    assert corpus.engine.stats.snapshot().total.num_requests == 0
    await close(stream)
    assert await rest_of(stream) == []
    assert corpus.engine.stats.snapshot().total.num_requests == 0


async def test_one_event_is_told_when_the_last_piece_is_not_fetched(llm, corpus, stream_way):
    """All the text came; who stops there has one request, and one event."""
    with heard() as events, scripted(corpus.engine, "ab"):
        stream, _ = await first_piece(llm, stream_way, "Hi")
        await (anext(stream) if stream_way.startswith("a") else asyncio.to_thread(next, stream))
        await close(stream)
    assert len(events.of("PromptCacheEvent")) == 1
    assert corpus.engine.stats.snapshot().total.num_requests == 1


# --- events


async def test_events_come_in_order_when_a_call_ends(llm, way):
    """Pitfall 32: start, pieces, what the cache gave, end; all in the span of the call."""
    with heard() as events, spans() as ended:
        said = await pieces(llm, way, CAT)
    kind = "LLMCompletion" if "complete" in way else "LLMChat"
    num_pieces = len(said) if "stream" in way else 0
    names = events.names
    assert names[0] == f"{kind}StartEvent"
    assert names.count(f"{kind}InProgressEvent") == num_pieces
    assert names.count("PromptCacheEvent") == 1
    assert names[-1] == f"{kind}EndEvent"
    assert len(names) == 3 + num_pieces
    told = events.of("PromptCacheEvent")[0]
    (span,) = ended.completed_spans
    assert {event.span_id for event in events.events} == {span.id_}
    assert span.id_.startswith(f"PcRagLLM.{way}-")
    assert told.model_name == llm.model
    assert told.metrics == said[-1].raw["pc_rag"]
    assert told.finish_reason == said[-1].raw["finish_reason"]
    assert events.events[-1].response.raw == said[-1].raw


async def test_event_of_the_start_says_the_call_when_arguments_are_given(llm, way):
    """Prompt and settings are the caller's."""
    with heard() as events:
        await ask(llm, way, "Hi", max_tokens=3)
    start = events.events[0]
    assert start.additional_kwargs["max_tokens"] == 3
    if "chat" in way:
        assert [message.content for message in start.messages] == ["Hi"]
    else:
        assert start.prompt == "Hi"
    assert start.model_dict["model_name"] == llm.model


# --- threads


@pytest.mark.parametrize("way", ["complete", "stream_chat"])
def test_answers_equal_serial_ones_when_eight_threads_ask(llm, way):
    """Pitfall 27: requests with different chunks do not meet."""
    texts = ((CAT,), (DOG,), (FISH,), (CAT, DOG), (DOG, CAT), (FISH, CAT), (DOG, FISH), ())
    prompts = ["\n\n".join([*each, "What?"]) for each in texts]

    def answer(prompt):
        begun = call(llm, way, prompt)
        return text_of(begun if way == "complete" else list(begun)[-1])

    serial = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, prompts)) == serial
    assert len(set(serial)) > 1


def test_stream_goes_on_when_each_piece_is_pulled_by_another_thread(llm):
    """Frameworks do: nothing in a stream belongs to one thread."""
    expected = text_of(llm.complete(CAT))
    for stream in (llm.stream_complete(CAT), llm.stream_chat([ChatMessage(content=CAT)])):
        said = []
        while True:
            with ThreadPoolExecutor(1) as pool:
                piece = pool.submit(next, stream, None).result()
            if piece is None:
                break
            said.append(piece)
        assert text_of(said[-1]) == expected


def test_requests_are_right_when_two_streams_are_pulled_in_turn(llm):
    """One generation does not end where another begins."""
    expected = [text_of(llm.complete(text)) for text in (CAT, DOG)]
    streams = [llm.stream_complete(text) for text in (CAT, DOG)]
    said = [[], []]
    for pair in zip(*streams, strict=False):
        for kept, piece in zip(said, pair, strict=True):
            kept.append(piece)
    for kept, stream in zip(said, streams, strict=True):
        kept.extend(stream)
    assert [text_of(kept[-1]) for kept in said] == expected
