"""Entries in a folder of this machine: the durable tier."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from pc_rag.errors import CorruptEntry, EntryNotFound, StoreError, StoreFull, StoreIOError
from pc_rag.kv.base import IntegrityReport, LookupResult, StoreStats
from pc_rag.kv.entry_folder import EntryFolder, io_error, read_starts
from pc_rag.kv.entry_name import EntryName
from pc_rag.kv.file_format import (
    check_address,
    entry_file_bytes,
    read_entry,
    read_header,
    verify_file,
)
from pc_rag.kv.lease import EntryLease
from pc_rag.kv.ledger import Ledger, Record
from pc_rag.kv.locks import KeyedLocks
from pc_rag.kv.quarantine import Quarantine
from pc_rag.types import MissReason, ModuleKey, Tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO
    from pathlib import Path

    import torch

    from pc_rag.kv.entry import Entry
    from pc_rag.kv.key import EntryAddress
    from pc_rag.kv.policy import EvictionPolicy

_Read = TypeVar("_Read")
_NO_SPACE = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


class DiskTier:
    """A tier of ``Tier.DISK``; see ``pc_rag.kv.base.KVStore`` for what it promises.

    A lease reads the file into memory of its own. Files of an earlier run are counted when the
    folder is opened, and the least recently used go if they exceed the capacity. Several processes
    may share the folder: each finds what another stored, and respects its pins; the capacity is
    kept over the files a process knows of, which are its own, those it found at opening, and those
    it was asked for. Quarantined files count and are the first to go.

    Args:
        root: The folder; made with permissions 0700 where it does not exist.
        capacity_bytes: Limit on the bytes of the files; ``None`` for none.
        policy: Order of eviction; least recently used by default.

    Raises:
        ConfigError: The capacity is negative.
        StoreError: The machine is big-endian.
        StoreFull: Pinned files of an earlier run exceed the capacity.
        StoreIOError: The folder cannot be made or read.
    """

    def __init__(
        self,
        root: Path,
        capacity_bytes: int | None = None,
        *,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self._ledger = Ledger(Tier.DISK, capacity_bytes=capacity_bytes, policy=policy)
        self._lock = Lock()
        self._key_locks = KeyedLocks()
        self._damaged: set[ModuleKey] = set()
        self._num_quarantined = 0
        self._quarantined_bytes = 0
        self._is_closed = False
        try:
            self._folder = EntryFolder(root)
            self._quarantine = Quarantine(self._folder.quarantine)
            self._open()
        except OSError as error:
            raise io_error("open a store at", root, error) from error

    @property
    def generation(self) -> str:
        """See ``KVStore.generation``; read from the folder each time, and made where it is gone."""
        self._check_open()
        try:
            return self._folder.generation()
        except OSError as error:
            raise io_error("read the generation of", self._folder.root, error) from error

    def lookup(self, address: EntryAddress) -> LookupResult:
        """See ``KVStore.lookup``; the header and the token ids are read, the tensors are not.

        Why an entry is missing is said from the files this process knows of.
        """
        self._check_open()
        name = EntryName.of(address)
        reason: MissReason | None = None
        try:
            self._read(name, lambda file: check_address(file, read_header(file), address))
            self._know(name)
        except EntryNotFound:
            pass  # the books say below why
        except CorruptEntry:
            reason = MissReason.CORRUPT
        except StoreIOError:
            reason = MissReason.IO
        else:
            return LookupResult(address.key, Tier.DISK)
        with self._lock:
            self._ledger.num_misses += 1
            if reason is None and address.key in self._damaged:
                reason = MissReason.CORRUPT
            return LookupResult(address.key, None, reason or self._ledger.miss_reason(address))

    def is_stored(self, address: EntryAddress) -> bool:
        """See ``KVStore.is_stored``."""
        return self.lookup(address).is_hit

    def starts(self, address: EntryAddress) -> tuple[int, ...]:
        """See ``KVStore.starts``; the headers of the files are read."""
        self._check_open()
        with self._lock:
            names = self._ledger.like(EntryName.of(address))
        return read_starts(self._folder, names)

    def lease(self, address: EntryAddress, device: torch.device) -> EntryLease:
        """See ``KVStore.lease``; the checksum is verified."""
        self._check_open()
        started = time.perf_counter()
        name = EntryName.of(address)
        with self._lock:  # before reading, so that it is not evicted meanwhile
            record = self._ledger.get(address.key)
            if record is not None:
                self._ledger.claim(record)
        try:
            entry = self._read(name, lambda file: read_entry(file, address))
            if device.type != "cpu":
                entry = replace(entry, keys=entry.keys.to(device), values=entry.values.to(device))
            if record is None:
                record = self._know(name, claims=True)
        except BaseException:
            self._unclaim(record)
            raise
        self._folder.touch(name)
        with self._lock:
            self._ledger.num_hits += 1
        return EntryLease(
            entry,
            tier=Tier.DISK,
            load_seconds=time.perf_counter() - started,
            on_release=lambda: self._unclaim(record),
        )

    def put(self, entry: Entry, *, pinned: bool = False) -> None:
        """See ``KVStore.put``; durable when it returns."""
        self._check_open()
        name = EntryName.of(entry.address)
        num_bytes = entry_file_bytes(entry)
        try:
            with self._key_locks.hold(name.key):
                record = self._reconcile(name)
                if record is not None and record.num_bytes == num_bytes:
                    if pinned and not record.is_pinned:
                        self._set_pinned(name.key, is_pinned=True)
                    return
                if record is not None:  # cut off or grown: not what was written
                    self._delete(name)
                with self._lock:
                    self._make_room(num_bytes)
                    self._ledger.reserve(num_bytes)
                try:
                    self._folder.publish(entry, pinned=pinned)
                finally:
                    with self._lock:
                        self._ledger.unreserve(num_bytes)
                    self._reconcile(name)
                with self._lock:
                    self._damaged.discard(name.key)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise StoreFull(
                    f"disk tier: the file system of {self._folder.root} has no room for "
                    f"{num_bytes:,} bytes; free some, or lower the tier's capacity"
                ) from error
            raise io_error("write", self._folder.path_of(name), error) from error

    def pin(self, key: ModuleKey, *, pinned: bool = True) -> bool:
        """See ``KVStore.pin``; a mark in the folder makes it last."""
        self._check_open()
        try:
            with self._key_locks.hold(key):
                name = self._folder.find(key)
                if name is None or self._reconcile(name) is None:
                    return False
                self._set_pinned(key, is_pinned=pinned)
                return True
        except OSError as error:
            raise io_error("pin an entry in", self._folder.root, error) from error

    def touch(self, key: ModuleKey) -> None:
        """See ``KVStore.touch``; noted in the file's modification time too."""
        self._check_open()
        with self._lock:
            record = self._ledger.get(key)
            self._ledger.touch(key)
        if record is not None:
            self._folder.touch(record.name)

    def remove(self, key: ModuleKey) -> bool:
        """See ``KVStore.remove``; the bytes are free at once."""
        self._check_open()
        try:
            with self._key_locks.hold(key):
                name = self._folder.find(key)
                if name is None:
                    return False
                self._delete(name)
                return True
        except OSError as error:
            raise io_error("remove an entry from", self._folder.root, error) from error

    def stats(self) -> tuple[StoreStats, ...]:
        """See ``KVStore.stats``; quarantined bytes are among the resident ones."""
        self._check_open()
        with self._lock:
            return (
                self._ledger.stats(
                    extra_bytes=self._quarantine.num_bytes, num_quarantined=self._num_quarantined
                ),
            )

    def check_integrity(self) -> IntegrityReport:
        """See ``KVStore.check_integrity``; reads every file of the folder, also other processes'.

        Raises:
            StoreIOError: The medium failed.
        """
        self._check_open()
        num_checked = 0
        damaged: list[ModuleKey] = []
        try:
            names = [found.name for found in self._folder.scan()]
        except OSError as error:
            raise io_error("read the store", self._folder.root, error) from error
        for name in names:
            try:
                self._read(name, partial(verify_file, key=name.key))
            except EntryNotFound:
                continue  # evicted or removed since the scan
            except CorruptEntry:
                damaged.append(name.key)
            num_checked += 1
        return IntegrityReport(num_checked, tuple(damaged))

    def close(self) -> None:
        """See ``KVStore.close``."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"disk tier {self._folder.root}: it was closed; open a new one")

    def _open(self) -> None:
        """Enter what lies in the folder, and bring it below the capacity."""
        for found in sorted(self._folder.scan(), key=lambda found: found.used_ns):
            self._ledger.add(found.name, found.num_bytes, is_pinned=found.is_pinned)
        self._folder.drop_stray_pins(frozenset(r.name.key for r in self._ledger.records))
        self._quarantined_bytes = self._quarantine.num_bytes
        self._ledger.reserve(self._quarantined_bytes)
        self._make_room(0)

    def _read(self, name: EntryName, read: Callable[[FileIO], _Read]) -> _Read:
        """Read an entry's file; what is damaged goes to quarantine. No lock is held meanwhile."""
        inode: int | None = None
        try:
            with self._folder.open(name) as file:
                inode = os.fstat(file.fileno()).st_ino
                return read(file)
        except FileNotFoundError as error:
            with self._lock:
                is_expected = self._ledger.get(name.key) is not None
            if is_expected:  # deleted by another process
                self._know(name)
            raise EntryNotFound(
                f"disk tier: no entry {name.key[:12]}; encode the module and put it"
            ) from error
        except CorruptEntry as error:
            self._set_aside(name, inode, str(error))
            raise
        except OSError as error:
            raise io_error("read", self._folder.path_of(name), error) from error

    def _know(self, name: EntryName, *, claims: bool = False) -> Record | None:
        """Bring the books in line with one file, and optionally count a lease on it."""
        try:
            with self._key_locks.hold(name.key):
                record = self._reconcile(name)
                if claims and record is not None:
                    with self._lock:
                        self._ledger.claim(record)
                return record
        except OSError as error:
            raise io_error("find", self._folder.path_of(name), error) from error

    def _reconcile(self, name: EntryName) -> Record | None:
        """Enter a file that another process made, drop one that is gone. The key is locked."""
        num_bytes = self._folder.size_of(name)
        with self._lock:
            record = self._ledger.get(name.key)
            if record is not None and record.num_bytes == num_bytes:
                return record
            if record is not None:
                self._ledger.drop(record)
            if num_bytes is None:
                return None
            is_pinned = self._folder.is_pinned(name.key)
            record = self._ledger.add(name, num_bytes, is_pinned=is_pinned)
            with contextlib.suppress(StoreFull):  # it is there already: nothing left to refuse
                self._make_room(0)
            return record

    def _make_room(self, num_bytes: int) -> None:
        """Delete files until ``num_bytes`` more fit. The lock is held.

        Files are deleted under the lock so that nobody fills room that is not yet there.
        """
        capacity = self._ledger.capacity_bytes
        while capacity is not None and self._ledger.used_bytes + num_bytes > capacity:
            if not self._quarantine.drop_oldest():
                break
            self._count_quarantine()
        while True:
            victims = self._ledger.plan_eviction(num_bytes)
            pinned = [record for record in victims if self._folder.is_pinned(record.name.key)]
            if not pinned:
                break
            for record in pinned:  # by another process
                self._ledger.pin(record, is_pinned=True)
        for record in victims:
            self._folder.delete(record.name)
            self._ledger.drop(record)
            self._ledger.num_evictions += 1

    def _set_aside(self, name: EntryName, inode: int | None, reason: str) -> None:
        """Quarantine a file, unless another has taken its place since it was opened."""
        path = self._folder.path_of(name)
        try:
            with self._key_locks.hold(name.key), self._lock:
                if inode is not None and path.lstat().st_ino != inode:
                    return
                self._quarantine.take(path, reason)
                self._num_quarantined += 1
                self._damaged.add(name.key)
                record = self._ledger.get(name.key)
                if record is not None:
                    self._ledger.drop(record)
                self._count_quarantine()
        except FileNotFoundError:
            return  # another thread was faster
        except OSError as error:
            raise io_error("quarantine", path, error) from error

    def _count_quarantine(self) -> None:
        """Count quarantined bytes as reserved ones. The lock is held."""
        self._ledger.unreserve(self._quarantined_bytes)
        self._quarantined_bytes = self._quarantine.num_bytes
        self._ledger.reserve(self._quarantined_bytes)

    def _delete(self, name: EntryName) -> None:
        """Delete a file and its record. The key is locked."""
        with self._lock:
            self._folder.delete(name)
            record = self._ledger.get(name.key)
            if record is not None:
                self._ledger.drop(record)

    def _set_pinned(self, key: ModuleKey, *, is_pinned: bool) -> None:
        """Mark in the folder and in the books. The key is locked."""
        if is_pinned:
            self._folder.pin(key)
        else:
            self._folder.unpin(key)
        with self._lock:
            record = self._ledger.get(key)
            if record is not None:
                self._ledger.pin(record, is_pinned=is_pinned)

    def _unclaim(self, record: Record | None) -> None:
        if record is not None:
            with self._lock:
                self._ledger.unclaim(record)
