"""How a corpus puts a question to the model: fixed text around the retrieved chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.errors import ConfigError
from pc_rag.model.conversation import ChatMessage
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLACE = "{question}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """The text around the chunks of a question.

    Everything up to the first chunk is the corpus's prefix: chunks are encoded behind it.

    Attributes:
        prefix: The system text.
        header: Opens the user's message, before the first chunk.
        separator: Stands between chunks.
        question: Stands behind the last chunk; ``{question}`` is replaced.

    Raises:
        ConfigError: ``question`` has no place for the question.
    """

    prefix: str = (
        "You answer questions about the given context. Answer in one or two short sentences, "
        "using only the context."
    )
    header: str = "Context:\n\n"
    separator: str = "\n\n"
    question: str = "\n\nQuestion: {question}"

    def __post_init__(self) -> None:
        if _PLACE not in self.question:
            raise ConfigError(
                f"prompt format: question {self.question!r} lacks {_PLACE}, so the model would "
                f"never see what is asked; put it where the question stands"
            )

    def messages(self, question: str, chunks: Sequence[str]) -> tuple[ChatMessage, ...]:
        """The conversation that asks a question about chunks."""
        asked = self.question.replace(_PLACE, question)
        content = self.header + self.separator.join(chunks) + asked
        system = (ChatMessage(Role.SYSTEM, self.prefix),) if self.prefix else ()
        return (*system, ChatMessage(Role.USER, content))
