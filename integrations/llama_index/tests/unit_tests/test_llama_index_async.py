"""Calls from an event loop: it goes on, tasks are cancelled, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import TextNode
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.serving import host as hosts
from tests.support.corpora import CAT, DOG, FISH, recorded
from tests.support.engines import scripted
from tests.support.llama_index_calls import (
    WAYS,
    ask,
    heard,
    text_of,
)

WAIT_SECONDS = 10
"""Longest wait for something that happens at once, unless it is broken."""
ASYNC_WAYS = tuple(way for way in WAYS if way.startswith("a"))


@pytest.fixture(params=ASYNC_WAYS)
def async_way(request):
    return request.param


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=8)


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


# --- query engines


def query_engine(llm, **options):
    # Identifiers settle the order of nodes that are equally near, as all of them are here.
    nodes = [TextNode(id_=str(i), text=text) for i, text in enumerate((CAT, DOG, FISH))]
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
