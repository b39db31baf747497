from __future__ import annotations

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_pc_rag import CacheHitHandler, ChatPcRag, DocumentOutcome, PromptCacheVectorStore

from pc_rag.corpus import chunk_id_of
from pc_rag.types import MissReason
from tests.support.corpora import CAT, DOG, TEXTS, loaded_model, opened, recorded
from tests.support.langchain_stores import counted_corpus, word_store

QUESTION = "Who sat on the mat?"
HEADER = "file: {source}, modified: {date}\n{page_content}"


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


@pytest.fixture
def store(counted):
    store = PromptCacheVectorStore(word_store(), counted.corpus)
    store.add_documents(_files("2020-01-01"))
    return store


def _files(date):
    """What a loader of a folder makes, with a header's worth of metadata."""
    return [
        Document(page_content=text, metadata={"source": f"{i}.txt", "date": date}, id=str(i))
        for i, text in enumerate(TEXTS)
    ]


def _chain(store, document_prompt="{page_content}", separator="\n\n", k=3, llm=None):
    """LangChain's retrieval chain over a store, with a tiny model."""
    stuff = create_stuff_documents_chain(
        llm or ChatPcRag(corpus=store.corpus, max_tokens=4),
        ChatPromptTemplate.from_messages([("system", "Use: {context}"), ("human", "{input}")]),
        document_prompt=PromptTemplate.from_template(document_prompt),
        document_separator=separator,
    )
    return create_retrieval_chain(store.as_retriever(search_kwargs={"k": k}), stuff)


def _asked(chain, corpus):
    """What a handler reports of a run, and the prompt that reached the engine."""
    handler = CacheHitHandler()
    with recorded(corpus.engine) as requests:
        chain.invoke({"input": QUESTION}, {"callbacks": [handler]})
    (request,) = requests
    return handler.last_run, corpus.engine.loaded.tokenizer.decode(request.plan.token_ids)


def test_usage_callback_sees_tokens_when_a_retrieval_chain_runs(counted, store):
    """Pitfall 31: the callback around the chain has the prompt's tokens, and those that were read.

    Read are the chunks at least: a byte is a token of the tiny model.
    """
    chain = _chain(store)
    num_encoded = counted.num_encoded
    with recorded(counted.corpus.engine) as requests, get_usage_metadata_callback() as usage:
        answer = chain.invoke({"input": QUESTION})
    assert {d.page_content for d in answer["context"]} == set(TEXTS)
    (spent,) = usage.usage_metadata.values()
    assert list(usage.usage_metadata) == [counted.corpus.engine.loaded.name]
    assert spent["input_tokens"] == requests[0].plan.num_tokens
    assert 0 < spent["output_tokens"] <= 4
    assert spent["total_tokens"] == spent["input_tokens"] + spent["output_tokens"]
    details = spent["input_token_details"]
    assert sum(map(len, TEXTS)) <= details["cache_read"] < spent["input_tokens"]
    assert details["cache_creation"] == 0
    assert counted.num_encoded == num_encoded


@pytest.mark.parametrize("is_stored", [True, False])
def test_chunks_are_hits_when_metadata_in_their_headers_changed(counted, store, is_stored):
    """Pitfall 36: a header with another date is another prompt around the same chunks.

    Whether the vector store was told of the new date through the wrapper, or behind its back.
    """
    chain = _chain(store, HEADER)
    before, prompt = _asked(chain, counted.corpus)
    assert prompt.count("modified: 2020-01-01\n") == 3
    num_encoded = counted.num_encoded
    (store if is_stored else store.vectorstore).add_documents(_files("2024-12-31"))
    after, prompt = _asked(chain, counted.corpus)
    assert prompt.count("modified: 2024-12-31\n") == 3
    assert "2020" not in prompt
    for run in (before, after):
        assert (run.num_documents, run.num_documents_hit) == (3, 3)
    assert counted.num_encoded == num_encoded


def test_only_the_changed_text_is_no_hit_when_edited_behind_the_wrapper(counted, store):
    """Pitfall 36, the other way: hits are of texts, not of ids, so an edit of one shows."""
    edited = Document(page_content="A cat.", metadata={"source": "0.txt", "date": "x"}, id="0")
    store.vectorstore.add_documents([edited])
    run, prompt = _asked(_chain(store, HEADER), counted.corpus)
    assert (run.num_documents, run.num_documents_hit) == (3, 2)
    assert CAT not in prompt


@pytest.mark.parametrize("separator", ["\n\n", " | ", ""])
@pytest.mark.parametrize("document_prompt", ["{page_content}", HEADER, "<{page_content}>"])
def test_chunks_are_hits_when_a_chain_writes_them_in_any_way(
    counted, store, separator, document_prompt
):
    """Pitfall 35: documents without ids, any ``document_prompt``, any separator."""
    store.add_documents([Document(page_content=DOG, metadata={"source": "s", "date": "d"})])
    num_encoded = counted.num_encoded
    with recorded(counted.corpus.engine) as requests:
        _chain(store, document_prompt, separator, k=4).invoke({"input": QUESTION})
    labels = [part.label for part in requests[0].plan.cached if part.label != "(prefix)"]
    assert sorted(labels) == sorted(chunk_id_of(text) for text in (*TEXTS, DOG))
    assert counted.num_encoded == num_encoded


@pytest.mark.parametrize(("family", "reason"), [("gpt2", MissReason.UNPLACED), ("bloom", None)])
def test_head_is_learned_when_documents_stand_too_near_for_learned_positions(family, reason):
    """A system prompt that is shorter than the corpus's prefix; the next run hits all the same."""
    with opened(loaded=loaded_model(family)) as corpus:
        store = PromptCacheVectorStore(word_store(), corpus)
        store.add_documents(_files("2020-01-01"))
        llm = ChatPcRag(corpus=corpus, max_tokens=4, learn_prefix=True)
        chain, handler = _chain(store, k=1, llm=llm), CacheHitHandler()
        found = []
        for _ in range(2):
            chain.invoke({"input": QUESTION}, {"callbacks": [handler]})
            found += handler.last_run.documents
            assert llm.prefix_learning.result() == len(TEXTS)
        assert [each.miss_reason for each in found] == [reason, None]
        assert [each.outcome for each in found][1] is DocumentOutcome.HIT
