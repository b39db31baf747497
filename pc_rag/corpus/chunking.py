"""From a document's text to chunks that fit a number of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pc_rag.errors import ConfigError, LayoutError

CountTokens: TypeAlias = Callable[[str], int]
"""Number of tokens of a text, tokenised on its own and without special tokens."""

DEFAULT_MAX_TOKENS = 256

_MIN_FILL = 0.5
"""A weaker boundary is taken where every stronger one would leave a chunk emptier than this."""

_NEARLY_FULL = 0.95
"""A window this full is not widened further: each try costs one tokenisation."""

_CHARS_PER_TOKEN = 4
"""First guess for a text that nothing is known of."""

_NUM_GUESSES = 6
"""Guesses in proportion to the last count; then the interval is halved, which always ends."""

_MAX_SEPARATOR_CHARS = 16

_NON_WHITESPACE = re.compile(r"\S")
_CLOSERS = "\"')\\]”’»"  # noqa: RUF001 - typographic quotes close sentences
_CJK_ENDS = "。！？"  # noqa: RUF001 - Chinese and Japanese put no space behind them
_BOUNDARIES = (
    re.compile(r"\n[^\S\n]*\n"),  # paragraph
    re.compile(r"\n"),  # line
    re.compile(rf"(?:(?<=[.!?…])|(?<=[.!?…][{_CLOSERS}]))\s|(?<=[{_CJK_ENDS}])"),  # sentence
    re.compile(r"\s"),  # word
)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a text, stripped.

    Attributes:
        text: ``document_text[start:end]``; never empty, no whitespace at either end.
        start: Index of its first character in the document's text.
        end: Index behind its last character.
        num_tokens: Its tokens when tokenised on its own.
    """

    text: str
    start: int
    end: int
    num_tokens: int


class Chunker:
    """Splits texts at paragraph, line, sentence or word borders, in that order of preference.

    Every character of a text is in exactly one chunk, save whitespace at the chunks' borders. A
    chunk is cut at the strongest boundary that leaves it at least half full, so chunks are near
    ``max_tokens`` without tearing sentences; a string without any boundary is cut between
    characters. The same text always gives the same chunks.

    Args:
        count_tokens: Counts the tokens of a text. Called two to four times a chunk, on texts about
            as long as a chunk, so the time is linear in the text.
        max_tokens: Most tokens of a chunk.

    Raises:
        ConfigError: ``max_tokens`` is not positive.
    """

    def __init__(self, count_tokens: CountTokens, *, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; a chunk needs at least 1 token")
        self._count_tokens = count_tokens
        self.max_tokens = max_tokens

    @property
    def id(self) -> str:
        """Names the way of chunking: documents chunked in another way are chunked anew."""
        return f"boundaries-1:{self.max_tokens}"

    def split(self, text: str) -> list[TextChunk]:
        """The chunks of a text, in order; none for whitespace.

        Raises:
            LayoutError: A single character takes more than ``max_tokens`` tokens.
        """
        chunks: list[TextChunk] = []
        limit = len(text.rstrip())
        num_chars = _CHARS_PER_TOKEN * self.max_tokens
        start = _skip_whitespace(text, 0)
        while start < limit:
            end = self._widest_end(text, start, limit=limit, num_chars=num_chars)
            chunk = self._cut(text, start, end, limit=limit)
            chunks.append(chunk)
            # Tokens of one document are about equally long, so the next search starts from here.
            num_chars = max(1, len(chunk.text) * self.max_tokens // max(1, chunk.num_tokens))
            start = _skip_whitespace(text, chunk.end)
        return chunks

    def _measure(self, text: str, start: int, end: int) -> TextChunk:
        piece = text[start:end].rstrip()
        return TextChunk(piece, start, start + len(piece), self._count_tokens(piece))

    def _widest_end(self, text: str, start: int, *, limit: int, num_chars: int) -> int:
        """Where about the longest text from ``start`` that fits ends, be it inside a word."""
        # A search between the longest size known to fit and the shortest known not to. Token counts
        # are not additive, so sizes are guessed from the last count and then counted.
        rest = limit - start
        fits, too_long = 0, rest + 1
        # A rest that may just fit is tried whole, so that no tiny last chunk is left over.
        size = rest if rest <= num_chars / _NEARLY_FULL else num_chars
        for num_tries in range(1, 64):
            num_tokens = self._measure(text, start, start + size).num_tokens
            if num_tokens <= self.max_tokens:
                fits = size
                if num_tokens >= _NEARLY_FULL * self.max_tokens:
                    break
            else:
                too_long = size
            if too_long - fits <= max(1, int(fits * (1 - _NEARLY_FULL))):
                break
            guess = min(rest, size * self.max_tokens // max(1, num_tokens))
            is_trusted = num_tries <= _NUM_GUESSES and fits < guess < too_long
            size = guess if is_trusted else (fits + too_long) // 2
        return start + max(1, fits)

    def _cut(self, text: str, start: int, end: int, *, limit: int) -> TextChunk:
        """The chunk from ``start`` that ends at the best boundary up to ``end`` and fits."""
        while True:
            cut = end if end == limit else _last_boundary(text, start, end)
            chunk = self._measure(text, start, cut)
            if chunk.num_tokens <= self.max_tokens:
                return chunk
            if cut == start + 1:
                raise LayoutError(
                    f"character {start} ({text[start]!r}) takes {chunk.num_tokens} tokens, more "
                    f"than the chunk limit of {self.max_tokens}; raise max_tokens"
                )
            # A shorter text can take more tokens (a word torn apart), so the cut is counted too.
            shrunk = (cut - start) * self.max_tokens // chunk.num_tokens
            end = start + max(1, min(cut - start - 1, shrunk))


def _skip_whitespace(text: str, start: int) -> int:
    match = _NON_WHITESPACE.search(text, start)
    return match.start() if match else len(text)


def _last_boundary(text: str, start: int, end: int) -> int:
    """The last boundary in ``(start, end]`` of the strongest kind that fills the chunk."""
    least = start + max(1, int((end - start) * _MIN_FILL))
    for pattern in _BOUNDARIES:
        # A separator may begin at ``end`` and reach beyond it.
        found = pattern.finditer(text, least, end + _MAX_SEPARATOR_CHARS)
        cuts = [match.start() for match in found if match.start() <= end]
        if cuts:
            return cuts[-1]
    return end
