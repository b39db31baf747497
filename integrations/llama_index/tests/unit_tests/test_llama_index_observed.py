"""The handlers on our own model: what they tell agrees with what the engine counted."""

from __future__ import annotations

import gc

import pytest
from llama_index.core import PromptHelper
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.llms.pc_rag import (
    CacheHitEventHandler,
    CallOutcome,
    DocumentOutcome,
    PcRagLLM,
    TTFTEventHandler,
)
from pydantic import BaseModel

from pc_rag.errors import GenerationError
from pc_rag.metrics import Outcome
from pc_rag.types import MissReason
from tests.support.corpora import CAT, DOG, TEXTS, opened
from tests.support.llama_index_queries import EventList, ask, engine_of, nodes_of

UNKNOWN = "Nobody ever indexed this sentence about a kettle."


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add(TEXTS)
        yield corpus


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=6)


@pytest.fixture
def handlers():
    with CacheHitEventHandler() as hits, TTFTEventHandler() as times:
        yield hits, times


def fates(run):
    return {each.source: each.outcome for each in run.documents}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_hits_are_the_engines_when_a_query_ran(llm, handlers, corpus, streaming, is_async):
    """Tokens, hits and tokens read are the same on both sides (pitfalls 29, 32)."""
    hits, times = handlers
    engine = engine_of(llm, nodes_of(CAT, UNKNOWN, DOG), streaming=streaming)
    await ask(engine, is_async=is_async)
    (run,), counted = hits.runs, corpus.engine.stats.snapshot().total
    assert fates(run) == {
        "The": DocumentOutcome.HIT,
        "Nobody": DocumentOutcome.NOT_INDEXED,
        "A": DocumentOutcome.HIT,
    }
    assert run.num_cache_read_tokens == counted.num_cache_read_tokens > 0
    assert hits.snapshot().total.module_hits == counted.module_hits
    assert run.ttft_seconds == counted.ttft.max_seconds
    (timed,) = times.runs
    (call,) = timed.calls
    assert call.num_output_tokens == counted.num_generated_tokens
    assert call.is_streamed is streaming
    assert call.ttft_seconds >= run.ttft_seconds - 1e-6
    assert timed.ttft_seconds >= call.ttft_seconds


@pytest.mark.parametrize("is_async", [False, True])
async def test_events_are_complete_when_a_query_streams(llm, handlers, is_async):
    """Start, pieces, metrics, end, each once but pieces; tokens are counted (pitfall 32)."""
    counter = TokenCountingHandler()
    engine = engine_of(
        llm, nodes_of(CAT), streaming=True, callback_manager=CallbackManager([counter])
    )
    with EventList() as events:
        await ask(engine, is_async=is_async)
    names = events.names("LLMChat", "LLMCompletion", "PromptCache", "Exception")
    kinds = [name.removeprefix("LLMChat").removeprefix("LLMCompletion") for name in names]
    num_pieces = len(kinds) - 4
    assert num_pieces >= 1
    assert kinds == [  # the last piece has the numbers, so they are told before it
        "StartEvent",
        *["InProgressEvent"] * num_pieces,
        "PromptCacheEvent",
        "InProgressEvent",
        "EndEvent",
    ]
    assert counter.total_llm_token_count > 0
    assert handlers[0].calls[CallOutcome.REPORTED] == 1


def test_request_is_cancelled_on_both_sides_when_the_consumer_leaves(llm, handlers, corpus):
    """One request here, one there, and neither a failure (pitfall 26)."""
    hits, times = handlers
    with EventList() as events:
        response = engine_of(llm, nodes_of(CAT), streaming=True).query("?")
        next(response.response_gen)
        response.response_gen.close()
        gc.collect()
    names = events.names("LLMChat", "LLMCompletion", "PromptCache", "Exception")
    assert [name.endswith("StartEvent") for name in names] == [True] + [False] * (len(names) - 1)
    assert names.count("ExceptionEvent") == names.count("PromptCacheEvent") == 1
    assert corpus.engine.stats.snapshot().total.requests[Outcome.CANCELLED] == 1
    assert hits.snapshot().total.requests[Outcome.CANCELLED] == 1
    assert hits.calls[CallOutcome.CANCELLED] == 1
    assert times.snapshot()[0].calls[Outcome.CANCELLED] == 1
    assert fates(hits.last_run) == {"The": DocumentOutcome.HIT}
    assert llm.complete("Is anything locked?").text  # nothing is


def test_reasons_are_named_when_reuse_is_off(corpus, handlers):
    """The uncached arm misses everything, and says why (pitfall 34)."""
    hits, _ = handlers
    llm = PcRagLLM(corpus=corpus, max_tokens=2, reuse=False)
    engine_of(llm, nodes_of(CAT, DOG)).query("?")
    assert {each.miss_reason for each in hits.last_run.documents} == {MissReason.REUSE_OFF}
    assert "reuse-off: the request asked for the uncached arm" in hits.report()


class Place(BaseModel):
    """Longer than the few tokens that a call may take."""

    name: str
    is_city: bool


def test_hits_are_counted_when_only_the_parser_behind_the_model_fails(llm, handlers, corpus):
    """The request ended well, in the engine's sums too; the call around it failed."""
    hits, _ = handlers
    engine = engine_of(llm.as_structured_llm(Place), nodes_of(CAT))
    with pytest.raises(GenerationError, match="does not fit Place"):
        engine.query("?")
    told, counted = hits.snapshot().total, corpus.engine.stats.snapshot().total
    assert hits.calls[CallOutcome.FAILED] == sum(hits.calls.values()) == 1
    assert told.requests == counted.requests
    assert told.module_hits == counted.module_hits
    assert fates(hits.last_run) == {"The": DocumentOutcome.HIT}


def test_node_is_partial_when_compact_split_it(llm, handlers, corpus):
    """A chunk that is spread over calls is no hit and no miss, and says why (pitfall 38)."""
    hits, _ = handlers
    text = " ".join(f"Sentence {index} is about the ferry number {index}." for index in range(4))
    corpus.add([text])
    helper = PromptHelper(context_window=4096, num_output=6, chunk_size_limit=30)
    engine_of(llm, nodes_of(text), prompt_helper=helper).query("?")
    (document,) = hits.last_run.documents
    assert hits.last_run.calls[CallOutcome.REPORTED] > 1
    assert document.outcome is DocumentOutcome.PARTIAL
    assert document.miss_reason is MissReason.SPLIT
    assert "partial (split)" in hits.report()
