"""The books of one tier: who is resident, how large, who holds whom, and who has to go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.errors import ConfigError, StoreFull
from pc_rag.kv.base import StoreStats
from pc_rag.kv.entry_name import EntryName
from pc_rag.kv.policy import EvictionPolicy, LruPolicy
from pc_rag.types import MissReason, Tier

if TYPE_CHECKING:
    from pc_rag.kv.key import EntryAddress
    from pc_rag.types import ModuleKey


@dataclass(slots=True, eq=False)
class Record:
    """One resident entry.

    Attributes:
        name: What names it.
        num_bytes: Bytes counted against the capacity.
        is_pinned: Never evicted.
        num_leases: Claims held; not evicted while there is one.
    """

    name: EntryName
    num_bytes: int
    is_pinned: bool = False
    num_leases: int = 0


class Ledger:
    """Books of one tier. Not thread-safe: the tier calls it under its lock.

    Args:
        tier: The tier, for statistics and messages.
        capacity_bytes: Limit on resident and reserved bytes; ``None`` for none.
        policy: Order of eviction; least recently used by default.
        is_held_in_leases: Whether the bytes of a removed entry stay resident until its last lease
            is released (memory), or are gone at once (disk: a lease has its own copy).

    Raises:
        ConfigError: The capacity is negative.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        capacity_bytes: int | None,
        policy: EvictionPolicy | None = None,
        is_held_in_leases: bool = False,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ConfigError(
                f"{tier.value} tier: capacity_bytes is {capacity_bytes}; it must be 0 or more, or "
                f"None where no limit is wanted"
            )
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self.num_hits = 0
        self.num_misses = 0
        self.num_evictions = 0
        self._policy: EvictionPolicy = LruPolicy() if policy is None else policy
        self._is_held_in_leases = is_held_in_leases
        self._records: dict[ModuleKey, Record] = {}
        self._by_content: dict[str, list[Record]] = {}
        self._resident_bytes = 0
        self._reserved_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are resident, or promised to a put that is under way."""
        return self._resident_bytes + self._reserved_bytes

    @property
    def records(self) -> tuple[Record, ...]:
        """Every resident entry, in no order."""
        return tuple(self._records.values())

    def get(self, key: ModuleKey) -> Record | None:
        """The resident entry of that key."""
        return self._records.get(key)

    def like(self, name: EntryName) -> tuple[EntryName, ...]:
        """Resident entries of the same text, model and dtype: at any start, behind any context."""
        found = (record.name for record in self._by_content.get(name.content_id, ()))
        return tuple(each for each in found if each.model_id == name.model_id)

    def add(self, name: EntryName, num_bytes: int, *, is_pinned: bool = False) -> Record:
        """Enter an entry as resident and just used. The key must not be resident."""
        record = Record(name, num_bytes, is_pinned)
        self._records[name.key] = record
        self._by_content.setdefault(name.content_id, []).append(record)
        self._resident_bytes += num_bytes
        if not is_pinned:
            self._policy.added(name.key, num_bytes)
        return record

    def drop(self, record: Record) -> None:
        """Forget an entry. Leases on it stay valid; forgetting it twice is harmless."""
        key, content_id = record.name.key, record.name.content_id
        if self._records.get(key) is not record:
            return
        del self._records[key]
        self._policy.removed(key)
        siblings = self._by_content[content_id]
        siblings.remove(record)
        if not siblings:
            del self._by_content[content_id]
        if not (self._is_held_in_leases and record.num_leases):
            self._resident_bytes -= record.num_bytes

    def claim(self, record: Record) -> None:
        """Count a lease, which is a use."""
        record.num_leases += 1
        self._policy.used(record.name.key)

    def touch(self, key: ModuleKey) -> None:
        """Count a use; of an entry that is not resident, nothing."""
        self._policy.used(key)

    def unclaim(self, record: Record) -> None:
        """Count a lease's end."""
        record.num_leases -= 1
        was_dropped = self._records.get(record.name.key) is not record
        if self._is_held_in_leases and was_dropped and not record.num_leases:
            self._resident_bytes -= record.num_bytes

    def pin(self, record: Record, *, is_pinned: bool) -> None:
        """Protect an entry from eviction, or stop protecting it."""
        if record.is_pinned == is_pinned:
            return
        record.is_pinned = is_pinned
        if is_pinned:
            self._policy.removed(record.name.key)
        else:
            self._policy.added(record.name.key, record.num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Promise bytes to a put; ``unreserve`` takes the promise back."""
        self._reserved_bytes += num_bytes

    def unreserve(self, num_bytes: int) -> None:
        """Take a promise back: the put failed, or its entry is about to be added."""
        self._reserved_bytes -= num_bytes

    def plan_eviction(self, num_bytes: int) -> tuple[Record, ...]:
        """Who has to go so that ``num_bytes`` more fit. Nothing is dropped yet: all or nothing.

        Raises:
            StoreFull: They would not fit even then.
        """
        if self.capacity_bytes is None:
            return ()
        excess = self.used_bytes + num_bytes - self.capacity_bytes
        victims: list[Record] = []
        if excess > 0 and num_bytes <= self.capacity_bytes:
            for key in self._policy.candidates():
                record = self._records[key]
                if record.num_leases:
                    continue
                victims.append(record)
                excess -= record.num_bytes
                if excess <= 0:
                    break
        if excess > 0:
            raise StoreFull(
                f"{self.tier.value} tier: {num_bytes:,} bytes do not fit into a capacity of "
                f"{self.capacity_bytes:,}: {self.used_bytes:,} are in use, and what is not leased "
                f"or pinned frees too little; raise the capacity, or remove or unpin entries"
            )
        return tuple(victims)

    def miss_reason(self, address: EntryAddress) -> MissReason:
        """Why an address whose key is not resident is missing, as far as these books know."""
        siblings = self._by_content.get(address.content_id)
        if not siblings:
            return MissReason.NOT_STORED
        model_id = EntryName.of(address).model_id
        if any(record.name.model_id == model_id for record in siblings):
            return MissReason.OTHER_PREFIX
        return MissReason.FINGERPRINT

    def stats(self, *, extra_bytes: int = 0, num_quarantined: int = 0) -> StoreStats:
        """The numbers so far; ``extra_bytes`` are resident without being an entry."""
        return StoreStats(
            tier=self.tier,
            num_entries=len(self._records),
            resident_bytes=self._resident_bytes + extra_bytes,
            capacity_bytes=self.capacity_bytes,
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_evictions=self.num_evictions,
            num_quarantined=num_quarantined,
        )
