"""Finds the corpus chunks whose text, or a part of it, stands in a plain prompt."""

from __future__ import annotations

import functools
import heapq
import threading
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from pc_rag.corpus.part_table import MIN_PART_CHARS, PartTable, find_parts
from pc_rag.corpus.prefix_table import MIN_CHARS, PrefixTable
from pc_rag.corpus.rolling_hash import WindowHashes, code_points

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from pc_rag.corpus.rolling_hash import IntArray

MIN_UNBOUNDED_CHARS = 32
"""Shorter texts are recognised only where no word is cut by their borders."""

_MERGE_RATIO = 8
_FIRST_UNSPACED = 0x2E80
"""From here on scripts write without spaces (CJK, kana, Hangul), and emoji follow."""


class ChunkPart(StrEnum):
    """How much of a chunk stands at a place of a prompt."""

    WHOLE = "whole"
    HEAD = "head"
    """It begins there, and ends or goes on differently before its end."""
    TAIL = "tail"
    """It ends there, and what stands in front is not what it has there."""


@dataclass(frozen=True, slots=True)
class Recognized:
    """A chunk, or a part of one, found in a prompt.

    Attributes:
        chunk_id: The chunk.
        start: Index of its first character in the prompt.
        end: Index behind its last character.
        part: How much of it stands there.
    """

    chunk_id: str
    start: int
    end: int
    part: ChunkPart = ChunkPart.WHOLE


@dataclass(frozen=True, slots=True)
class _Tables:
    """The look-ups over one set of texts."""

    whole: PrefixTable
    parts: PartTable

    @property
    def texts(self) -> Sequence[str]:
        return self.whole.texts


class Recognizer:
    """Chunk texts by longest match, wherever they stand in a prompt and whatever surrounds them.

    A text is found verbatim. Reading from left to right, at each place the longest whole text wins,
    and the search goes on behind it. Texts of fewer than ``MIN_CHARS`` (16) characters are never
    found: their KV saves less than a placed entry costs. Texts of fewer than
    ``MIN_UNBOUNDED_CHARS`` (32) are found only where their borders cut no word, in scripts that put
    spaces between words.

    Between whole texts, parts of texts are found: first heads, from left to right, then tails in
    what is left, from right to left; at each place the longest. Parts may cut words. One counts if
    it is at least half of its text, rounded up to 64, 96, 128, 192 or 256 characters, of which 256
    are always enough; so what many texts share, as a short metadata header, is none, and a header
    of more than 256 characters is a head of any of them. White space in front of a tail is none of
    it. Where several texts have the same part it is said to be of any of them.
    The middle of a text is not found.

    Memory: the texts, which are referred to and not copied, and about 650 bytes each. Time of
    ``find``: linear in the prompt, times the logarithms of the longest text and of the number of
    texts; it does not depend on what the texts share. Any thread may add, remove and find; ``find``
    waits for nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}
        self._ids: dict[str, tuple[str, ...]] = {}
        # Over every text in _ids and in _removed. Replaced as a whole, so ``find`` needs no lock.
        self._tables: tuple[_Tables, ...] = ()
        self._removed: set[str] = set()

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._texts

    def add(self, chunk_id: str, text: str) -> None:
        """Have a chunk recognised; ``add_all`` is faster for many. See there."""
        self.add_all([(chunk_id, text)])

    def add_all(self, chunks: Iterable[tuple[str, str]]) -> None:
        """Have chunks recognised.

        Args:
            chunks: Pairs of id and text. An id that is known already gets the new text; of several
                ids with one text the smallest is reported.
        """
        with self._lock:
            new_texts: dict[str, None] = {}
            for chunk_id, text in chunks:
                if self._texts.get(chunk_id) == text:
                    continue
                self._forget(chunk_id)
                self._texts[chunk_id] = text
                if text in self._removed:
                    self._removed.discard(text)
                    self._mark(text, is_live=True)
                elif text not in self._ids and len(text) >= MIN_CHARS:
                    new_texts[text] = None
                self._ids[text] = tuple(sorted((*self._ids.get(text, ()), chunk_id)))
            # A text may have gone again under the same ids before it came into a table.
            self._insert([text for text in new_texts if text in self._ids])
            self._removed.difference_update(set(new_texts) - self._ids.keys())

    def remove(self, chunk_id: str) -> bool:
        """Recognise a chunk no longer. Whether it was known."""
        with self._lock:
            is_known = self._forget(chunk_id)
            if len(self._removed) > len(self._ids):
                live = [text for text in self._ids if len(text) >= MIN_CHARS]
                self._tables = (_tables(live),) if live else ()
                self._removed.clear()
            return is_known

    def find(self, prompt: str) -> tuple[Recognized, ...]:
        """Chunks and parts of chunks in a prompt, from left to right, none overlapping another."""
        hashes = WindowHashes(points := code_points(prompt))
        filter_hashes = hashes.all_of_length(MIN_CHARS)
        is_inside_word = _inside_words(points)
        tables = self._tables
        found: list[tuple[IntArray, IntArray, PrefixTable]] = []
        for table in (each.whole for each in tables):
            places, rows = table.longest_at(hashes, filter_hashes)
            # Without this a long word would have each of its places looked at one by one.
            is_possible = ~(is_inside_word[places] & (table.lengths[rows] < MIN_UNBOUNDED_CHARS))
            found.append((places[is_possible], rows[is_possible], table))
        recognized = list(self._resolve(prompt, found, is_inside_word))
        outer = hashes.all_of_length(MIN_PART_CHARS)
        for part, searches in (
            (ChunkPart.HEAD, [each.parts.heads for each in tables]),
            (ChunkPart.TAIL, [each.parts.tails for each in tables]),
        ):
            gaps = _gaps(recognized, len(prompt))
            for each in find_parts(prompt, hashes, outer, gaps, searches):
                chunk_ids = self._ids.get(each.text)
                start = each.start
                if part is ChunkPart.TAIL:  # a space in front is rather of what stands before
                    start = each.end - len(prompt[start : each.end].lstrip())
                if chunk_ids and start < each.end:  # a text may have gone since it was looked up
                    recognized.append(Recognized(chunk_ids[0], start, each.end, part))
            recognized.sort(key=lambda each: each.start)
        return tuple(recognized)

    def _resolve(
        self,
        prompt: str,
        found: list[tuple[IntArray, IntArray, PrefixTable]],
        is_inside_word: npt.NDArray[np.bool_],
    ) -> Iterator[Recognized]:
        """Compare texts at the places found, and let the longest at the leftmost place win."""
        streams = [(places.tolist(), rows.tolist(), table) for places, rows, table in found]
        cursors = [0] * len(streams)
        end = 0
        while True:
            for index, (places, _, _) in enumerate(streams):
                cursors[index] = bisect_left(places, end, cursors[index])
            pairs = list(zip(streams, cursors, strict=True))
            heads = [places[cursor] for (places, _, _), cursor in pairs if cursor < len(places)]
            if not heads:
                return
            start = min(heads)
            chains = [
                table.shorter(rows[cursor])
                for (places, rows, table), cursor in pairs
                if cursor < len(places) and places[cursor] == start
            ]
            end = start + 1
            for text in heapq.merge(*chains, key=len, reverse=True):
                text_end = start + len(text)
                is_whole = len(text) >= MIN_UNBOUNDED_CHARS or not (
                    is_inside_word[start] or is_inside_word[text_end]
                )
                chunk_ids = self._ids.get(text)
                if is_whole and chunk_ids and prompt.startswith(text, start):
                    yield Recognized(chunk_ids[0], start, text_end)
                    end = text_end
                    break

    def _forget(self, chunk_id: str) -> bool:
        text = self._texts.pop(chunk_id, None)
        if text is None:
            return False
        others = tuple(other for other in self._ids[text] if other != chunk_id)
        if others:
            self._ids[text] = others
        else:
            del self._ids[text]
            if len(text) >= MIN_CHARS:
                self._removed.add(text)
                self._mark(text, is_live=False)
        return True

    def _mark(self, text: str, *, is_live: bool) -> None:
        """Find parts of a text no longer, or again."""
        for table in self._tables:
            table.parts.mark(text, is_live=is_live)

    def _insert(self, texts: list[str]) -> None:
        """Put texts into a new table, together with the small tables: few tables stay."""
        if not texts:
            return
        tables = list(self._tables)
        while tables and len(tables[-1].texts) <= _MERGE_RATIO * len(texts):
            for text in tables.pop().texts:
                if text in self._removed:
                    self._removed.discard(text)
                else:
                    texts.append(text)
        self._tables = (*tables, _tables(texts))


def _tables(texts: Sequence[str]) -> _Tables:
    whole = PrefixTable(texts)
    return _Tables(whole, PartTable(whole.texts))


def _gaps(found: Sequence[Recognized], num_chars: int) -> IntArray:
    """``[num_gaps, 2]`` what lies between finds and has room for a part."""
    edges = [0, *(edge for each in found for edge in (each.start, each.end)), num_chars]
    gaps = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return gaps[gaps[:, 1] - gaps[:, 0] >= MIN_PART_CHARS]


def _inside_words(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """For each place of a prompt, its end included, whether a border there cuts a word."""
    table = _word_characters()
    is_word = table[np.minimum(points, len(table) - 1)]
    is_inside = np.zeros(len(points) + 1, dtype=np.bool_)
    np.logical_and(is_word[:-1], is_word[1:], out=is_inside[1:-1])
    return is_inside


@functools.cache
def _word_characters() -> npt.NDArray[np.bool_]:
    """Whether a code point is part of a word; the last one stands for all scripts beyond."""
    flags = [chr(point).isalnum() or chr(point) == "_" for point in range(_FIRST_UNSPACED)]
    return np.array([*flags, False])
