"""Several tiers as one store."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pc_rag.errors import ConfigError, CorruptEntry, EntryNotFound, StoreFull, StoreIOError
from pc_rag.kv.base import IntegrityReport, LookupResult
from pc_rag.kv.lease import EntryLease
from pc_rag.kv.locks import KeyedLocks
from pc_rag.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.errors import StoreError
    from pc_rag.kv.base import KVStore, Lease, StoreStats
    from pc_rag.kv.entry import Entry
    from pc_rag.kv.key import EntryAddress
    from pc_rag.types import ModuleKey

_CPU = torch.device("cpu")
_TELLING_FIRST = (
    MissReason.CORRUPT,
    MissReason.IO,
    MissReason.OTHER_PREFIX,
    MissReason.FINGERPRINT,
    MissReason.NOT_STORED,
)
"""Of the reasons that several tiers give, the first in this order says most."""


class TieredStore:
    """A stack of tiers; see ``pc_rag.kv.base.KVStore`` for what it promises.

    The last tier is the one that counts: what it acknowledges is stored, and pins hold there. The
    nearer ones are caches of it: they take what fits without breaking a lease.

    Args:
        tiers: The tiers, nearest first; the store closes them.

    Raises:
        ConfigError: There is no tier.
    """

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        if not tiers:
            raise ConfigError("a tiered store needs at least one tier; none was given")
        self._tiers = tuple(tiers)
        self._key_locks = KeyedLocks()

    @property
    def generation(self) -> str:
        """See ``KVStore.generation``."""
        return self._tiers[-1].generation

    def lookup(self, address: EntryAddress) -> LookupResult:
        """See ``KVStore.lookup``."""
        reasons: set[MissReason] = set()
        for tier in self._tiers:
            result = tier.lookup(address)
            if result.is_hit:
                return result
            reasons.add(result.miss_reason or MissReason.NOT_STORED)
        return LookupResult(address.key, None, min(reasons, key=_TELLING_FIRST.index))

    def is_stored(self, address: EntryAddress) -> bool:
        """See ``KVStore.is_stored``."""
        return self._tiers[-1].is_stored(address)

    def starts(self, address: EntryAddress) -> tuple[int, ...]:
        """See ``KVStore.starts``; of all tiers."""
        return tuple(sorted({start for tier in self._tiers for start in tier.starts(address)}))

    def lease(self, address: EntryAddress, device: torch.device) -> Lease:
        """See ``KVStore.lease``; what a farther tier served is kept in the nearer ones.

        The lease says the tier that the bytes came from this time. Threads that ask for one entry
        at once read it once.
        """
        try:
            lease = self._tiers[0].lease(address, device)
        except (EntryNotFound, CorruptEntry, StoreIOError) as error:
            failure = error
        else:
            for tier in self._tiers[1:]:
                tier.touch(address.key)
            return lease
        with self._key_locks.hold(address.key):
            return self._lease_and_promote(address, device, failure)

    def put(self, entry: Entry, *, pinned: bool = False) -> None:
        """See ``KVStore.put``; an entry larger than a nearer tier goes to the farther ones only."""
        with self._key_locks.hold(entry.address.key):
            self._tiers[-1].put(entry, pinned=pinned)
            for tier in reversed(self._tiers[:-1]):
                with contextlib.suppress(StoreFull, StoreIOError):  # the last tier has it
                    tier.put(entry)

    def pin(self, key: ModuleKey, *, pinned: bool = True) -> bool:
        """See ``KVStore.pin``; whether the last tier holds it."""
        return self._tiers[-1].pin(key, pinned=pinned)

    def touch(self, key: ModuleKey) -> None:
        """See ``KVStore.touch``."""
        for tier in self._tiers:
            tier.touch(key)

    def remove(self, key: ModuleKey) -> bool:
        """See ``KVStore.remove``; from the last tier first, so that it does not come back."""
        with self._key_locks.hold(key):
            was_there = [tier.remove(key) for tier in reversed(self._tiers)]
            return any(was_there)

    def stats(self) -> tuple[StoreStats, ...]:
        """See ``KVStore.stats``."""
        return tuple(stats for tier in self._tiers for stats in tier.stats())

    def check_integrity(self) -> IntegrityReport:
        """See ``KVStore.check_integrity``; an entry counts once per tier that holds it."""
        reports = [tier.check_integrity() for tier in self._tiers]
        damaged = dict.fromkeys(key for report in reports for key in report.damaged)
        return IntegrityReport(sum(report.num_checked for report in reports), tuple(damaged))

    def close(self) -> None:
        """See ``KVStore.close``."""
        for tier in self._tiers:
            tier.close()

    def _lease_and_promote(
        self, address: EntryAddress, device: torch.device, failure: StoreError
    ) -> Lease:
        """Lease from the nearest tier that can serve. The key is locked.

        Args:
            address: The entry.
            device: Where its tensors are wanted.
            failure: What the nearest tier raised before the key was locked.
        """
        started = time.perf_counter()
        for depth, tier in enumerate(self._tiers):
            try:
                lease = tier.lease(address, _CPU if depth else device)
            except (EntryNotFound, CorruptEntry, StoreIOError) as error:
                if isinstance(failure, EntryNotFound):  # damage and faults say more
                    failure = error
            else:
                return lease if depth == 0 else self._promote(lease, depth, device, started)
        raise failure

    def _promote(
        self, lease: Lease, depth: int, device: torch.device, started_seconds: float
    ) -> EntryLease:
        """Keep what the tier at ``depth`` served in the nearer ones; claims in both are held."""
        claims = [lease]
        try:
            for tier in reversed(self._tiers[:depth]):
                with contextlib.suppress(StoreFull, StoreIOError, EntryNotFound):
                    tier.put(lease.entry)
                    # The nearest one's tensors are handed out, so they are asked for on the device.
                    is_nearest = tier is self._tiers[0]
                    claims.append(tier.lease(lease.entry.address, device if is_nearest else _CPU))
            entry = claims[-1].entry
            if device.type != "cpu":
                entry = replace(entry, keys=entry.keys.to(device), values=entry.values.to(device))
        except BaseException:
            _release(claims)
            raise
        return EntryLease(
            entry,
            tier=lease.tier,
            load_seconds=time.perf_counter() - started_seconds,
            on_release=lambda: _release(claims),
        )


def _release(claims: list[Lease]) -> None:
    for claim in claims:
        claim.release()
