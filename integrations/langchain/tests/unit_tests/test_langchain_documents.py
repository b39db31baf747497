"""What became of documents that were retrieved, told apart (pitfall 34)."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_pc_rag import (
    CacheHitHandler,
    ChatPcRag,
    DocumentOutcome,
    PromptCacheMiddleware,
    PromptCacheVectorStore,
    format_chunks,
    warm_documents,
)

from pc_rag.errors import ConfigError
from tests.support.corpora import CAT, DOG

UNKNOWN = "Nobody has ever indexed this text about whales and their long journeys."
DOCUMENTS = [
    Document(CAT, id="indexed"),
    Document(UNKNOWN, id="unknown"),
    Document("Short one.", id="short"),
    Document(DOG, id="left out"),
]


@pytest.mark.parametrize("as_blocks", [False, True])
def test_fate_of_a_document_is_told_when_it_was_no_hit(corpus, as_blocks):
    """Left out, never indexed, or too short: three faults with three remedies."""
    corpus.add(["Short one."])

    def prompt(documents):
        kept = documents[:3]
        if as_blocks:
            return [HumanMessage([*format_chunks(kept), {"type": "text", "text": "?"}])]
        return "\n\n".join(each.page_content for each in kept)

    hits = CacheHitHandler()
    found = RunnableLambda(lambda _: DOCUMENTS)
    chain = found | RunnableLambda(prompt) | ChatPcRag(corpus=corpus, max_tokens=2)
    chain.invoke("?", config={"callbacks": [hits]})
    assert {each.source: each.outcome for each in hits.last_run.documents} == {
        "indexed": DocumentOutcome.HIT,
        "unknown": DocumentOutcome.NOT_INDEXED,
        "short": DocumentOutcome.HIT if as_blocks else DocumentOutcome.TOO_SHORT,
        "left out": DocumentOutcome.NOT_IN_PROMPT,
    }
    report = hits.report()
    assert "unknown: not indexed" in report
    assert "left out: not in the prompt" in report


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (
            lambda llm: PromptCacheVectorStore(InMemoryVectorStore(None), llm),
            "corpus is a ChatPcRag",
        ),
        (lambda llm: PromptCacheVectorStore(None, llm.open_corpus()), "vectorstore is a NoneType"),
        (PromptCacheMiddleware, "corpus is a ChatPcRag"),
        (warm_documents, "corpus is a ChatPcRag"),
    ],
)
def test_wrong_object_is_refused_when_it_is_handed_over(corpus, build, named):
    """At once, with what to give instead."""
    with pytest.raises(ConfigError, match=named):
        build(ChatPcRag(corpus=corpus))
