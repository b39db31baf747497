"""From a prompt in any form to its request."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pc_rag.engine.request import Request
from pc_rag.errors import PromptError
from pc_rag.layout.plan import Fresh, RequestPlan
from pc_rag.model.conversation import TextPrompt, as_conversation
from pc_rag.pml import Prompt
from pc_rag.types import Span

if TYPE_CHECKING:
    from pc_rag.engine.schemas import SchemaRegistry
    from pc_rag.model.chat import ChatFormat
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.types import TokenIds

PromptLike: TypeAlias = TextPrompt | Prompt
"""Plain text, a conversation, or a PML prompt."""


class PromptPlanner:
    """Plans prompts of every form. Thread-safe.

    Args:
        tokenizer: The model's.
        chat_format: Renders conversations.
        schemas: Plan PML prompts.
    """

    def __init__(
        self, tokenizer: TextTokenizer, chat_format: ChatFormat, schemas: SchemaRegistry
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._schemas = schemas

    def plan(self, prompt: PromptLike) -> Request:
        """See ``PromptCache.plan``."""
        if isinstance(prompt, Prompt):
            return self._schemas.plan(prompt)
        if isinstance(prompt, str):
            tokenizer = self._tokenizer
            token_ids = tokenizer.bos_ids + tokenizer.encode_text(prompt, is_first=True)
            return _fresh_request(token_ids, "text")
        pieces = self._chat_format.render(as_conversation(prompt))
        token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
        return _fresh_request(token_ids, "chat")


def _fresh_request(token_ids: TokenIds, template: str) -> Request:
    if not token_ids:
        raise PromptError("the prompt is empty; give it at least one token of text")
    part = Fresh(token_ids=token_ids, span=Span(0, len(token_ids)))
    return Request(plan=RequestPlan((part,)), template=template)
