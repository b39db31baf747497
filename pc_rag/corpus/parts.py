"""Parts of chunks in prompts: how many of a chunk's tokens a head has, and which text is a tail.

A chunk's first tokens attended nothing behind them, so a head is read from the chunk's entry. The
tokens of a tail attended a head that is not there: it stays text, and metrics are told of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pc_rag.corpus.recognition import Recognized
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.types import TokenIds


_MOST_STORED_PER_READ = 8
"""An entry is loaded, and encoded where it is missing, as a whole. For a quotation of a document
that is one long chunk that would cost more than it saves."""


@dataclass(frozen=True, slots=True)
class HeadTokens:
    """The tokens of a chunk of which a head stands in a prompt.

    Attributes:
        token_ids: All tokens of the chunk.
        num_read: How many of them lie wholly inside the head; at least 1.
        num_chars: Characters of the head that they stand for.
    """

    token_ids: TokenIds
    num_read: int
    num_chars: int

    @property
    def is_worth_reading(self) -> bool:
        """Whether it has at least an eighth of the tokens that are loaded for it."""
        return self.num_read * _MOST_STORED_PER_READ >= len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PartText:
    """Text of a prompt that is a part of a chunk and computed all the same.

    Attributes:
        chunk_id: The chunk.
        token_ids: Its tokens, made of the text that it stands in.
    """

    chunk_id: str
    token_ids: TokenIds


def head_tokens(
    tokenizer: TextTokenizer, text: str, token_ids: TokenIds, num_chars: int
) -> HeadTokens | None:
    """The tokens that lie wholly inside the first characters of a chunk.

    Args:
        tokenizer: What made the chunk's tokens.
        text: The chunk.
        token_ids: Its tokens, as they are stored.
        num_chars: Characters of the head.

    Returns:
        ``None`` where no token lies inside, or the tokens are not those that the text makes.
    """
    located = tokenizer.locate_text(text)
    if located.token_ids != token_ids:
        return None
    num_read = end = 0
    read_end = 0  # of the tokens up to here; a normaliser may put places out of order
    for index, (begin, last) in enumerate(located.places):
        if begin >= end:  # between two characters: one that several tokens make is not cut
            num_read, read_end = index, end
        end = max(end, last)
        if end > num_chars:
            break
    else:
        num_read, read_end = len(token_ids), end
    return HeadTokens(token_ids, num_read, read_end) if num_read else None


def label_parts(
    tokenizer: TextTokenizer, text: str, parts: Sequence[Recognized], *, is_first: bool
) -> Iterator[TokenIds | PartText]:
    """The tokens of a text, those apart that lie wholly inside a part of a chunk.

    Args:
        tokenizer: What makes the tokens. They are those of the whole text: parts cut no token.
        text: The text; may be empty.
        parts: Where the parts stand in it, from left to right, none overlapping another.
        is_first: The text stands at the very start of the prompt.
    """
    if not text:
        return
    if not parts:
        yield tokenizer.encode_text(text, is_first=is_first)
        return
    located = tokenizer.locate_text(text, is_first=is_first)
    owners: list[int] = []
    index = 0
    for begin, end in located.places:
        while index < len(parts) and parts[index].end < end:
            index += 1
        is_inside = index < len(parts) and parts[index].start <= begin
        owners.append(index if is_inside else -1)
    for owner, run in groupby(zip(owners, located.token_ids, strict=True), lambda pair: pair[0]):
        token_ids = tuple(token_id for _, token_id in run)
        yield token_ids if owner < 0 else PartText(parts[owner].chunk_id, token_ids)
