"""Streams and threads: errors arrive, consumers leave, and nothing stays behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_pc_rag import ChatPcRag

from tests.support.corpora import CAT, DOG, FISH
from tests.support.engines import scripted
from tests.support.langchain_calls import context_messages


@pytest.fixture
def llm(corpus):
    return ChatPcRag(corpus=corpus, max_tokens=8)


def test_batch_equals_single_calls_when_prompts_differ_in_length(llm):
    """Pitfall 24: a tokenizer without pad token is no obstacle."""
    prompts = ["a", "a longer prompt"]
    single = [llm.invoke(prompt).content for prompt in prompts]
    assert [message.content for message in llm.batch(prompts)] == single


def test_answers_equal_serial_ones_when_eight_threads_ask(corpus):
    """Pitfall 27: requests with different chunks do not meet."""
    llm = ChatPcRag(corpus=corpus, max_tokens=6)
    asked = [
        context_messages(*texts)
        for texts in ((CAT,), (DOG,), (FISH,), (CAT, DOG), (DOG, CAT), (FISH, CAT), (DOG, FISH), ())
    ]
    serial = [llm.invoke(messages).content for messages in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda m: llm.invoke(m).content, asked)) == serial


def test_consumer_gets_the_error_at_once_when_the_model_fails_in_a_stream(corpus, llm):
    """Pitfall 25: the second token's error arrives, and the next request works."""
    with scripted(corpus.engine, "abcdef", fail_at=1):
        stream = llm.stream("Hi")
        assert next(stream).content == "a"
        with pytest.raises(ZeroDivisionError):
            next(stream)
    with scripted(corpus.engine, "fine"):
        assert llm.invoke("Hi").content == "fine"


def test_generation_stops_within_a_token_when_the_consumer_leaves(corpus, llm):
    """Pitfall 26: one request is counted, as cancelled, and nothing stays locked."""
    with scripted(corpus.engine, "a" * 100):
        stream = llm.stream("Hi", max_tokens=100)
        next(stream)
        stream.close()
    total = corpus.engine.stats.snapshot().total
    assert total.requests["cancelled"] == 1
    assert total.num_generated_tokens <= 2
    with scripted(corpus.engine, "next"):
        assert llm.invoke("Hi").content == "next"


def test_new_tokens_are_called_back_when_a_chain_streams(llm):
    """Each piece of text arrives once, by the framework's own callback."""

    class Tokens(BaseCallbackHandler):
        seen = ""

        def on_llm_new_token(self, token, **_):
            self.seen += token

    handler = Tokens()
    text = "".join(chunk.content for chunk in llm.stream("Hi", config={"callbacks": [handler]}))
    assert handler.seen == text
