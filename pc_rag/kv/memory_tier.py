"""Entries in the memory of this process."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch

from pc_rag.errors import CorruptEntry, EntryNotFound, StoreError
from pc_rag.kv.base import IntegrityReport, LookupResult, StoreStats
from pc_rag.kv.entry_name import EntryName
from pc_rag.kv.lease import EntryLease
from pc_rag.kv.ledger import Ledger, Record
from pc_rag.kv.locks import KeyedLocks
from pc_rag.types import MissReason, Tier

if TYPE_CHECKING:
    from pc_rag.kv.entry import Entry
    from pc_rag.kv.key import EntryAddress
    from pc_rag.kv.policy import EvictionPolicy
    from pc_rag.types import ModuleKey

_WORD_BYTES = 8
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Held:
    """An entry and the digest its bytes had when it came."""

    entry: Entry
    digest: int


class MemoryTier:
    """A tier of ``Tier.HOST``; see ``pc_rag.kv.base.KVStore`` for what it promises.

    A lease on the CPU hands out the tier's own tensors, contiguous and without a copy; on another
    device it hands out a copy there, which is not counted. Bytes of an entry that is removed while
    leased stay counted until its last lease is released.

    Args:
        capacity_bytes: Limit on the bytes of keys and values held.
        policy: Order of eviction; least recently used by default.

    Raises:
        ConfigError: The capacity is negative.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy | None = None) -> None:
        self._ledger = Ledger(
            Tier.HOST, capacity_bytes=capacity_bytes, policy=policy, is_held_in_leases=True
        )
        self._held: dict[ModuleKey, _Held] = {}
        self._lock = Lock()
        self._key_locks = KeyedLocks()
        self._generation = secrets.token_hex(16)
        self._num_damaged = 0
        self._damaged: set[ModuleKey] = set()
        self._is_closed = False

    @property
    def generation(self) -> str:
        """See ``KVStore.generation``; every tier has its own."""
        self._check_open()
        return self._generation

    def lookup(self, address: EntryAddress) -> LookupResult:
        """See ``KVStore.lookup``."""
        with self._lock:
            self._check_open()
            held = self._held.get(address.key)
            if held is not None and held.entry.address.token_ids == address.token_ids:
                return LookupResult(address.key, Tier.HOST)
            self._ledger.num_misses += 1
            if held is not None or address.key in self._damaged:
                return LookupResult(address.key, None, MissReason.CORRUPT)
            return LookupResult(address.key, None, self._ledger.miss_reason(address))

    def is_stored(self, address: EntryAddress) -> bool:
        """See ``KVStore.is_stored``."""
        return self.lookup(address).is_hit

    def starts(self, address: EntryAddress) -> tuple[int, ...]:
        """See ``KVStore.starts``."""
        with self._lock:
            self._check_open()
            names = self._ledger.like(EntryName.of(address))
            return tuple(sorted({self._held[name.key].entry.address.start for name in names}))

    def lease(self, address: EntryAddress, device: torch.device) -> EntryLease:
        """See ``KVStore.lease``."""
        started = time.perf_counter()
        with self._lock:
            self._check_open()
            record, held = self._ledger.get(address.key), self._held.get(address.key)
            if record is None or held is None:
                raise EntryNotFound(
                    f"memory tier: no entry {address.key[:12]}; encode the module and put it"
                )
            if held.entry.address.token_ids != address.token_ids:
                raise CorruptEntry(
                    f"memory tier: entry {address.key[:12]} holds other tokens than the address "
                    f"asked for; remove it and encode the module again"
                )
            self._ledger.claim(record)
            self._ledger.num_hits += 1
        try:
            entry = _on_device(held.entry, device)
        except BaseException:
            self._unclaim(record)
            raise
        return EntryLease(
            entry,
            tier=Tier.HOST,
            load_seconds=time.perf_counter() - started,
            on_release=lambda: self._unclaim(record),
        )

    def put(self, entry: Entry, *, pinned: bool = False) -> None:
        """See ``KVStore.put``.

        Tensors that are contiguous, on the CPU and own their storage are kept as they are; others
        are copied, so that a slice does not keep its whole batch alive.
        """
        key = entry.address.key
        with self._key_locks.hold(key):
            with self._lock:
                self._check_open()
                record = self._ledger.get(key)
                if record is not None:
                    self._ledger.pin(record, is_pinned=record.is_pinned or pinned)
                    return
                for victim in self._ledger.plan_eviction(entry.num_bytes):
                    self._drop(victim)
                    self._ledger.num_evictions += 1
                self._ledger.reserve(entry.num_bytes)
            try:
                held = _hold(entry)
            except BaseException:
                with self._lock:
                    self._ledger.unreserve(entry.num_bytes)
                raise
            with self._lock:
                self._ledger.unreserve(entry.num_bytes)
                self._check_open()
                self._held[key] = held
                self._ledger.add(EntryName.of(entry.address), entry.num_bytes, is_pinned=pinned)
                self._damaged.discard(key)

    def pin(self, key: ModuleKey, *, pinned: bool = True) -> bool:
        """See ``KVStore.pin``."""
        with self._lock:
            self._check_open()
            record = self._ledger.get(key)
            if record is not None:
                self._ledger.pin(record, is_pinned=pinned)
            return record is not None

    def touch(self, key: ModuleKey) -> None:
        """See ``KVStore.touch``."""
        with self._lock:
            self._check_open()
            self._ledger.touch(key)

    def remove(self, key: ModuleKey) -> bool:
        """See ``KVStore.remove``."""
        with self._lock:
            self._check_open()
            record = self._ledger.get(key)
            if record is not None:
                self._drop(record)
            return record is not None

    def stats(self) -> tuple[StoreStats, ...]:
        """See ``KVStore.stats``."""
        with self._lock:
            self._check_open()
            return (self._ledger.stats(num_quarantined=self._num_damaged),)

    def check_integrity(self) -> IntegrityReport:
        """See ``KVStore.check_integrity``; an entry whose bytes were changed in place is dropped.

        The bytes are compared with a sum taken when the entry came, which finds any change of one
        eight-byte word.
        """
        with self._lock:
            self._check_open()
            held_by_key = dict(self._held)
        damaged = tuple(
            key for key, held in held_by_key.items() if _digest(held.entry) != held.digest
        )
        with self._lock:
            for key in damaged:
                record = self._ledger.get(key)
                if record is not None and self._held.get(key) is held_by_key[key]:
                    self._drop(record)
                    self._damaged.add(key)
                    self._num_damaged += 1
        return IntegrityReport(len(held_by_key), damaged)

    def close(self) -> None:
        """See ``KVStore.close``."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for record in self._ledger.records:
                self._drop(record)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError("memory tier: it was closed; open a new one")

    def _drop(self, record: Record) -> None:
        self._ledger.drop(record)
        self._held.pop(record.name.key, None)

    def _unclaim(self, record: Record) -> None:
        with self._lock:
            self._ledger.unclaim(record)


def _on_device(entry: Entry, device: torch.device) -> Entry:
    if device.type == "cpu":
        return entry
    return replace(entry, keys=entry.keys.to(device), values=entry.values.to(device))


def _hold(entry: Entry) -> _Held:
    keys, values = entry.keys.detach(), entry.values.detach()
    if not _owns_storage(keys, values):
        keys, values = _own(keys), _own(values)
    held = replace(entry, keys=keys, values=values)
    return _Held(held, _digest(held))


def _owns_storage(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the two tensors, contiguous on the CPU, are all that their storages hold."""
    for tensor in (keys, values):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return False
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (keys, values)}
    return sum(storage.nbytes() for storage in storages.values()) == keys.nbytes + values.nbytes


def _own(tensor: torch.Tensor) -> torch.Tensor:
    owned = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
    return owned.copy_(tensor)


def _digest(entry: Entry) -> int:
    """Sum of the entry's bytes as words: at 25 GB/s it costs little beside the copy that led here.

    A cryptographic digest or a CRC would cost more than reading the entry from a disk.
    """
    total = 0
    for tensor in (entry.keys, entry.values):
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        num_whole = len(data) // _WORD_BYTES * _WORD_BYTES
        words = data[:num_whole].view(np.uint64)
        # The factor tells keys from values; arithmetic is modulo 2**64, as numpy sums.
        total = total * 31 + int(words.sum(dtype=np.uint64)) + int(data[num_whole:].sum())
    return total
