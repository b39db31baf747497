"""Where requests and ingestion get entries from: the store, or the encoder on a miss."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Self

from pc_rag.errors import CorruptEntry, EntryNotFound, LayoutError, StoreFull, StoreIOError
from pc_rag.metrics import Phase
from pc_rag.model.encoder import EncodeJob, Encoder, context_segments
from pc_rag.types import MissReason, Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from pc_rag.engine.request import EntryRecipe
    from pc_rag.kv.base import KVStore, Lease
    from pc_rag.kv.entry import Entry
    from pc_rag.kv.key import EntryAddress
    from pc_rag.metrics import PrefillRate, Stopwatch
    from pc_rag.model.runner import Runner
    from pc_rag.types import ModuleKey, Tier

_ENCODE_WINDOW = 64
"""Entries whose encoding is planned together, so that like lengths meet in one batch."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where one entry came from.

    Attributes:
        tier: The tier that served it; ``None`` where it had to be encoded.
        miss_reason: Why it had to be encoded; ``None`` on a hit.
    """

    tier: Tier | None
    miss_reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """One entry that ingestion made.

    Attributes:
        key: The entry.
        num_tokens: Tokens encoded.
        num_bytes: Bytes of its keys and values.
        refusal: Why the store did not take it; ``None`` where it did.
    """

    key: ModuleKey
    num_tokens: int
    num_bytes: int
    refusal: StoreFull | None = None


@dataclass(slots=True, eq=False)
class Acquired:
    """Entries at hand, leased until released. A context manager.

    Attributes:
        entries: The entries by key, on the model's device.
        served: Where each came from.
    """

    entries: dict[ModuleKey, Entry] = field(default_factory=dict)
    served: dict[ModuleKey, Served] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    def release(self) -> None:
        """Give every lease back; the entries must not be used any more."""
        self.entries.clear()
        while self.leases:
            self.leases.pop().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class EntrySource:
    """Leases entries from a store and encodes what it lacks. Thread-safe.

    Args:
        store: Where entries are kept.
        runner: The model that encodes them.
        rate: Learns from encoding how fast the model prefills.
        keeps_siblings: Whether the use of an entry counts as a use of its siblings, so that they
            are evicted together.
        max_position: Position IDs that the model has learned, where its positions are fixed; of
            no meaning elsewhere, where entries are encoded farther and read nearer.
    """

    def __init__(
        self,
        store: KVStore,
        runner: Runner,
        *,
        rate: PrefillRate | None = None,
        keeps_siblings: bool = False,
        max_position: int | None = None,
    ) -> None:
        self._store = store
        self._keeps_siblings = keeps_siblings
        is_fixed = runner.positions.placement is Placement.FIXED
        self._max_position = max_position if is_fixed else None
        self._encoder = Encoder(runner, rate=rate)
        self._device = runner.device

    def acquire(
        self,
        keys: Iterable[ModuleKey],
        recipes: Mapping[ModuleKey, EntryRecipe],
        *,
        watch: Stopwatch | None = None,
    ) -> Acquired:
        """Entries for one request: leased where stored, encoded and stored where not.

        A store that is full or failing does not fail the request: what was encoded is used anyway.

        Args:
            keys: The entries wanted.
            recipes: How to make each of them, and their contexts.
            watch: The request's clock.
        """
        keys = tuple(keys)
        if self._keeps_siblings:
            # Before the leases, which may evict, and after which what is read is most recent.
            for sibling in dict.fromkeys(each for key in keys for each in recipes[key].siblings):
                self._store.touch(sibling)
        return self._acquire(keys, recipes, {}, watch=watch)

    def _acquire(
        self,
        keys: Iterable[ModuleKey],
        recipes: Mapping[ModuleKey, EntryRecipe],
        encoded: dict[ModuleKey, Entry],
        *,
        watch: Stopwatch | None = None,
    ) -> Acquired:
        """See ``acquire``.

        Args:
            keys: The entries wanted.
            recipes: How to make each of them, and their contexts.
            encoded: What this call has encoded already, contexts included. Without it a store that
                keeps nothing would have the contexts of contexts encoded over and over.
            watch: The request's clock.
        """
        acquired = Acquired()
        missing: list[ModuleKey] = []
        try:
            for key in dict.fromkeys(keys):
                if key in encoded:
                    acquired.entries[key] = encoded[key]
                    continue
                with watch.measure(Phase.LOOKUP) if watch else nullcontext():
                    reason = self._lease(recipes[key], acquired, watch)
                if reason is not None:
                    missing.append(key)
                    acquired.served[key] = Served(None, reason)
            if missing:
                with watch.measure(Phase.ENCODE) if watch else nullcontext():
                    self._encode_for_request(missing, recipes, encoded)
                acquired.entries.update((key, encoded[key]) for key in missing)
        except BaseException:
            acquired.release()
            raise
        return acquired

    def encode(
        self,
        keys: Iterable[ModuleKey],
        recipes: Mapping[ModuleKey, EntryRecipe],
        *,
        pinned: bool = False,
    ) -> Iterator[Encoded]:
        """Encode entries and store them, whether they are stored already or not.

        Each is yielded once it is stored, or once the store refused it for lack of room; entries
        behind one context and of like length are computed together.

        Args:
            keys: The entries to make.
            recipes: How to make each of them, and their contexts.
            pinned: Never evict them.

        Raises:
            LayoutError: An entry lies beyond the positions that the model has learned.
            StoreIOError: The store's medium failed; what was yielded before is stored.
        """
        pending = iter(dict.fromkeys(keys))
        while window := list(islice(pending, _ENCODE_WINDOW)):
            for entry in self._computed(window, recipes, {}):
                refusal = None
                try:
                    self._store.put(entry, pinned=pinned)
                except StoreFull as error:
                    refusal = error
                yield Encoded(entry.address.key, entry.num_tokens, entry.num_bytes, refusal)

    def missing(self, recipes: Iterable[EntryRecipe]) -> list[ModuleKey]:
        """Keys of the recipes whose entries the store does not keep, each once, in order.

        What only a nearer tier holds is among them: it would be gone after a restart.
        """
        found = {recipe.address.key: recipe.address for recipe in recipes}
        return [key for key, address in found.items() if not self._store.is_stored(address)]

    def _lease(
        self, recipe: EntryRecipe, acquired: Acquired, watch: Stopwatch | None
    ) -> MissReason | None:
        """Lease one entry; why it cannot be leased otherwise."""
        address = recipe.address
        try:
            lease = self._store.lease(address, self._device)
        except EntryNotFound:
            return self._miss_reason(recipe)
        except CorruptEntry:
            return MissReason.CORRUPT
        except StoreIOError:
            return MissReason.IO
        acquired.leases.append(lease)
        acquired.entries[address.key] = lease.entry
        acquired.served[address.key] = Served(lease.tier)
        if watch is not None:
            watch.charge_load(lease.tier, lease.load_seconds)
        return None

    def _miss_reason(self, recipe: EntryRecipe) -> MissReason:
        try:
            reason = self._store.lookup(recipe.address).miss_reason or MissReason.NOT_STORED
        except StoreIOError:
            return MissReason.IO
        if reason is MissReason.OTHER_PREFIX and recipe.origin is not None:
            return MissReason.NOT_STORED  # what the store has of its text stands at another start
        return reason

    def _encode_for_request(
        self,
        missing: list[ModuleKey],
        recipes: Mapping[ModuleKey, EntryRecipe],
        encoded: dict[ModuleKey, Entry],
    ) -> None:
        for entry in self._computed(missing, recipes, encoded):
            encoded[entry.address.key] = entry
            try:
                self._store.put(entry)
            except (StoreFull, StoreIOError):
                continue  # served from this request's own copy; the next request misses again

    def _check_positions(self, addresses: Iterable[EntryAddress]) -> None:
        limit = self._max_position
        too_far = (each for each in addresses if limit is not None and each.span.end > limit)
        for address in too_far:
            raise LayoutError(
                f"context overflow: an entry of {len(address.token_ids)} tokens at position ID "
                f"{address.start} needs position IDs up to {address.span.end}, the model has "
                f"{limit}; use shorter texts, or a shorter prefix before them"
            )

    def _computed(
        self,
        keys: list[ModuleKey],
        recipes: Mapping[ModuleKey, EntryRecipe],
        encoded: dict[ModuleKey, Entry],
    ) -> Iterator[Entry]:
        """Compute entries, one context at a time; those of ``encoded`` are given as they are."""
        by_context: dict[tuple[ModuleKey, ...], list[ModuleKey]] = {}
        for key in keys:
            by_context.setdefault(recipes[key].context, []).append(key)
        for context, members in by_context.items():
            left = [key for key in members if key not in encoded]
            yield from (encoded[key] for key in members if key in encoded)
            if not left:
                continue
            self._check_positions([recipes[key].address for key in left])
            with self._acquire(context, recipes, encoded) as held:
                segments = context_segments([held.entries[key] for key in context])
                jobs = [EncodeJob(recipes[key].address, segments) for key in left]
                for _, entry in self._encoder.encode(jobs):
                    yield entry
