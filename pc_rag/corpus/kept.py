"""Entries that prompts ask to be kept: noted when planned, renewed when used, collected when old.

The catalog's settings hold one note an entry, ``kept <key>``: bytes, when it expires (seconds of
the wall clock), where it lies in its prompt, and a digest of the prompt up to its end. Notes are
written before the entry is, so that no crash leaves an entry that nobody knows. The store may evict
such an entry at any time; the next prompt that wants it encodes it again.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections import defaultdict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Self

from pc_rag.corpus.cache_points import chain_of, counting_ends
from pc_rag.corpus.prefixes import longest_prefix_of
from pc_rag.types import ModuleKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pc_rag.corpus.cache_points import ChainLink, TokenPoint
    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache
    from pc_rag.kv.base import KVStore
    from pc_rag.types import TokenIds

_SETTING = "kept "
_PREFIX_SETTING = "prefix "
"""Begins the settings of ``prefix_set``, whose last word is the key of a prefix's own entry."""

_RENEWALS_PER_TTL = 10
"""A note is written again once this part of its time has passed: not at every request."""

_MAX_LINKS = 8
"""Entries of a chain that grew with a conversation; a longer one is encoded anew as one."""


@dataclass(frozen=True, slots=True)
class _Note:
    """What is known of one kept entry.

    Attributes:
        num_bytes: Of its keys and values.
        expires_at: Seconds of the wall clock.
        start: Tokens of the prompt before it.
        end: Tokens of the prompt up to its end.
        digest: Of those, and of the engine's kind of entries.
    """

    num_bytes: int
    expires_at: float
    start: int
    end: int
    digest: str

    @classmethod
    def parse(cls, value: str) -> Self | None:
        """Read a note; ``None`` where it is not one that was written here."""
        try:
            num_bytes, expires_at, start, end, digest = value.split()
            note = cls(int(num_bytes), float(expires_at), int(start), int(end), digest)
        except ValueError:
            return None
        is_sound = note.num_bytes >= 0 and 0 <= note.start < note.end
        return note if is_sound and math.isfinite(note.expires_at) else None

    def __str__(self) -> str:
        return f"{self.num_bytes} {self.expires_at!r} {self.start} {self.end} {self.digest}"


class KeptEntries:
    """Plans the chains of prompts with cache points, and notes their entries. Thread-safe.

    Args:
        engine: Whose model, store and configuration decide.
        catalog: Keeps the notes.
        clock: Seconds of the wall clock, which processes share.
    """

    def __init__(
        self, engine: PromptCache, catalog: Catalog, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._clock = clock
        self._lock = Lock()
        self._notes = {
            ModuleKey(name.removeprefix(_SETTING)): note
            for name, value in catalog.settings(_SETTING).items()
            if (note := _Note.parse(value)) is not None
        }

    def chain(
        self,
        head: TokenIds,
        points: Sequence[TokenPoint],
        prefixes: Iterable[CorpusPrefix],
    ) -> tuple[ChainLink, ...]:
        """The chain of a prompt with cache points; its entries are noted.

        Entries kept for earlier prompts that began the same are a part of it, whatever points they
        were kept for: a point that moves on with a conversation costs what came since.

        Args:
            head: The prompt's tokens up to its first chunk.
            points: Its cache points.
            prefixes: What prompts are served from.

        Returns:
            The entries in order; none where no point counts, or a prefix of the corpus holds all
            that was to be kept.
        """
        if not points:
            return ()
        known = longest_prefix_of(head, prefixes)
        base = 0 if known is None else len(known.token_ids)
        held = self._held_ends(head[: points[-1].end], base=base)
        ends = held + counting_ends(points, start=held[-1] if held else base)
        if len(ends) > _MAX_LINKS:
            ends = counting_ends(points, start=base)
        chain = chain_of(self._engine, head, ends, points, known=known)
        self._note(head, [link for link in chain if link.ttl_seconds is not None])
        return chain

    def _held_ends(self, kept: TokenIds, *, base: int) -> tuple[int, ...]:
        """Ends of the longest chain of noted entries that holds the first of these tokens.

        Args:
            kept: The prompt up to its last point.
            base: Tokens of it that a prefix of the corpus holds.
        """
        now = self._clock()
        starts: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        with self._lock:
            for note in self._notes.values():
                if base < note.end <= len(kept) and now < note.expires_at:
                    starts[note.end][note.digest].add(note.start)
        chains: dict[int, tuple[int, ...]] = {base: ()}
        for end, digest in zip(sorted(starts), self._digests(kept, sorted(starts)), strict=True):
            found = [chains[start] for start in starts[end][digest] if start in chains]
            if found:
                chains[end] = (*min(found, key=len), end)
        return chains[max(chains)]

    def _digests(self, token_ids: TokenIds, ends: Iterable[int]) -> list[str]:
        """Digests of the first tokens, up to each of some rising ends."""
        engine = self._engine
        kind = f"{engine.loaded.fingerprint} {engine.storage_dtype} {engine.config.tenant}"
        digest = hashlib.sha256(kind.encode())
        digests: list[str] = []
        start = 0
        for end in ends:
            digest.update(struct.pack(f"<{end - start}q", *token_ids[start:end]))
            digests.append(digest.hexdigest())
            start = end
        return digests

    def _note(self, head: TokenIds, links: Sequence[ChainLink]) -> None:
        """Note entries, or that they are used; what was noted lately is not written again."""
        now = self._clock()
        changed: dict[ModuleKey, _Note] = {}
        digests = self._digests(head, [link.end for link in links])
        for link, digest in zip(links, digests, strict=True):
            address, ttl = link.recipe.address, link.ttl_seconds or 0.0
            noted = self._notes.get(address.key)
            if noted is None or now + ttl - noted.expires_at >= ttl / _RENEWALS_PER_TTL:
                num_bytes = len(address.token_ids) * self._engine.bytes_per_token
                note = _Note(num_bytes, now + ttl, address.start, link.end, digest)
                changed[address.key] = note
        if changed:
            self._catalog.put_settings({_SETTING + key: str(n) for key, n in changed.items()})
            with self._lock:
                live = {key: note for key, note in self._notes.items() if note.expires_at > now}
                self._notes = live | changed


def collect_expired(
    catalog: Catalog, store: KVStore, *, clock: Callable[[], float] = time.time
) -> Mapping[ModuleKey, int]:
    """Remove the kept entries whose time is over, or whose notes cannot be read; needs no model.

    Args:
        catalog: Has the notes.
        store: Holds the entries.
        clock: Seconds of the wall clock.

    Returns:
        The entries that left the store, with their bytes of keys and values.
    """
    now = clock()
    removed: dict[ModuleKey, int] = {}
    settings = catalog.settings(_SETTING)
    notes = {name: _Note.parse(value) for name, value in settings.items()}
    over = {n: note for n, note in notes.items() if note is None or note.expires_at <= now}
    needed = _needed_otherwise(catalog) if over else frozenset()
    for name, note in over.items():
        key = ModuleKey(name.removeprefix(_SETTING))
        if key not in needed and store.remove(key):
            removed[key] = note.num_bytes if note else 0
    # Behind the entries, and only where unchanged: one that is used again meanwhile stays noted.
    catalog.delete_unchanged({name: settings[name] for name in over})
    return removed


def _needed_otherwise(catalog: Catalog) -> frozenset[ModuleKey]:
    """Entries of chunks and prefixes: a kept text may be one of them, with the same key."""
    prefixes = catalog.settings(_PREFIX_SETTING)
    return catalog.entries.keys() | {ModuleKey(name.rpartition(" ")[2]) for name in prefixes}
