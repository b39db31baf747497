"""The prefetch brings near what was retrieved, and never stands in a query's way."""

from __future__ import annotations

import pytest
from llama_index.core.schema import TextNode
from llama_index.llms.pc_rag import (
    PcRagLLM,
    PromptCachePrefetch,
    PromptCacheQueryEngine,
)
from pydantic import ValidationError

from pc_rag.corpus import Document
from pc_rag.errors import ConfigError, StoreError
from tests.support.corpora import CAT, DOG, FISH
from tests.support.counted_corpora import counted_corpus, warmings
from tests.support.llama_index_indexes import (
    QUESTION,
    ListRetriever,
    answered,
    chunk_text,
    encode_nodes,
    hits_of,
    labels_of,
    scored,
    text_nodes,
    vector_index,
)


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


@pytest.fixture
def llm(counted):
    return PcRagLLM(corpus=counted.corpus, max_tokens=6)


@pytest.mark.parametrize("is_async", [False, True])
async def test_retrieved_nodes_are_warmed_when_they_pass_the_prefetch(counted, llm, is_async):
    """Texts with their headers are brought near in the background; the nodes pass unchanged."""
    nodes = [*text_nodes(CAT, source="a.txt"), *text_nodes("unknown to the corpus, as yet")]
    encode_nodes(counted.corpus, nodes[:1])
    begun = warmings(counted.corpus)
    given = scored(nodes)
    for prefetch in (PromptCachePrefetch(llm=llm), PromptCachePrefetch(corpus=counted.corpus)):
        if is_async:
            passed = await prefetch.apostprocess_nodes(given, query_str=QUESTION)
        else:
            passed = prefetch.postprocess_nodes(given, query_str=QUESTION)
        assert passed == given
    (texts, future), _ = begun
    assert texts == [f"source: a.txt\n\n{CAT}", "unknown to the corpus, as yet"]
    assert future.result() == 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_warming_begins_before_the_model_is_asked_when_an_engine_is_queried(
    counted, llm, streaming, is_async
):
    """Once a query, with what was retrieved: behind the prompt it would be of no use."""
    engine = PromptCacheQueryEngine.from_index(vector_index(), llm=llm, streaming=streaming)
    begun = warmings(counted.corpus)
    num_begun = []
    plan = counted.corpus.plan

    def planned(*arguments, **keywords):
        num_begun.append(len(begun))
        return plan(*arguments, **keywords)

    counted.corpus.plan = planned
    await answered(engine, is_async=is_async)
    assert num_begun == [1]
    assert sorted(begun[0][0]) == sorted(map(chunk_text, text_nodes()))


def test_the_prefetch_encodes_what_is_missing_when_it_is_told_so(counted):
    """Before it returns, once; a node without text is passed on."""
    prefetch = PromptCachePrefetch(corpus=counted.corpus, encode_missing=True)
    for _ in range(2):
        prefetch.postprocess_nodes(scored(text_nodes(CAT, " ")))
        assert counted.corpus.holds(CAT)
        assert counted.num_encoded == 2


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_query_is_answered_when_the_store_fails_at_what_it_found(counted, llm, is_async):
    """As without the prefetch: what cannot be stored is computed in the prompt, and told."""
    nodes = text_nodes(CAT, DOG)
    engine = PromptCacheQueryEngine.from_retriever(ListRetriever(nodes), llm=llm)
    counted.entries.broken.add("put")
    assert await hits_of(engine, is_async=is_async) == []
    counted.entries.broken.clear()
    assert await hits_of(engine, is_async=is_async) == labels_of(nodes)


async def test_the_query_is_answered_when_others_change_its_document_over_and_over(counted, llm):
    """Another process's ingestion is no fault of the question's."""
    node = TextNode(text=CAT, id_="d")
    counted.corpus.add([Document.of_chunks([DOG], id="d")])
    texts = iter(f"{FISH} It is the fish number {i}." for i in range(100))
    add = counted.corpus.upkeep._add

    def add_late(documents, **options):
        documents = list(documents)
        counted.corpus.add([Document.of_chunks([next(texts)], id="d")])
        return add(documents, **options)

    counted.corpus.upkeep._add = add_late
    engine = PromptCacheQueryEngine.from_retriever(ListRetriever([node]), llm=llm)
    assert await hits_of(engine) == []
    assert next(texts).endswith("8.")  # it was tried eight times


def test_nodes_pass_the_prefetch_when_one_is_too_long_for_any_prompt(counted):
    """Who builds the prompt may split it, or says so better."""
    given = scored(text_nodes("word " * 500, CAT))
    prefetch = PromptCachePrefetch(corpus=counted.corpus, encode_missing=True)
    assert prefetch.postprocess_nodes(given) == given


def test_the_prefetch_says_so_when_its_corpus_is_closed(counted):
    """Not silently cold."""
    prefetch = PromptCachePrefetch(corpus=counted.corpus)
    counted.corpus.close()
    with pytest.raises(StoreError, match="closed"):
        prefetch.postprocess_nodes(scored(text_nodes()))


@pytest.mark.parametrize("has_both", [False, True])
def test_the_prefetch_is_refused_when_its_source_is_not_one(counted, llm, has_both):
    """Neither or both of model and corpus."""
    given = {"llm": llm, "corpus": counted.corpus} if has_both else {}
    with pytest.raises(ConfigError, match="either llm"):
        PromptCachePrefetch(**given)


def test_the_prefetch_is_refused_when_a_setting_is_misspelt(counted):
    """Not ignored: nothing would be encoded, and nobody told."""
    with pytest.raises(ValidationError, match="encode_mising"):
        PromptCachePrefetch(corpus=counted.corpus, encode_mising=True)
