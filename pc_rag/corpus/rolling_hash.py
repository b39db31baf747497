"""Hashes of any window of a text in constant time, vectorised.

With code points ``c[j]`` scrambled to 64 bits and an odd base ``B``::

    prefix[i]        = sum of c[j] * B**j for j < i                         (mod 2**64)
    hash(start, len) = (prefix[start + len] - prefix[start]) * B**-start    (mod 2**64)

Texts can be built whose different windows have equal hashes (Thue-Morse strings), so a hash only
proposes; whoever uses it compares the texts.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
_INVERSE_BASE = pow(_BASE, -1, 1 << 64)
_SCRAMBLE = np.uint64(0xBF58476D1CE4E5B9)
_LENGTH_SALT = np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(31)


class _Powers:
    """``B**j`` and ``B**-j`` for all ``j`` up to the longest text so far; 16 bytes each ``j``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables = (np.ones(1, np.uint64), np.ones(1, np.uint64))

    def up_to(self, num_chars: int) -> tuple[HashArray, HashArray]:
        tables = self._tables
        if len(tables[0]) > num_chars:
            return tables
        with self._lock:
            size = 1 << (num_chars + 1).bit_length()
            tables = (_powers(_BASE, size), _powers(_INVERSE_BASE, size))
            self._tables = tables
        return tables


def _powers(base: int, size: int) -> HashArray:
    factors = np.full(size, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_POWERS = _Powers()


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """``[num_chars]`` code points of a text; lone surrogates included."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class WindowHashes:
    """Hashes of the windows of one text. Immutable.

    Args:
        points: ``[num_chars]`` code points.
    """

    __slots__ = ("_inverse_powers", "_prefix", "num_chars")

    def __init__(self, points: npt.NDArray[np.uint32]) -> None:
        self.num_chars = len(points)
        powers, self._inverse_powers = _POWERS.up_to(self.num_chars)
        scrambled = (points.astype(np.uint64) + np.uint64(1)) * _SCRAMBLE
        scrambled ^= scrambled >> _SHIFT
        scrambled *= _LENGTH_SALT
        scrambled *= powers[: self.num_chars]
        self._prefix = np.zeros(self.num_chars + 1, dtype=np.uint64)
        np.cumsum(scrambled, out=self._prefix[1:])

    def at(self, starts: IntArray, lengths: IntArray) -> HashArray:
        """Hashes of the windows ``[start, start + length)``; lengths take part in the hash.

        Args:
            starts: ``[num_windows]`` first characters.
            lengths: ``[num_windows]`` numbers of characters; no window ends behind the text.

        Returns:
            ``[num_windows]`` hashes, uniform in their high bits.
        """
        sums = self._prefix[starts + lengths] - self._prefix[starts]
        return _finish(sums * self._inverse_powers[starts], lengths)

    def all_of_length(self, length: int) -> HashArray:
        """Hashes of every window of one length, ``[max(0, num_chars - length + 1)]``."""
        num_windows = max(0, self.num_chars - length + 1)
        sums = self._prefix[length : length + num_windows] - self._prefix[:num_windows]
        return _finish(sums * self._inverse_powers[:num_windows], length)


def _finish(sums: HashArray, lengths: IntArray | int) -> HashArray:
    # The low bits of a polynomial mod 2**64 hardly depend on the text; a multiplication and a shift
    # carry them up and the good ones down.
    mixed = sums + np.asarray(lengths).astype(np.uint64) * _LENGTH_SALT
    mixed ^= mixed >> _SHIFT
    mixed *= _SCRAMBLE
    return mixed


class HashFilter:
    """A bit array over hashes: says no for nearly all that are not among them. Immutable.

    Memory: one to two times ``bits_per_key`` bytes a key.

    Args:
        keys: ``[num_keys]`` hashes.
        bits_per_key: Of so many others about one passes.
    """

    __slots__ = ("_seen", "_shift")

    def __init__(self, keys: HashArray, *, bits_per_key: int) -> None:
        num_bits = max(10, (len(keys) * bits_per_key).bit_length())
        self._shift = np.uint64(64 - num_bits)
        self._seen = np.zeros(1 << num_bits, dtype=np.bool_)
        self._seen[keys >> self._shift] = True

    def candidates(self, hashes: HashArray) -> IntArray:
        """Rising indices of the hashes that may be among the keys."""
        return np.flatnonzero(self._seen[hashes >> self._shift])


class HashTable:
    """Immutable map from hashes to row numbers, looked up by the array.

    Keys lie sorted; ``_starts`` says for every value of their top bits where its keys begin, so a
    look-up reads one or two neighbouring keys. Memory: 12 bytes a key, and 4 to 8 for the starts.

    Args:
        keys: ``[num_keys]`` hashes; of equal ones the first counts.
    """

    __slots__ = ("_keys", "_rows", "_shift", "_starts")

    def __init__(self, keys: HashArray) -> None:
        unique, first = np.unique(keys, return_index=True)
        num_bits = max(1, len(unique).bit_length())
        self._shift = np.uint64(64 - num_bits)
        tops = np.arange(1 << num_bits, dtype=np.uint64) << self._shift
        self._starts = np.searchsorted(unique, tops).astype(np.int32)
        # The largest hash ends every walk along the keys; it stands for no row.
        self._keys = np.append(unique, np.uint64(2**64 - 1))
        self._rows = np.append(first, -1).astype(np.int32)

    def find(self, keys: HashArray) -> IntArray:
        """For each key the row it had in the constructor, or -1."""
        places = self._starts[keys >> self._shift]
        stored = self._keys[places]
        behind = np.flatnonzero(stored < keys)
        while len(behind):
            places[behind] += 1
            stored[behind] = self._keys[places[behind]]
            behind = behind[stored[behind] < keys[behind]]
        return np.where(stored == keys, self._rows[places], -1).astype(np.int64)
