"""Streams and threads: errors arrive, consumers leave, and nothing stays behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_pc_rag import ChatPcRag, PcRagLLM

from pc_rag.corpus import Corpus
from pc_rag.errors import GenerationTimeoutError
from tests.support.corpora import CAT, DOG, FISH, tiny_engine
from tests.support.engines import SpyStore, scripted
from tests.support.langchain_calls import TokenEvents, context_messages, text_of


@pytest.fixture(params=[ChatPcRag, PcRagLLM])
def kind(request):
    return request.param


@pytest.fixture
def llm(kind, corpus):
    return kind(corpus=corpus, max_tokens=8)


def test_batch_equals_single_calls_when_prompts_differ_in_length(llm, corpus):
    """Pitfall 24: a tokenizer without pad token is no obstacle, to any of the answers."""
    assert corpus.engine.loaded.tokenizer.hf_tokenizer.pad_token is None
    prompts = ["a", "a longer prompt", f"Use this: {CAT}"]
    single = [text_of(llm.invoke(prompt)) for prompt in prompts]
    assert [text_of(answer) for answer in llm.batch(prompts)] == single
    assert len(set(single)) == len(prompts)


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_answers_equal_serial_ones_when_eight_threads_ask(llm, way):
    """Pitfall 27: requests with different chunks do not meet."""
    asked = [
        context_messages(*texts)
        for texts in ((CAT,), (DOG,), (FISH,), (CAT, DOG), (DOG, CAT), (FISH, CAT), (DOG, FISH), ())
    ]

    def ask(messages):
        if way == "invoke":
            return text_of(llm.invoke(messages))
        return "".join(text_of(piece) for piece in llm.stream(messages))

    serial = [ask(messages) for messages in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, asked)) == serial


def test_consumer_gets_the_error_at_once_when_the_model_fails_in_a_stream(corpus, llm):
    """Pitfall 25: the second token's error arrives, and the next request works."""
    with scripted(corpus.engine, "abcdef", fail_at=1):
        stream = llm.stream("Hi")
        assert text_of(next(stream)) == "a"
        with pytest.raises(ZeroDivisionError):
            next(stream)
    with scripted(corpus.engine, "fine"):
        assert text_of(llm.invoke("Hi")) == "fine"


def test_everything_comes_back_when_the_consumer_leaves(kind):
    """Pitfall 26: within a token; one request is counted, as cancelled, and nothing is held."""
    store = SpyStore()
    with tiny_engine(store) as engine, Corpus(engine, None, has_retrieval=False) as corpus:
        corpus.add([CAT])
        llm = kind(corpus=corpus, max_tokens=100)
        llm.invoke(CAT, max_tokens=1)
        idle_bytes = engine.runner.pool.idle_bytes
        with scripted(engine, "a" * 100):
            stream = llm.stream(CAT)
            next(stream)
            assert store.num_leased > 0
            stream.close()
        assert store.num_leased == 0
        assert engine.runner.pool.idle_bytes >= idle_bytes > 0
        total = engine.stats.snapshot().total
        assert total.requests["cancelled"] == 1
        assert total.num_generated_tokens <= 3
        with scripted(engine, "next"):
            assert text_of(llm.invoke("Hi")) == "next"


def test_stream_has_ended_when_its_time_is_over(llm, corpus):
    """Nothing comes behind the error, and the request does not go on."""
    stream = llm.stream("Hi", timeout=1e-9)
    with pytest.raises(GenerationTimeoutError):
        next(stream)
    assert list(stream) == []
    assert corpus.engine.stats.snapshot().total.requests["cancelled"] == 1


@pytest.mark.parametrize("way", ["stream", "_stream", "astream", "_astream"])
async def test_token_is_called_back_once_when_a_chain_streams(llm, corpus, way):
    """By whoever is in charge of it: LangChain's core for some, the model for others."""
    events = TokenEvents()
    with scripted(corpus.engine, "abcd"):
        if way == "stream":
            list(llm.stream("Hi", config={"callbacks": [events]}))
        elif way == "astream":
            async for _ in llm.astream("Hi", config={"callbacks": [events]}):
                pass
        else:
            prompt = context_messages() if isinstance(llm, BaseChatModel) else "Hi"
            if way == "_stream":
                manager = RunManager(events)
                list(llm._stream(prompt, run_manager=manager))
            else:
                manager = AsyncRunManager(events)
                async for _ in llm._astream(prompt, run_manager=manager):
                    pass
    assert [token for token in events.tokens if token] == ["a", "b", "c", "d"]


class RunManager:
    """What a model is given to call back by."""

    def __init__(self, events):
        self._events = events

    def on_llm_new_token(self, token, *, chunk):
        assert text_of(chunk.message if hasattr(chunk, "message") else chunk.text) == token
        self._events.on_llm_new_token(token)


class AsyncRunManager(RunManager):
    """Its asynchronous twin."""

    async def on_llm_new_token(self, token, *, chunk):
        super().on_llm_new_token(token, chunk=chunk)


def test_tokens_are_called_back_when_invoke_streams(kind, corpus):
    """``streaming=True`` gives tokens to callbacks from ``invoke`` too."""
    quiet, loud = TokenEvents(), TokenEvents()
    plain, streaming = (
        kind(corpus=corpus, max_tokens=4, streaming=is_on) for is_on in (False, True)
    )
    plain.invoke("Hi", config={"callbacks": [quiet]})
    answer = streaming.invoke("Hi", config={"callbacks": [loud]})
    assert quiet.tokens == []
    assert "".join(loud.tokens) == text_of(answer) == text_of(plain.invoke("Hi"))
