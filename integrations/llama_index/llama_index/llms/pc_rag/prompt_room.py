"""How many tokens of context a prompt of a model has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.llms.pc_rag.base import PcRagLLM
from llama_index.llms.pc_rag.messages import to_conversation

from pc_rag.types import PositionPolicy

if TYPE_CHECKING:
    from llama_index.core.indices.prompt_helper import PromptHelper
    from llama_index.core.llms import LLM
    from llama_index.core.prompts import BasePromptTemplate

PADDING = 5
"""Tokens kept free, as LlamaIndex does: a text that is tokenised in pieces can have a few more."""


class PromptRoom:
    """Counts by the model's own tokenizer where the model is a ``PcRagLLM``.

    Prompts of other models are counted as LlamaIndex counts them.

    Args:
        llm: The model, or a structured one around it.
        prompt_helper: Counts for other models.
    """

    def __init__(self, llm: LLM, prompt_helper: PromptHelper) -> None:
        self._llm = llm
        self._helper = prompt_helper
        inner = llm.llm if isinstance(llm, StructuredLLM) else llm
        self._own = inner if isinstance(inner, PcRagLLM) else None

    def of(self, prompt: BasePromptTemplate, arguments: dict[str, Any]) -> int:
        """Tokens of context that fit a prompt, room for the answer left; negative where none do.

        Args:
            prompt: The template.
            arguments: Its variables, the context empty.
        """
        if self._own is not None:
            metadata = self._own.metadata
            used = _num_prompt_tokens(self._own, prompt, arguments) + metadata.num_output
            return metadata.context_window - used - PADDING
        try:
            return self._helper._get_available_chunk_size(  # noqa: SLF001 - what `repack` asks
                prompt, padding=PADDING, llm=self._llm
            )
        except ValueError:  # says that there is less than none
            return -1

    def num_tokens(self, text: str) -> int:
        """Tokens of a text, without special tokens."""
        if self._own is not None:
            return len(self._own.tokenizer(text))
        counter = self._helper._token_counter  # noqa: SLF001 - as above
        return counter.get_string_tokens(text)

    def num_chunk_tokens(self, text: str) -> int:
        """Tokens of position that a chunk takes: its slot's, where positions are reserved."""
        config = None if self._own is None else self._own.open_corpus().engine.config
        if config is None or config.position_policy is not PositionPolicy.RESERVED:
            return self.num_tokens(text)
        return max(self.num_tokens(text), config.slot_tokens or 0)


def _num_prompt_tokens(llm: PcRagLLM, prompt: BasePromptTemplate, arguments: dict[str, Any]) -> int:
    """Tokens that a prompt has when it reaches the model, chat template included."""
    if not llm.metadata.is_chat_model:
        text = llm._get_prompt(prompt, **arguments)  # noqa: SLF001 - as `predict` renders it
        return len(llm.tokenizer(text)) + 1  # BOS
    messages = llm._get_messages(prompt, **arguments)  # noqa: SLF001 - as above
    pieces = llm.host.chat_format.render(to_conversation(messages))
    return sum(len(piece.token_ids) for piece in pieces)
