"""Generated token ids by the text they decode to, so that an answer's tokens are made once."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pc_rag.types import TokenIds

MAX_TOKENS = 1_000_000
MAX_ANSWERS = 4096


class AnswerMemory:
    """The latest answers of one engine; those used longest ago are forgotten first. Thread-safe.

    A model may generate other tokens than a tokenizer makes of the same text. Where an answer comes
    back in a conversation, its generated tokens continue the run that the exact prefix cache holds;
    tokens made anew of its text would not.

    Args:
        max_tokens: Most tokens to remember, of all answers together.
        max_answers: Most answers to remember.
    """

    def __init__(self, *, max_tokens: int = MAX_TOKENS, max_answers: int = MAX_ANSWERS) -> None:
        self._max_tokens = max_tokens
        self._max_answers = max_answers
        self._lock = Lock()
        self._answers: OrderedDict[str, TokenIds] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_tokens(self) -> int:
        """Tokens of all remembered answers."""
        return self._num_tokens

    def remember(self, text: str, token_ids: TokenIds) -> None:
        """Remember an answer; of several with one text the latest counts.

        Args:
            text: What the ids decode to, exactly.
            token_ids: Its generated ids, none of them a control token's.
        """
        if not text or len(token_ids) > self._max_tokens:
            return
        with self._lock:
            self._num_tokens += len(token_ids) - len(self._answers.pop(text, ()))
            self._answers[text] = token_ids
            while self._num_tokens > self._max_tokens or len(self._answers) > self._max_answers:
                _, forgotten = self._answers.popitem(last=False)
                self._num_tokens -= len(forgotten)

    def token_ids_of(self, text: str) -> TokenIds | None:
        """The generated ids of an answer with just this text; ``None`` where none is known."""
        with self._lock:
            token_ids = self._answers.get(text)
            if token_ids is not None:
                self._answers.move_to_end(text)
            return token_ids
