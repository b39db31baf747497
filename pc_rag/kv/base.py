"""The contract of everything that holds entries.

A tier (memory, disk) and a stack of tiers promise the same, and one suite of contract tests runs
over all of them:

* an entry is visible when it is complete, and never changes afterwards;
* ``put`` of what is already there changes nothing;
* resident bytes never exceed the capacity, and a leased or pinned entry is never evicted;
* bytes that are not what was written are never served;
* a failing medium raises ``StoreIOError`` or is reported as a miss with reason ``io``; it never
  removes an entry.

Every method may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from pc_rag.kv.entry import Entry
    from pc_rag.kv.key import EntryAddress
    from pc_rag.types import MissReason, ModuleKey, Tier


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Where an entry lies, or why it does not.

    Attributes:
        key: The entry asked for.
        tier: The nearest tier that holds it; ``None`` on a miss.
        miss_reason: Why no tier holds it; ``None`` on a hit.
    """

    key: ModuleKey
    tier: Tier | None
    miss_reason: MissReason | None = None

    @property
    def is_hit(self) -> bool:
        """Whether the entry can be leased."""
        return self.tier is not None


class Lease(Protocol):
    """A claim on one entry: while it is held the entry stays resident and readable.

    Use it as a context manager, or call ``release`` exactly when done; releasing twice is harmless.
    """

    @property
    def entry(self) -> Entry:
        """The entry, its tensors on the device that was asked for. Not to be modified."""
        ...

    @property
    def tier(self) -> Tier:
        """The tier that the bytes came from."""
        ...

    @property
    def load_seconds(self) -> float:
        """Time spent bringing the bytes to the device."""
        ...

    def release(self) -> None:
        """Give the claim back."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds and did.

    Attributes:
        tier: The tier.
        num_entries: Entries resident.
        resident_bytes: Bytes they occupy, as counted against the capacity.
        capacity_bytes: Limit on ``resident_bytes``; ``None`` where there is none.
        num_hits: Leases served by this tier.
        num_misses: Lookups this tier could not serve.
        num_evictions: Entries dropped to make room.
        num_quarantined: Damaged files set aside.
    """

    tier: Tier
    num_entries: int
    resident_bytes: int
    capacity_bytes: int | None
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_quarantined: int = 0


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """Result of reading every entry back.

    Attributes:
        num_checked: Entries read.
        damaged: Keys whose bytes were wrong; they are quarantined.
    """

    num_checked: int
    damaged: tuple[ModuleKey, ...] = field(default=())


class KVStore(Protocol):
    """What the engine asks of a tier or of a stack of tiers."""

    @property
    def generation(self) -> str:
        """An id that lives with the stored entries, and is another one when they were all deleted.

        The same in every process that shares a store, and over restarts where it is durable; new
        once its medium was emptied by hand, also under a running process. Who remembers what was
        stored, such as a cache of finished work, remembers this with it. Of a stack, that of the
        farthest tier. Entries that were evicted or removed do not change it.

        Raises:
            StoreIOError: The medium failed.
        """
        ...

    def lookup(self, address: EntryAddress) -> LookupResult:
        """Say where the entry lies, reading as little as possible and moving nothing.

        Token ids are compared on a hit. On a miss the reason tells text that was never stored from
        text that is stored for another model, prefix or dtype.
        """
        ...

    def is_stored(self, address: EntryAddress) -> bool:
        """Whether the tier that counts holds the entry: in a stack, the farthest one.

        What only nearer ones hold can be leased, and is gone when they drop it.
        """
        ...

    def starts(self, address: EntryAddress) -> tuple[int, ...]:
        """The starts at which entries of an address's tokens are held, rising, each once.

        Of its model, dtype and tenant; whatever they attended. Where positions are fixed
        (``Placement.FIXED``) a module has one entry for each start it was asked for at. Tells what
        this process knows of, without counting as a use.

        Raises:
            StoreIOError: The medium failed.
        """
        ...

    def lease(self, address: EntryAddress, device: torch.device) -> Lease:
        """Claim an entry with its tensors on ``device``.

        Raises:
            EntryNotFound: No tier holds it.
            CorruptEntry: Its file is damaged (now quarantined).
            StoreIOError: The medium failed; the entry may be intact.
        """
        ...

    def put(self, entry: Entry, *, pinned: bool = False) -> None:
        """Store an entry. Idempotent; complete when it returns, and durable where the tier is.

        Args:
            entry: The entry. The store may keep its tensors; the caller must not modify them.
            pinned: Never evict it.

        Raises:
            StoreFull: It does not fit, even after evicting all that may be evicted.
            StoreIOError: The medium failed; nothing half-written is visible.
        """
        ...

    def pin(self, key: ModuleKey, *, pinned: bool = True) -> bool:
        """Protect an entry from eviction, or stop protecting it. Whether it is there.

        A pin lasts as long as the entry: where the tier is durable, over restarts.

        Raises:
            StoreIOError: The medium failed.
        """
        ...

    def touch(self, key: ModuleKey) -> None:
        """Note a use that this store did not see; of an entry that is not here, nothing.

        A stack tells its farther tiers what the nearer ones serve, so that they do not evict what
        is used most.
        """
        ...

    def remove(self, key: ModuleKey) -> bool:
        """Forget an entry; readers that hold a lease keep theirs. Whether it was there."""
        ...

    def stats(self) -> tuple[StoreStats, ...]:
        """Numbers, one per tier, nearest first."""
        ...

    def check_integrity(self) -> IntegrityReport:
        """Read every entry and verify its bytes; quarantine what is damaged."""
        ...

    def close(self) -> None:
        """Release what the store holds. Idempotent; later calls raise ``StoreError``."""
        ...
