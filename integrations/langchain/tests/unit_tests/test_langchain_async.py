"""Calls from an event loop: the same answers, and the loop goes on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
from langchain_pc_rag import ChatPcRag, PcRagLLM

from pc_rag.corpus import Corpus
from pc_rag.errors import ConfigError
from pc_rag.serving import host as hosts
from pc_rag.types import MissReason
from tests.support.corpora import CAT, tiny_engine
from tests.support.engines import SpyStore, scripted
from tests.support.langchain_calls import QUESTION, text_of

WAIT_SECONDS = 10
"""Longest wait for something that happens at once, unless it is broken."""


@pytest.fixture(params=[ChatPcRag, PcRagLLM])
def kind(request):
    return request.param


@pytest.fixture
def llm(kind, corpus):
    return kind(corpus=corpus, max_tokens=8)


@pytest.fixture(params=["ainvoke", "astream", "abatch"])
def ask(request):
    """One of the asynchronous ways to an answer's text."""

    async def ask_by(llm, prompt, **settings):
        if request.param == "ainvoke":
            return text_of(await llm.ainvoke(prompt, **settings))
        if request.param == "abatch":
            (answer,) = await llm.abatch([prompt], **settings)
            return text_of(answer)
        return "".join([text_of(piece) async for piece in llm.astream(prompt, **settings)])

    return ask_by


async def test_async_answers_equal_sync_ones_when_the_prompt_is_the_same(llm, ask):
    """However one asks, there is one answer."""
    assert await ask(llm, QUESTION) == text_of(llm.invoke(QUESTION)) != ""


@pytest.mark.parametrize("how", ["call", "bind", "constructor"])
async def test_stop_cuts_when_an_async_call_has_one(kind, corpus, ask, how):
    """Pitfall 18: at the first occurrence, across tokens, and the nearer setting wins."""
    stop = ["\nUser:"]
    llm = kind(corpus=corpus, stop=stop if how == "constructor" else ["o"])
    if how == "bind":
        llm = llm.bind(stop=stop)
    with scripted(corpus.engine, "Hello\nUser: more\nUser: again"):
        answer = await ask(llm, "Hi", **({"stop": stop} if how == "call" else {}))
    assert answer == "Hello"


async def test_false_start_of_a_stop_is_released_when_it_goes_on_otherwise(kind, corpus, ask):
    """Pitfall 18: what only began like a stop string is part of the answer."""
    llm = kind(corpus=corpus, stop=["\nUser:"])
    with scripted(corpus.engine, "Hello\nUsers like it"):
        assert await ask(llm, "Hi") == "Hello\nUsers like it"


async def test_answer_is_short_when_an_async_call_allows_few_tokens(kind, corpus, ask):
    """Pitfall 22: at most as many tokens as asked for."""
    llm = kind(corpus=corpus, max_tokens=50)
    with scripted(corpus.engine, "abcdefgh"):
        assert await ask(llm, "Hi", max_tokens=3) == "abc"
    assert corpus.engine.stats.snapshot().total.num_generated_tokens == 3


async def test_settings_reach_the_engine_when_an_async_call_gives_them(kind, corpus, ask):
    """No way drops what it does not know: template, arm, sampling; and unknown names are errors."""
    llm = kind(corpus=corpus, max_tokens=20)
    settings = {"temperature": 5.0, "seed": 1, "template": "mail", "reuse": False}
    expected = text_of(llm.invoke(CAT, **settings))
    assert await ask(llm, CAT, **settings) == expected
    (group,) = corpus.engine.stats.snapshot().groups
    assert (group.template, group.num_requests) == ("mail", 2)
    assert group.module_misses[MissReason.REUSE_OFF] == 2
    with pytest.raises(ConfigError, match="temprature=1 is not a setting"):
        await ask(llm, "Hi", temprature=1)


async def test_loop_goes_on_when_two_answers_are_computed(llm):
    """Pitfall 28: a ticker ticks while the model computes."""
    ticks = 0
    done = asyncio.Event()

    async def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await asyncio.gather(*(llm.ainvoke(QUESTION, max_tokens=30) for _ in range(2)))
    done.set()
    await ticker
    assert ticks > 30


async def test_loop_goes_on_when_a_prompt_is_planned(llm, corpus, ask, waits_for_the_loop):
    """Tokenising and recognising a long prompt takes time that the loop does not lose."""
    corpus.stream_prompt = waits_for_the_loop(corpus.stream_prompt)
    assert await ask(llm, QUESTION) != ""


async def test_loop_goes_on_when_the_model_is_loaded(
    kind, tiny_folder, ask, waits_for_the_loop, monkeypatch
):
    """The first call opens it."""
    monkeypatch.setattr(hosts, "load_model", waits_for_the_loop(hosts.load_model))
    with kind(model=str(tiny_folder), max_tokens=2) as llm:
        assert await ask(llm, QUESTION) != ""


async def test_loop_goes_on_when_a_token_is_computed(llm, corpus, ask, waits_for_the_loop):
    """Each forward pass runs in a thread."""
    identity = waits_for_the_loop(lambda _module, _args, output: output)
    handle = corpus.engine.loaded.model.register_forward_hook(identity)
    try:
        assert await ask(llm, QUESTION, max_tokens=2) != ""
    finally:
        handle.remove()


async def test_consumer_gets_the_error_at_once_when_the_model_fails_in_an_async_stream(llm, corpus):
    """Pitfall 25: the second token's error arrives, and the next request works."""
    with scripted(corpus.engine, "abcdef", fail_at=1):
        stream = llm.astream("Hi")
        assert text_of(await anext(stream)) == "a"
        with pytest.raises(ZeroDivisionError):
            await anext(stream)
    with scripted(corpus.engine, "fine"):
        assert text_of(await llm.ainvoke("Hi")) == "fine"


async def test_generation_stops_when_a_task_is_cancelled(llm, corpus):
    """Pitfall 26: a cancelled ``ainvoke`` does not go on computing in its thread."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(_module, _args, output):
        entered.set()
        go_on.wait(WAIT_SECONDS)
        return output

    counted = threading.Event()
    stats, record = corpus.engine.stats, corpus.engine.stats.record

    def recording(metrics):
        record(metrics)
        counted.set()

    stats.record = recording
    handle = corpus.engine.loaded.model.register_forward_hook(slow)
    try:
        task = asyncio.create_task(llm.ainvoke("Hi", max_tokens=500))
        await asyncio.to_thread(entered.wait, WAIT_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert await asyncio.to_thread(counted.wait, WAIT_SECONDS)
    finally:
        handle.remove()
    total = stats.snapshot().total
    assert total.requests["cancelled"] == total.num_requests == 1
    assert total.num_generated_tokens <= 2


async def test_everything_comes_back_when_an_async_consumer_leaves(kind):
    """Pitfall 26: the request is one that was cancelled; leases and buffers are free again."""
    store = SpyStore()
    with tiny_engine(store) as engine, Corpus(engine, None, has_retrieval=False) as corpus:
        corpus.add([CAT])
        llm = kind(corpus=corpus, max_tokens=100)
        llm.invoke(CAT, max_tokens=1)
        idle_bytes = engine.runner.pool.idle_bytes
        with scripted(engine, "a" * 100):
            async with aclosing(llm.astream(CAT)) as stream:
                async for _ in stream:
                    assert store.num_leased > 0
                    break
        assert store.num_leased == 0
        assert engine.runner.pool.idle_bytes >= idle_bytes > 0
        assert engine.stats.snapshot().total.requests["cancelled"] == 1
        with scripted(engine, "next"):
            assert text_of(await llm.ainvoke("Hi")) == "next"
