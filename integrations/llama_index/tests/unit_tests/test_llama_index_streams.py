"""Streams, event loops and threads: errors arrive, consumers leave, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import TextNode
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.corpus import Corpus
from pc_rag.serving import host as hosts
from tests.support.corpora import CAT, DOG, FISH, recorded, tiny_engine
from tests.support.engines import SpyStore, scripted
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

WAIT_SECONDS = 10
"""Longest wait for something that happens at once, unless it is broken."""
ASYNC_WAYS = tuple(way for way in WAYS if way.startswith("a"))


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture(params=STREAMS)
def stream_way(request):
    return request.param


@pytest.fixture(params=ASYNC_WAYS)
def async_way(request):
    return request.param


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


@pytest.fixture
def spied():
    """A model over a store that knows open leases, used once."""
    store = SpyStore()
    with tiny_engine(store) as engine, Corpus(engine, None, has_retrieval=False) as corpus:
        corpus.add([CAT])
        llm = PcRagLLM(corpus=corpus, max_tokens=100)
        llm.complete(CAT, max_tokens=1)
        yield llm, engine, store


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


# --- cancelled tasks


class SlowToken:
    """A model whose tokens wait to be let go."""

    def __init__(self, engine):
        self.engine, self.entered, self.go_on = engine, threading.Event(), threading.Event()
        self.counted = threading.Event()

    def __enter__(self):
        def slow(_module, _args, output):
            self.entered.set()
            self.go_on.wait(WAIT_SECONDS)
            return output

        record = self.engine.stats.record

        def recording(metrics):
            record(metrics)
            self.counted.set()

        self.engine.stats.record = recording
        self.handle = self.engine.loaded.model.register_forward_hook(slow)
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.handle.remove()


async def test_generation_stops_when_a_task_is_cancelled_within_a_token(spied, async_way):
    """Pitfall 29: the task ends as a cancelled one at once; all is released after the token."""
    llm, engine, store = spied
    with heard() as events, SlowToken(engine) as slow:
        task = asyncio.create_task(ask(llm, async_way, CAT, max_tokens=500))
        await asyncio.to_thread(slow.entered.wait, WAIT_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.go_on.set()
        assert await asyncio.to_thread(slow.counted.wait, WAIT_SECONDS)
        for _ in range(100):
            if events.of("PromptCacheEvent"):
                break
            await asyncio.sleep(0.01)
    total = engine.stats.snapshot().total
    assert total.requests["cancelled"] == 1
    assert total.num_generated_tokens <= 3
    assert store.num_leased == 0
    (told,) = events.of("PromptCacheEvent")
    assert told.finish_reason == "cancelled"
    with scripted(engine, "next"):
        assert text_of(await ask(llm, async_way, "Hi")) == "next"


async def test_call_is_given_up_when_its_task_is_cancelled_at_the_beginning(llm, corpus, async_way):
    """While a thread tokenises the prompt: nothing is generated, and the next call works."""
    entered, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    begin = corpus.stream_prompt

    def slow(*args, **kwargs):
        entered.set()
        go_on.wait(WAIT_SECONDS)
        stream = begin(*args, **kwargs)
        close_stream = stream.close

        def noted():
            close_stream()
            closed.set()

        stream.close = noted
        return stream

    corpus.stream_prompt = slow
    task = asyncio.create_task(ask(llm, async_way, "Hi"))
    await asyncio.to_thread(entered.wait, WAIT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(closed.wait, WAIT_SECONDS)
    assert corpus.engine.stats.snapshot().total.num_generated_tokens == 0
    corpus.stream_prompt = begin
    assert text_of(await ask(llm, async_way, "Hi")) != ""


async def test_task_times_out_when_a_token_takes_long(llm, corpus, async_way):
    """``asyncio.timeout`` gets its own error, not ours."""
    with SlowToken(corpus.engine) as slow:

        async def run():
            async with asyncio.timeout(None) as limit:
                task = asyncio.ensure_future(asyncio.to_thread(slow.entered.wait, WAIT_SECONDS))
                task.add_done_callback(
                    lambda _: limit.reschedule(asyncio.get_running_loop().time())
                )
                await ask(llm, async_way, "Hi")

        with pytest.raises(TimeoutError):
            await run()


# --- the event loop


async def test_loop_goes_on_when_two_answers_are_computed(llm, async_way):
    """Pitfall 28: a ticker ticks while the model computes."""
    ticks = 0
    done = asyncio.Event()

    async def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await asyncio.gather(*(ask(llm, async_way, CAT, max_tokens=30) for _ in range(2)))
    done.set()
    await ticker
    assert ticks > 30


@pytest.fixture
def waits_for_the_loop():
    """Makes a function wait until the event loop has run meanwhile."""

    def waiting(function):
        loop = asyncio.get_running_loop()

        def wait_first(*args, **kwargs):
            has_run = threading.Event()
            loop.call_soon_threadsafe(has_run.set)
            if not has_run.wait(WAIT_SECONDS):
                pytest.fail("the event loop was blocked")
            return function(*args, **kwargs)

        return wait_first

    return waiting


async def test_loop_goes_on_when_the_model_is_loaded(
    tiny_folder, async_way, waits_for_the_loop, monkeypatch
):
    """Pitfall 28: the first call opens it, tokenizer and configuration too."""
    for name in ("load_model", "load_tokenizer", "load_max_position"):
        monkeypatch.setattr(hosts, name, waits_for_the_loop(getattr(hosts, name)))
    with PcRagLLM(model=str(tiny_folder), max_tokens=2) as llm:
        assert text_of(await ask(llm, async_way, "Hi")) != ""


async def test_loop_goes_on_when_a_prompt_is_planned(llm, corpus, async_way, waits_for_the_loop):
    """Tokenising and recognising a long prompt takes time that the loop does not lose."""
    corpus.stream_prompt = waits_for_the_loop(corpus.stream_prompt)
    assert text_of(await ask(llm, async_way, "Hi")) != ""


async def test_loop_goes_on_when_a_token_is_computed(llm, corpus, async_way, waits_for_the_loop):
    """Each forward pass runs in a thread."""
    identity = waits_for_the_loop(lambda _module, _args, output: output)
    handle = corpus.engine.loaded.model.register_forward_hook(identity)
    try:
        assert text_of(await ask(llm, async_way, "Hi", max_tokens=2)) != ""
    finally:
        handle.remove()


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


# --- query engines


def query_engine(llm, **options):
    nodes = [TextNode(text=text) for text in (CAT, DOG, FISH)]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    return index.as_query_engine(llm=llm, similarity_top_k=3, **options)


async def test_query_streams_to_its_end_when_an_event_loop_asks(llm, corpus):
    """Pitfall 29: it neither hangs nor blocks, and answers as the synchronous one."""
    engine = query_engine(llm, streaming=True)
    expected = str(engine.query("Where did the cat sit?"))
    with recorded(corpus.engine) as requests, heard() as events:
        async with asyncio.timeout(60):
            response = await engine.aquery("Where did the cat sit?")
            tokens = [token async for token in response.async_response_gen()]
    assert "".join(tokens) == expected != ""
    assert len(requests) == len(events.of("PromptCacheEvent")) == 1
    assert "LLMChatInProgressEvent" in events.names


async def test_query_can_be_left_when_an_event_loop_asks(llm, corpus):
    """Pitfall 29: a consumer who stops listening leaves nothing locked."""
    engine = query_engine(llm, streaming=True)
    response = await engine.aquery("What?")
    stream = response.async_response_gen()
    await anext(stream)
    await stream.aclose()
    del response, stream
    gc.collect()
    for _ in range(5):
        await asyncio.sleep(0)
    assert text_of(await llm.acomplete("Hi")) != ""
    stats = corpus.engine.stats.snapshot().total
    assert stats.num_requests == 2


async def whole_answer(engine, question):
    """The answer of an engine, to the end of its stream."""
    response = await engine.aquery(question)
    if hasattr(response, "async_response_gen"):
        return "".join([token async for token in response.async_response_gen()])
    return str(response)


async def test_query_raises_when_the_model_fails(llm, corpus):
    """Pitfall 25: the model's error, not an empty response."""
    for streaming in (False, True):
        engine = query_engine(llm, streaming=streaming)
        with scripted(corpus.engine, "abc", fail_at=0), pytest.raises(ZeroDivisionError):
            str(engine.query("What?"))
        with scripted(corpus.engine, "abc", fail_at=0), pytest.raises(ZeroDivisionError):
            await whole_answer(engine, "What?")


def test_callbacks_go_to_each_engine_when_two_share_a_model(llm):
    """Synthesizers put their callback manager onto the model; answers stay the same."""
    first, second = query_engine(llm), query_engine(llm)
    expected = str(first.query("What?"))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda e: str(e.query("What?")), [first, second] * 2))
    assert answers == [expected] * 4
