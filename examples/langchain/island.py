"""What the examples share: a few documents, a model with a store around it, and the hit rate."""

from __future__ import annotations

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_pc_rag import (
    CacheHitHandler,
    ChatPcRag,
    PcRagEmbeddings,
    PcRagLLM,
    PromptCacheVectorStore,
)

TEXTS = (
    """The ferry to the island leaves the mainland every hour from April to October. In winter it
leaves at nine in the morning and at four in the afternoon, and not at all on Christmas Day.""",
    """A return ticket for the ferry costs four euros. Children under six travel for free, and dogs
need a ticket of one euro, which is sold on board.""",
    """The lighthouse at the north end of the island was built in 1871. It can be climbed on
Saturdays; the stairs have two hundred and eleven steps.""",
    """The island has one shop, which sells bread, cheese and candles. It is closed on Mondays and
whenever the baker goes fishing.""",
)
QUESTION = "How much is a return ticket for the ferry?"


def filled_store(llm: ChatPcRag | PcRagLLM) -> PromptCacheVectorStore:
    """A vector store whose documents are encoded for a model when they are added."""
    store = PromptCacheVectorStore(InMemoryVectorStore(PcRagEmbeddings()), llm.open_corpus())
    store.add_texts(list(TEXTS))
    return store


def show_hits(hits: CacheHitHandler, answer: str) -> None:
    """Print an answer and what was hit; fail unless every retrieved document was."""
    print(f"answer: {answer.strip()}")
    print(hits.report())
    run = hits.last_run
    if run is None or not run.num_documents or run.num_documents_hit < run.num_documents:
        raise SystemExit("a retrieved document was prefilled again")
    print(f"hit {run.num_documents_hit} of {run.num_documents} retrieved documents")
