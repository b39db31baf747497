"""The plain retrieval chain of every tutorial, and what a handler should tell of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_pc_rag import DocumentOutcome

from pc_rag.types import MissReason
from tests.support.langchain_models import ListRetriever
from tests.support.uses import TEXTS, metrics_of, use_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from langchain_core.documents import Document
    from langchain_pc_rag import RunReport

OSLO, LIMA, ROME = TEXTS
PROMPT = ChatPromptTemplate.from_template("{context}\n{question}")
METRICS = metrics_of(use_of(OSLO), use_of(LIMA, MissReason.NOT_STORED))
"""Of the retriever's three documents one was hit, one missed, and one is no module of a prompt."""
EXPECTED_FATES = {
    "Oslo": (DocumentOutcome.HIT, None),
    "Lima": (DocumentOutcome.MISS, MissReason.NOT_STORED),
    "Rome": (DocumentOutcome.NOT_INDEXED, None),
}


def joined(documents: Iterable[Document]) -> str:
    """The context as stuff chains join it."""
    return "\n\n".join(each.page_content for each in documents)


def chain_of(model: Any, retriever: Any = None) -> Any:
    """Retrieval, prompt, model, parser."""
    return (
        {"context": (retriever or ListRetriever()) | joined, "question": RunnablePassthrough()}
        | PROMPT
        | model
        | StrOutputParser()
    )


def config(handler: Any) -> dict[str, Any]:
    """A run's configuration with one handler."""
    return {"callbacks": [handler]}


def fates(run: RunReport) -> dict[str, tuple[Any, Any]]:
    """Outcome and reason of each document, by its source."""
    return {each.source: (each.outcome, each.miss_reason) for each in run.documents}
