"""For a set of texts: the longest head or tail of one of them at a place of a prompt.

A part of a text counts from a least length on, ``least_part(len(text))``, which is one of a few
steps. So a text registers two hashes: of its first and of its last characters, as many as the least
part has. At a place of a prompt one look-up a step says which texts a counting head of stands
there, and a filter on ``MIN_PART_CHARS`` characters spares nearly all places even that.

Texts that begin with the same least head form a group, sorted. The one that goes on like the prompt
for longest is a neighbour of the prompt in that order, which bisection finds. Tails are the same
from right to left: groups of texts that end alike, sorted as read backwards.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pc_rag.corpus.rolling_hash import HashFilter, HashTable, WindowHashes, code_points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from pc_rag.corpus.rolling_hash import HashArray, IntArray

MIN_PART_CHARS = 64
"""Shorter parts never count: a metadata header, a heading, a sentence that many texts share."""

MAX_LEAST_CHARS = 256
"""So many characters always count, however long the text is that they are a part of."""

_STEPS: Final = (MIN_PART_CHARS, 96, 128, 192, MAX_LEAST_CHARS)
"""Half of a text is rounded up to one of these, so that a place needs five look-ups at most."""

_STEP_ARRAY: Final = np.array(_STEPS, dtype=np.int64)
_FILTER_BITS_PER_TEXT = 12
_BATCH_TEXTS = 512
_FIRST_BLOCK = 16
"""Places looked up at once at first: what one takes up spares those behind it."""


def least_part(num_chars: int) -> int:
    """Characters from which on a part of a text of ``num_chars`` characters counts.

    At least half of the text, rounded up to 64, 96, 128, 192 or 256; 256 are always enough.
    """
    return next((step for step in _STEPS if 2 * step >= num_chars), MAX_LEAST_CHARS)


@dataclass(frozen=True, slots=True)
class FoundPart:
    """A part of a text that stands in a prompt.

    Attributes:
        text: The text.
        start: Index of the part's first character in the prompt.
        end: Index behind its last character.
    """

    text: str
    start: int
    end: int


class PartTable:
    """Look-up of heads and tails over a set of texts. Any thread may search.

    Memory: the texts, which are referred to and not copied, and about 120 bytes each.

    Args:
        texts: Distinct texts, sorted.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        owners = np.flatnonzero(lengths > MIN_PART_CHARS)
        step = np.searchsorted(_STEP_ARRAY, (lengths + 1) // 2)
        least = _STEP_ARRAY[np.minimum(step, len(_STEPS) - 1)]
        self._is_live = np.ones(len(texts), dtype=np.bool_)
        heads, tails = _hash_ends(texts, owners, least[owners])
        self.heads = PartSearch(texts, owners, heads, self._is_live, is_head=True)
        self.tails = PartSearch(texts, owners, tails, self._is_live, is_head=False)

    def mark(self, text: str, *, is_live: bool) -> None:
        """Find parts of a text no longer, or again; nothing happens where it is not one of them.

        Calls must not overlap; searches may run meanwhile.
        """
        row = bisect_left(self.texts, text)
        if row < len(self.texts) and self.texts[row] == text:
            self._is_live[row] = is_live
            self.heads.num_changes += 1
            self.tails.num_changes += 1


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rows of live texts by group: those of group ``g`` are ``rows[starts[g] : starts[g + 1]]``.

    ``num_changes`` says of when it is.
    """

    num_changes: int
    rows: npt.NDArray[np.int32]
    starts: IntArray


class PartSearch:
    """The heads, or the tails, of a ``PartTable``.

    Args:
        texts: Distinct texts.
        owners: ``[num_owners]`` rows of the texts that have parts.
        hashes: Of the least part of each, and of its outer ``MIN_PART_CHARS`` characters.
        is_live: ``[num_texts]`` whether a text is to be found; may change.
        is_head: Heads, not tails.

    Attributes:
        is_head: Heads, not tails.
        num_changes: How often ``is_live`` has changed.
    """

    def __init__(
        self,
        texts: Sequence[str],
        owners: IntArray,
        hashes: tuple[HashArray, HashArray],
        is_live: npt.NDArray[np.bool_],
        *,
        is_head: bool,
    ) -> None:
        self._texts = texts
        self._is_live = is_live
        self.is_head = is_head
        self.num_changes = 0
        least_hashes, outer_hashes = hashes
        self._filter = HashFilter(outer_hashes, bits_per_key=_FILTER_BITS_PER_TEXT)
        groups, group_of = np.unique(least_hashes, return_inverse=True)
        self._table = HashTable(groups)
        order = np.argsort(group_of, kind="stable")
        self._rows = owners[order].astype(np.int32)
        self._starts = np.searchsorted(group_of[order], np.arange(len(groups) + 1))
        if not is_head:
            self._sort_backwards()
        self._live = _Groups(0, self._rows, self._starts)

    def _sort_backwards(self) -> None:
        for group in np.flatnonzero(np.diff(self._starts) > 1).tolist():
            first, last = self._starts[group], self._starts[group + 1]
            rows = self._rows[first:last].tolist()
            self._rows[first:last] = sorted(rows, key=lambda row: self._texts[row][::-1])

    def candidates(self, outer: HashArray, gaps: IntArray) -> tuple[IntArray, IntArray]:
        """Where parts may stand in a prompt.

        Args:
            outer: The prompt's hashes of all windows of ``MIN_PART_CHARS`` characters.
            gaps: ``[num_gaps, 2]`` rising ranges of the prompt that parts may stand in.

        Returns:
            Places where parts may begin (heads, rising) or end (tails, falling), and how many
            characters a part has room for at each.
        """
        places = self._filter.candidates(outer)
        gap = np.searchsorted(gaps[:, 0], places, side="right") - 1
        is_inside = (gap >= 0) & (places + MIN_PART_CHARS <= gaps[gap, 1])
        places, gap = places[is_inside], gap[is_inside]
        if self.is_head:
            return places, gaps[gap, 1] - places
        places += MIN_PART_CHARS
        return places[::-1], (places - gaps[gap, 0])[::-1]

    def groups_at(self, prompt: WindowHashes, places: IntArray, room: IntArray) -> IntArray:
        """``[num_places, num_steps]`` groups whose least part stands at each place, or -1."""
        live = self._live_groups()
        groups = np.full((len(places), len(_STEPS)), -1, dtype=np.int64)
        fitting, column = np.nonzero(room[:, None] >= _STEP_ARRAY)
        num_chars = _STEP_ARRAY[column]
        starts = places[fitting] if self.is_head else places[fitting] - num_chars
        found = self._table.find(prompt.at(starts, num_chars))
        is_empty = live.starts[found] == live.starts[found + 1]
        groups[fitting, column] = np.where((found >= 0) & ~is_empty, found, -1)
        return groups

    def longest(
        self, prompt: str, place: int, room: int, groups: Sequence[int]
    ) -> FoundPart | None:
        """The longest part that stands at a place; of several texts that have it, any.

        Args:
            prompt: The prompt.
            place: Where a head begins, or a tail ends.
            room: Most characters of it.
            groups: As ``groups_at`` says of the place.
        """
        live = self._live_groups()
        best, best_chars = "", 0
        for group in groups:
            if group < 0:
                continue
            for text in self._neighbours(prompt, place, room, live, group):
                num_chars = self._common(text, prompt, place, room)
                if num_chars > best_chars and num_chars >= least_part(len(text)):
                    best, best_chars = text, num_chars
        if not best_chars:
            return None
        start = place if self.is_head else place - best_chars
        return FoundPart(best, start, start + best_chars)

    def _neighbours(
        self, prompt: str, place: int, room: int, live: _Groups, group: int
    ) -> Iterator[str]:
        """The texts of a group that one must compare: those beside the prompt in their order."""
        first, last = int(live.starts[group]), int(live.starts[group + 1])
        if last - first > 1:
            if self.is_head:
                probe = prompt[place : place + room]
                key: Callable[[int], str] = self._texts.__getitem__
            else:
                probe = prompt[place - room : place][::-1]
                key = self._backwards
            middle = bisect_left(live.rows, probe, first, last, key=key)
            first, last = max(first, middle - 1), min(last, middle + 1)
        for row in live.rows[first:last].tolist():
            yield self._texts[row]

    def _backwards(self, row: int) -> str:
        return self._texts[row][::-1]

    def _common(self, text: str, prompt: str, place: int, room: int) -> int:
        """How many characters of a text stand at a place, from its outer end inwards."""
        low, high = 0, min(len(text), room)
        while low < high:
            middle = (low + high + 1) // 2
            if self.is_head:
                is_same = prompt.startswith(text[low:middle], place + low)
            else:
                inner = text[len(text) - middle : len(text) - low]
                is_same = prompt.endswith(inner, 0, place - low)
            if is_same:
                low = middle
            else:
                high = middle - 1
        return low

    def _live_groups(self) -> _Groups:
        live, num_changes = self._live, self.num_changes
        if live.num_changes != num_changes:
            is_live = self._is_live[self._rows]
            num_before = np.concatenate(([0], np.cumsum(is_live)))
            live = _Groups(num_changes, self._rows[is_live], num_before[self._starts])
            self._live = live
        return live


def find_parts(
    prompt: str,
    hashes: WindowHashes,
    outer: HashArray,
    gaps: IntArray,
    searches: Sequence[PartSearch],
) -> Iterator[FoundPart]:
    """The parts in the gaps of a prompt, none overlapping another.

    Heads are given from left to right: at each place the longest wins, and the search goes on
    behind it. Tails are given from right to left, likewise.

    Args:
        prompt: The prompt.
        hashes: Its hashes.
        outer: Those of all windows of ``MIN_PART_CHARS`` characters.
        gaps: As for ``PartSearch.candidates``.
        searches: All of heads, or all of tails.
    """
    if not len(gaps):
        return
    walks = [_Walk(search, hashes, *search.candidates(outer, gaps)) for search in searches]
    while True:
        orders = [walk.order for walk in walks if walk.order is not None]
        if not orders:
            return
        order = min(orders)
        found = [walk.longest(prompt) for walk in walks if walk.order == order]
        parts = [part for part in found if part is not None]
        if parts:
            best = max(parts, key=lambda part: part.end - part.start)
            order += best.end - best.start - 1
            yield best
        for walk in walks:
            walk.go_on(order + 1, has_found=bool(parts))


class _Walk:
    """Goes along the places of a prompt where one search may find a part.

    Places are looked up block by block. What is found spares the places that it covers, so blocks
    are small behind it, and twice as large wherever one held nothing.
    """

    def __init__(
        self, search: PartSearch, hashes: WindowHashes, places: IntArray, room: IntArray
    ) -> None:
        self._search = search
        self._hashes = hashes
        self._places = places
        self._room = room
        self._orders = places if search.is_head else -places  # rising for both
        self._next = self._block_end = 0
        self._block = _FIRST_BLOCK
        self._hits = np.zeros(0, dtype=np.int64)
        self._groups = np.zeros((0, len(_STEPS)), dtype=np.int64)
        self.order: int | None = None
        self._seek()

    def longest(self, prompt: str) -> FoundPart | None:
        """The longest part where the walk stands."""
        index = self._next
        groups = self._groups[np.searchsorted(self._hits, index)].tolist()
        place, room = int(self._places[index]), int(self._room[index])
        return self._search.longest(prompt, place, room, groups)

    def go_on(self, order: int, *, has_found: bool) -> None:
        """Go to the next place in the order of the walk, ``order`` or behind it."""
        if has_found:
            self._block = _FIRST_BLOCK
        self._next = max(self._next, int(np.searchsorted(self._orders, order)))
        self._seek()

    def _seek(self) -> None:
        """Go to the next place where a part seems to stand, the present one included."""
        while self._next < len(self._places):
            if self._next >= self._block_end:
                self._look_up()
            hit = int(np.searchsorted(self._hits, self._next))
            if hit < len(self._hits):
                self._next = int(self._hits[hit])
                self.order = int(self._orders[self._next])
                return
            self._next = self._block_end
            self._block *= 2
        self.order = None

    def _look_up(self) -> None:
        block = slice(self._next, self._next + self._block)
        groups = self._search.groups_at(self._hashes, self._places[block], self._room[block])
        hits = np.flatnonzero((groups >= 0).any(axis=1))
        self._hits, self._groups = hits + self._next, groups[hits]
        self._block_end = self._next + len(groups)


def _hash_ends(
    texts: Sequence[str], owners: IntArray, least: IntArray
) -> tuple[tuple[HashArray, HashArray], tuple[HashArray, HashArray]]:
    """For heads and for tails: hashes of the least parts, and of their outer characters."""
    arrays = [np.empty(len(owners), dtype=np.uint64) for _ in range(4)]
    for first in range(0, len(owners), _BATCH_TEXTS):
        batch = slice(first, first + _BATCH_TEXTS)
        lengths = least[batch]
        pairs = list(zip(owners[batch].tolist(), lengths.tolist(), strict=True))
        ends = np.cumsum(lengths)
        starts, outer = ends - lengths, np.full(len(ends), MIN_PART_CHARS)
        heads = WindowHashes(code_points("".join(texts[row][:least] for row, least in pairs)))
        tails = WindowHashes(code_points("".join(texts[row][-least:] for row, least in pairs)))
        for array, hashes in zip(
            arrays,
            (
                heads.at(starts, lengths),
                heads.at(starts, outer),
                tails.at(starts, lengths),
                tails.at(ends - outer, outer),
            ),
            strict=True,
        ):
            array[batch] = hashes
    return (arrays[0], arrays[1]), (arrays[2], arrays[3])
