"""The prompts of ``benchmarks/gap_study.py`` as tokens, and where a cell places them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from pc_rag.model.chat import ChatFormat, PieceKind
from pc_rag.model.conversation import ChatMessage
from pc_rag.types import Role, Span, TokenIds

if TYPE_CHECKING:
    from gap_cells import Cell
    from gap_questions import Question

    from pc_rag.model.tokenizer import TextTokenizer

SYSTEM = "You answer questions about the given context with a few words and nothing else."
_MARK = "CONTEXT-AND-QUESTION"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question as runs of tokens between which a gap may stand.

    Attributes:
        runs: What is always included before the context, the chunks, and the question with the
            beginning of an answer.
        right: The right answer, behind the prompt.
    """

    runs: tuple[TokenIds, ...]
    right: TokenIds

    @property
    def num_chunks(self) -> int:
        """Chunks of the context."""
        return len(self.runs) - 2

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return sum(map(len, self.runs))

    def spans(self, cell: Cell) -> tuple[Span, ...]:
        """Position IDs of each run."""
        gaps = (0, *cell.gaps(self.num_chunks))
        steps = [gap + len(run) for gap, run in zip(gaps, self.runs, strict=True)]
        ends = accumulate(steps)
        return tuple(Span(end - len(run), end) for end, run in zip(ends, self.runs, strict=True))


def prompt_of(question: Question, tokenizer: TextTokenizer) -> Prompt:
    """A question in the model's own chat template, or in the plain format where it has none."""
    messages = [ChatMessage(Role.SYSTEM, SYSTEM), ChatMessage(Role.USER, _MARK)]
    before: TokenIds = ()
    behind: TokenIds = ()
    is_behind = False
    for piece in ChatFormat(tokenizer).render(messages):
        if piece.kind is PieceKind.CONTENT and _MARK in piece.text:
            head, _, rest = piece.text.partition(_MARK)
            before += tokenizer.encode_text(head, is_first=not before) if head else ()
            behind += tokenizer.encode_text(rest) if rest else ()
            is_behind = True
        elif is_behind:
            behind += piece.token_ids
        else:
            before += piece.token_ids
    chunks = tuple(tokenizer.encode_text(f"{chunk}\n\n") for chunk in question.chunks)
    asked = tokenizer.encode_text(question.text) + behind + tokenizer.encode_text(question.lead)
    return Prompt((before, *chunks, asked), tokenizer.encode_text(f" {question.answers[0]}"))
