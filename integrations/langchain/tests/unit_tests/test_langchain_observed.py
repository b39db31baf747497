"""The handlers on our own models: what they tell agrees with what the engine counted."""

from __future__ import annotations

import asyncio
import gc

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_pc_rag import (
    CacheHitHandler,
    CallOutcome,
    ChatPcRag,
    DocumentOutcome,
    PcRagLLM,
    TTFTHandler,
    compare_chains,
    format_chunks,
)

from pc_rag.corpus import chunk_id_of
from pc_rag.metrics import Outcome
from tests.support.corpora import CAT, DOG, TEXTS
from tests.support.langchain_models import ListRetriever

UNKNOWN = "Nobody ever indexed this sentence about a kettle."
PROMPT = ChatPromptTemplate.from_template("{context}\n\n{question}")
QUESTION = "Where did the cat sit, and what did the dog bark at when the trains went by?"


@pytest.fixture(params=[ChatPcRag, PcRagLLM])
def llm(request, corpus):
    return request.param(corpus=corpus, max_tokens=8)


@pytest.fixture
def handlers():
    return CacheHitHandler(), TTFTHandler()


def joined(documents):
    return "\n\n".join(each.page_content for each in documents)


def chain_of(model, *texts):
    retrieved = ListRetriever(texts=texts or (CAT, DOG)) | joined
    return {"context": retrieved, "question": RunnablePassthrough()} | PROMPT | model


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
async def test_hits_are_the_engines_when_a_chain_ran(llm, handlers, corpus, way):
    """Tokens, hits and savings are the same on both sides, and documents are found by text."""
    chain, config = chain_of(llm, CAT, UNKNOWN, DOG), {"callbacks": list(handlers)}
    hits, times = handlers
    for _ in range(2):  # savings are known once the rate is; the first pass does not count
        corpus.engine._machinery.prefill_rate.record(300, 0.5, num_context_tokens=0)
    if way == "invoke":
        await asyncio.to_thread(chain.invoke, QUESTION, config)
    elif way == "stream":
        list(chain.stream(QUESTION, config))
    elif way == "ainvoke":
        await chain.ainvoke(QUESTION, config)
    else:
        async for _ in chain.astream(QUESTION, config):
            pass
    run, counted = hits.last_run, corpus.engine.stats.snapshot().total
    assert [each.outcome for each in run.documents] == [
        DocumentOutcome.HIT,
        DocumentOutcome.NOT_INDEXED,
        DocumentOutcome.HIT,
    ]
    assert run.num_cache_read_tokens == counted.num_cache_read_tokens > len(CAT)
    assert run.saved_seconds == pytest.approx(counted.saved_seconds) != 0
    assert (run.num_known_savings, run.num_unknown_savings) == (1, 0)
    assert hits.snapshot().total.module_hits == counted.module_hits
    assert run.ttft_seconds == counted.ttft.max_seconds
    (call,) = times.last_run.calls
    assert call.num_output_tokens == counted.num_generated_tokens
    assert call.is_streamed is ("stream" in way)
    assert call.ttft_seconds >= run.ttft_seconds - 1e-6
    assert times.last_run.ttft_seconds >= call.ttft_seconds


def test_request_is_cancelled_on_both_sides_when_the_consumer_leaves(llm, handlers, corpus):
    """One request here, one there, and neither a failure."""
    hits, times = handlers
    stream = chain_of(llm).stream(QUESTION, {"callbacks": list(handlers)})
    next(stream)
    stream.close()
    gc.collect()
    assert corpus.engine.stats.snapshot().total.requests[Outcome.CANCELLED] == 1
    assert hits.calls[CallOutcome.CANCELLED] == 1
    assert times.snapshot()[0].calls[Outcome.CANCELLED] == 1


def test_reasons_are_named_when_reuse_is_off(llm, handlers):
    """The uncached arm misses everything, and says why."""
    hits, _ = handlers
    chain_of(llm.bind(reuse=False)).invoke(QUESTION, {"callbacks": [hits]})
    assert hits.last_run.module_hit_rate == 0
    assert "reuse-off: the request asked for the uncached arm" in hits.report()


def test_arms_are_compared_when_one_of_them_reuses(llm):
    """The swap script on one model: the same answers, hits on one side only."""
    comparison = compare_chains(
        chain_of, TEXTS[:2], baseline=llm.bind(reuse=False), candidate=llm, rounds=2
    )
    assert comparison.hit_rate == 1.0
    assert comparison.ttft_ratio > 0
    uses = [each.run.num_module_hits for each in comparison.samples if each.arm == "baseline"]
    assert set(uses) == {0}


SHORT_NOTE = "Bring boots."
"""Fewer characters than a text needs to be recognised."""


@pytest.mark.parametrize(
    "case",
    [
        ((UNKNOWN,), [DocumentOutcome.NOT_INDEXED], "not indexed"),
        ((SHORT_NOTE,), [DocumentOutcome.TOO_SHORT], "too short to be recognised"),
        (
            (CAT, SHORT_NOTE),
            [DocumentOutcome.HIT, DocumentOutcome.TOO_SHORT],
            "too short to be recognised",
        ),
    ],
)
def test_rate_is_explained_when_texts_are_unknown_or_too_short(llm, corpus, handlers, case):
    """Pitfall 34: nothing to hit is no rate of zero, and each document's place is named."""
    texts, outcomes, told = case
    hits, _ = handlers
    corpus.add([SHORT_NOTE])
    chain_of(llm, *texts).invoke(QUESTION, {"callbacks": [hits]})
    assert [each.outcome for each in hits.last_run.documents] == outcomes
    assert hits.last_run.module_hit_rate == (1.0 if CAT in texts else None)
    assert told in hits.report()


def test_short_text_is_a_hit_when_its_block_names_it(corpus, handlers):
    """Pitfall 34: a named chunk needs no recognising, so only the unknown text is left out."""
    hits, _ = handlers
    corpus.add([SHORT_NOTE])
    blocks = format_chunks([Document(SHORT_NOTE), Document(UNKNOWN)])
    llm = ChatPcRag(corpus=corpus, max_tokens=1)
    llm.invoke([HumanMessage(blocks)], {"callbacks": [hits]})
    known = chunk_id_of(SHORT_NOTE)
    found = {use.label: use.is_hit for use in hits.last_run.modules if use.label != "(prefix)"}
    assert found == {known: True}
