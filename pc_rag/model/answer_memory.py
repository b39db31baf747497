"""Generated token ids by the text they decode to, so that an answer's tokens are made once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.types import TokenIds

MAX_TOKENS = 1_000_000
MAX_ANSWERS = 4096


class PromptDigest:
    """What a prompt says, however its texts are cut into tokens.

    Control tokens count by their ids and the tokens between them by the text they decode to: a
    prompt with chunks is cut at these, and a rendered conversation is not. Not for use by several
    threads at once.

    Args:
        tokenizer: Decodes, and tells control tokens.
        token_ids: The beginning of the prompt.
    """

    def __init__(self, tokenizer: TextTokenizer, token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._lead = tokenizer.encode_text("a")  # some decoders drop a space at the very start
        self._closed = hashlib.sha256()
        self._open: list[int] = []  # behind the last control token
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> Self:
        """Add tokens behind the others."""
        control_ids = self._tokenizer.control_ids
        for token_id in token_ids:
            if token_id in control_ids:
                self._closed.update(self._end() + f"\0control {token_id}\0".encode())
                self._open.clear()
            else:
                self._open.append(token_id)
        return self

    def copy(self) -> PromptDigest:
        """Another one of the same prompt."""
        twin = PromptDigest(self._tokenizer, self._open)
        twin._closed = self._closed.copy()
        return twin

    @property
    def value(self) -> bytes:
        """The digest of all tokens so far."""
        digest = self._closed.copy()
        digest.update(self._end())
        return digest.digest()

    def _end(self) -> bytes:
        text = self._tokenizer.decode([*self._lead, *self._open]).encode()
        return b"%d\0%b" % (len(text), text)


class AnswerMemory:
    """The latest answers of one engine; those used longest ago are forgotten first. Thread-safe.

    A model may generate other tokens than a tokenizer makes of the same text. Where an answer comes
    back in a conversation, its generated tokens continue the run that the exact prefix cache holds;
    tokens made anew of its text would not. That run exists only behind the prompt which was
    answered, so an answer is known again there and nowhere else: no prompt depends on what was
    generated for another.

    Args:
        max_tokens: Most tokens to remember, of all answers together.
        max_answers: Most answers to remember.
    """

    def __init__(self, *, max_tokens: int = MAX_TOKENS, max_answers: int = MAX_ANSWERS) -> None:
        self._max_tokens = max_tokens
        self._max_answers = max_answers
        self._lock = Lock()
        self._answers: OrderedDict[tuple[bytes, str], TokenIds] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_tokens(self) -> int:
        """Tokens of all remembered answers."""
        return self._num_tokens

    def remember(self, text: str, token_ids: TokenIds, *, behind: PromptDigest) -> None:
        """Remember an answer; of several to one prompt with one text the latest counts.

        Args:
            text: What the ids decode to, exactly.
            token_ids: Its generated ids, none of them a control token's.
            behind: The prompt.
        """
        if not text or len(token_ids) > self._max_tokens:
            return
        key = (behind.value, text)
        with self._lock:
            self._num_tokens += len(token_ids) - len(self._answers.pop(key, ()))
            self._answers[key] = token_ids
            while self._num_tokens > self._max_tokens or len(self._answers) > self._max_answers:
                _, forgotten = self._answers.popitem(last=False)
                self._num_tokens -= len(forgotten)

    def token_ids_of(self, text: str, *, behind: PromptDigest) -> TokenIds | None:
        """The generated ids of an answer; ``None`` where none is known.

        Args:
            text: Its text, exactly.
            behind: The prompt that it answered.
        """
        key = (behind.value, text)
        with self._lock:
            token_ids = self._answers.get(key)
            if token_ids is not None:
                self._answers.move_to_end(key)
            return token_ids
