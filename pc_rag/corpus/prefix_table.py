"""For a fixed set of texts: the longest one that begins at a place of a prompt.

The search is Waldvogel's binary search on prefix lengths (SIGCOMM 1997), which routers use for
addresses. Every text registers the hashes of those of its prefixes that a binary search for its
length visits, for 1000 = 512 + 256 + 128 + 64 + 32 + 8 characters the prefixes of 512, 768, 896,
960, 992 and 1000. At a place of the prompt the search goes down the powers of two and takes each
step whose prefix is registered. A prefix knows the longest text that it begins with itself (its
``best``), so a search that followed a long text which does not match in the end still gives the
right one.

The cost at a place is one look-up a power of two, however many texts share prefixes, and a filter
on the first ``MIN_CHARS`` characters spares nearly all places even that.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from pc_rag.corpus.rolling_hash import HashFilter, HashTable, WindowHashes, code_points

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from pc_rag.corpus.rolling_hash import HashArray, IntArray

MIN_CHARS = 16
"""Shorter texts cannot be registered."""

_FILTER_BITS_PER_TEXT = 32
_MAX_BATCH_CHARS = 1 << 18


class PrefixTable:
    """Longest-match look-up over a set of texts. Immutable; any thread may search.

    Memory: the texts, which are referred to and not copied, and about 150 bytes each.

    Args:
        texts: Distinct texts of at least ``MIN_CHARS`` characters.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = sorted(texts)
        lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        self.lengths: IntArray = lengths
        self._max_chars = int(lengths.max(initial=0))
        owners, prefix_lengths = _searched_prefixes(lengths)
        first = self._hash_prefixes(np.arange(len(texts)), MIN_CHARS)
        self._filter = HashFilter(first, bits_per_key=_FILTER_BITS_PER_TEXT)
        self._table = HashTable(self._hash_prefixes(owners, prefix_lengths))
        self._best, self._parents = _longest_texts(self.texts, owners, prefix_lengths)

    def _hash_prefixes(self, owners: IntArray, prefix_lengths: IntArray | int) -> HashArray:
        """Hashes of the first ``prefix_lengths`` characters of the texts ``owners``, ascending."""
        num_chars = np.broadcast_to(prefix_lengths, owners.shape)
        hashes = np.empty(len(owners), dtype=np.uint64)
        for first, last in _batches(self.lengths):
            hashed = WindowHashes(code_points("".join(self.texts[first:last])))
            starts = np.cumsum(self.lengths[first:last]) - self.lengths[first:last]
            begin, end = np.searchsorted(owners, (first, last))
            batch = slice(begin, end)
            hashes[batch] = hashed.at(starts[owners[batch] - first], num_chars[batch])
        return hashes

    def longest_at(
        self, prompt: WindowHashes, filter_hashes: HashArray
    ) -> tuple[IntArray, IntArray]:
        """Where texts seem to begin, and the longest at each place, by hash alone.

        Args:
            prompt: The prompt's hashes.
            filter_hashes: ``prompt.all_of_length(MIN_CHARS)``, which several tables share.

        Returns:
            Rising places in the prompt, and for each a row of ``texts``.
        """
        places = self._filter.candidates(filter_hashes)
        num_matched = np.zeros(len(places), dtype=np.int64)
        nodes = np.full(len(places), -1, dtype=np.int64)
        for bit in reversed(range(min(self._max_chars, prompt.num_chars).bit_length())):
            tried = num_matched + (1 << bit)
            inside = np.flatnonzero(places + tried <= prompt.num_chars)
            found = self._table.find(prompt.at(places[inside], tried[inside]))
            is_hit = found >= 0
            hits = inside[is_hit]
            num_matched[hits] += 1 << bit
            nodes[hits] = found[is_hit]
        best = np.where(nodes >= 0, self._best[nodes], -1) if len(self._best) else nodes
        is_match = best >= 0
        return places[is_match], best[is_match].astype(np.int64)

    def shorter(self, row: int) -> Iterator[str]:
        """The text of ``row``, then the texts that it begins with, longest first."""
        while row >= 0:
            yield self.texts[row]
            row = int(self._parents[row])


def _batches(lengths: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of texts whose characters fit a cache, or that are a single long text."""
    first = num_chars = 0
    for row, length in enumerate(lengths.tolist()):
        if num_chars and num_chars + length > _MAX_BATCH_CHARS:
            yield first, row
            first, num_chars = row, 0
        num_chars += length
    if num_chars:
        yield first, len(lengths)


def _searched_prefixes(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Owner and length of every prefix that the search for a text's whole length visits."""
    owners, prefix_lengths = [], []
    for bit in range(int(lengths.max(initial=0)).bit_length()):
        having = np.flatnonzero(lengths >> bit & 1)
        owners.append(having)
        prefix_lengths.append(lengths[having] >> bit << bit)
    if not owners:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    owner, length = np.concatenate(owners), np.concatenate(prefix_lengths)
    order = np.lexsort((length, owner))
    return owner[order], length[order]


def _longest_texts(
    texts: Sequence[str], owners: IntArray, prefix_lengths: IntArray
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For every prefix the longest text it begins with; for every text the next shorter one.

    Among sorted texts those that a text begins with lie on a stack, shortest first.
    """
    best = np.full(len(owners), -1, dtype=np.int32)
    parents = np.full(len(texts), -1, dtype=np.int32)
    first_prefix = np.searchsorted(owners, np.arange(len(texts) + 1)).tolist()
    stack: list[int] = []
    stack_lengths: list[int] = []
    for row, text in enumerate(texts):
        while stack and not text.startswith(texts[stack[-1]]):
            stack.pop()
            stack_lengths.pop()
        last_prefix = first_prefix[row + 1] - 1
        if stack:
            parents[row] = stack[-1]
            for prefix in range(first_prefix[row], last_prefix):
                depth = bisect_right(stack_lengths, int(prefix_lengths[prefix]))
                best[prefix] = stack[depth - 1] if depth else -1
        best[last_prefix] = row  # its whole length
        stack.append(row)
        stack_lengths.append(len(text))
    return best, parents
