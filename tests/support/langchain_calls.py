"""Calls of our LangChain models: prompts with chunks in them, and what the answers tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from tests.support.corpora import recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pc_rag.corpus import Corpus

QUESTION = "Where did the cat sit?"


def context_messages(*texts: str) -> list[BaseMessage]:
    """Chunks in a system message, and a question."""
    context = "\n\n".join(texts)
    return [SystemMessage(f"Answer from this:\n\n{context}"), HumanMessage(QUESTION)]


def modules(message: Any) -> list[dict[str, Any]]:
    """The chunks of an answer's request, the corpus's prefix left out."""
    found = message.response_metadata["pc_rag"]["modules"]
    return [module for module in found if module["label"] != "(prefix)"]


def prompt_text(corpus: Corpus, ask: Callable[[], object]) -> str:
    """The text of the one prompt that reaches the engine."""
    with recorded(corpus.engine) as requests:
        ask()
    (request,) = requests
    backend = corpus.engine.loaded.tokenizer.backend
    return backend.decode(list(request.plan.token_ids), skip_special_tokens=False)


def summed(chunks: Iterable[Any]) -> Any:
    """A streamed message as one."""
    first, *others = chunks
    return sum(others, start=first)


def text_of(piece: Any) -> str:
    """The text of a message, of a piece of one, or of a string model's piece."""
    return piece if isinstance(piece, str) else piece.content


class TokenEvents(BaseCallbackHandler):
    """Keeps what ``on_llm_new_token`` was called with, in order."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)
