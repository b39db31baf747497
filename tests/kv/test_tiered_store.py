from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from pc_rag.errors import ConfigError, CorruptEntry, EntryNotFound, StoreFull, StoreIOError
from pc_rag.kv import DiskTier, MemoryTier, TieredStore
from pc_rag.kv import disk_tier as disk_tier_module
from pc_rag.kv.file_format import entry_file_bytes
from pc_rag.types import MissReason, Tier
from tests.support.kv import CPU, assert_same_entry, make_address, make_entry, numbered_entry

if TYPE_CHECKING:
    from pathlib import Path

MEMORY_BYTES = numbered_entry(0).num_bytes
FILE_BYTES = entry_file_bytes(numbered_entry(0))


def make_tiers(root: Path, *, in_memory: int = 2, on_disk: int = 10) -> tuple[MemoryTier, DiskTier]:
    return MemoryTier(in_memory * MEMORY_BYTES), DiskTier(root, on_disk * FILE_BYTES)


def test_entry_is_in_every_tier_when_put(tmp_path: Path) -> None:
    """Put writes through: near for speed, far to last."""
    memory, disk = make_tiers(tmp_path)
    store = TieredStore([memory, disk])
    store.put(make_entry())
    assert memory.lookup(make_address()).is_hit
    assert disk.lookup(make_address()).is_hit
    assert store.lookup(make_address()).tier is Tier.HOST
    assert [s.tier for s in store.stats()] == [Tier.HOST, Tier.DISK]


def test_entry_is_promoted_when_leased_from_disk(tmp_path: Path) -> None:
    """The first lease says disk, the next one memory; bytes are the same, not copied again."""
    TieredStore(make_tiers(tmp_path)).put(make_entry())
    store = TieredStore(make_tiers(tmp_path))
    assert store.lookup(make_address()).tier is Tier.DISK
    with store.lease(make_address(), CPU) as first, store.lease(make_address(), CPU) as second:
        assert (first.tier, second.tier) == (Tier.DISK, Tier.HOST)
        assert_same_entry(first.entry, make_entry())
        assert first.entry.keys.data_ptr() == second.entry.keys.data_ptr()
    assert store.lookup(make_address()).tier is Tier.HOST


def test_promotion_breaks_no_lease_when_memory_is_full(tmp_path: Path) -> None:
    """Where memory is leased out, an entry is served from disk and stays there."""
    memory, disk = make_tiers(tmp_path, in_memory=1)
    store = TieredStore([memory, disk])
    first, second = numbered_entry(1), numbered_entry(2)
    disk.put(first)
    disk.put(second)
    with store.lease(first.address, CPU), store.lease(second.address, CPU) as lease:
        assert lease.tier is Tier.DISK
        assert_same_entry(lease.entry, second)
        assert memory.lookup(first.address).is_hit
        assert not memory.lookup(second.address).is_hit
    with store.lease(second.address, CPU):
        assert memory.lookup(second.address).is_hit


def test_promoted_entry_is_held_in_both_tiers_when_leased(tmp_path: Path) -> None:
    """E9: the lease of a promoted entry is a claim on it wherever it lies."""
    memory, disk = make_tiers(tmp_path, in_memory=1, on_disk=1)
    disk.put(numbered_entry(1))
    store = TieredStore([memory, disk])
    with store.lease(numbered_entry(1).address, CPU):
        for tier in (memory, disk):
            with pytest.raises(StoreFull):
                tier.put(numbered_entry(2))
    for tier in (memory, disk):
        tier.put(numbered_entry(2))


def test_entry_goes_to_disk_only_when_larger_than_memory(tmp_path: Path) -> None:
    """An entry that memory can never hold is stored and served all the same."""
    memory, disk = make_tiers(tmp_path)
    store = TieredStore([memory, disk])
    large = make_entry(tuple(range(20)))
    store.put(numbered_entry(1))
    store.put(large)
    with store.lease(large.address, CPU) as lease:
        assert lease.tier is Tier.DISK
        assert_same_entry(lease.entry, large)
    assert memory.lookup(numbered_entry(1).address).is_hit


def test_put_is_refused_when_the_last_tier_is_full(tmp_path: Path) -> None:
    """What is not stored durably is not acknowledged, and not served either."""
    store = TieredStore(make_tiers(tmp_path, on_disk=1))
    store.put(numbered_entry(1), pinned=True)
    with pytest.raises(StoreFull):
        store.put(numbered_entry(2))
    assert not store.lookup(numbered_entry(2).address).is_hit


def test_pins_do_not_fill_the_memory_when_ingesting(tmp_path: Path) -> None:
    """A pin holds in the durable tier; memory stays free for what is asked for."""
    memory, disk = make_tiers(tmp_path)
    store = TieredStore([memory, disk])
    for number in range(6):
        store.put(numbered_entry(number), pinned=True)
    with store.lease(numbered_entry(0).address, CPU):
        assert memory.lookup(numbered_entry(0).address).is_hit


def test_disk_keeps_what_memory_serves_when_it_needs_room(tmp_path: Path) -> None:
    """An entry that is hot in memory counts as used on disk, so a restart still finds it."""
    memory, disk = make_tiers(tmp_path, in_memory=1, on_disk=2)
    store = TieredStore([memory, disk])
    disk.put(numbered_entry(1))
    disk.put(numbered_entry(2))
    for _ in range(2):
        store.lease(numbered_entry(1).address, CPU).release()
    disk.lease(numbered_entry(2).address, CPU).release()
    with store.lease(numbered_entry(1).address, CPU) as lease:
        assert lease.tier is Tier.HOST
    disk.put(numbered_entry(3))
    assert disk.lookup(numbered_entry(1).address).is_hit
    assert not disk.lookup(numbered_entry(2).address).is_hit


def test_file_is_read_once_when_threads_lease_one_entry_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads that want one entry cause one read and share its memory."""
    memory, disk = make_tiers(tmp_path)
    disk.put(make_entry())
    store = TieredStore([memory, disk])
    reads: list[int] = []
    read_entry = disk_tier_module.read_entry
    start = threading.Barrier(8)

    def counted(file: Any, address: Any) -> Any:
        reads.append(1)
        return read_entry(file, address)

    def lease() -> int:
        start.wait(10)
        with store.lease(make_address(), CPU) as lease:
            assert_same_entry(lease.entry, make_entry())
            return lease.entry.keys.data_ptr()

    monkeypatch.setattr(disk_tier_module, "read_entry", counted)
    with ThreadPoolExecutor(8) as pool:
        addresses = {done.result() for done in [pool.submit(lease) for _ in range(8)]}
    assert len(reads) == len(addresses) == 1


def test_entry_is_gone_everywhere_when_removed(tmp_path: Path) -> None:
    """Removing takes it from every tier; it does not come back from a farther one."""
    store = TieredStore(make_tiers(tmp_path))
    store.put(make_entry())
    assert store.remove(make_address().key)
    assert not store.lookup(make_address()).is_hit
    assert not store.remove(make_address().key)


def damage(tmp_path: Path) -> None:
    path = next(tmp_path.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def test_damage_is_told_and_healed_when_only_the_disk_held_the_entry(tmp_path: Path) -> None:
    """E10 through the stack: an error, then a miss with reason, then a put that heals."""
    for tiers in (make_tiers(tmp_path), (DiskTier(tmp_path),)):
        TieredStore(make_tiers(tmp_path)).put(make_entry())
        damage(tmp_path / "entries")
        store = TieredStore(tiers)
        with pytest.raises(CorruptEntry):
            store.lease(make_address(), CPU)
        assert store.lookup(make_address()).miss_reason is MissReason.CORRUPT
        with pytest.raises(EntryNotFound):
            store.lease(make_address(), CPU)
        store.put(make_entry())
        assert store.lookup(make_address()).is_hit


def test_memory_serves_when_the_disk_copy_is_damaged(tmp_path: Path) -> None:
    """A good copy in a nearer tier is a hit, whatever the farther one holds."""
    store = TieredStore(make_tiers(tmp_path))
    store.put(make_entry())
    damage(tmp_path / "entries")
    with store.lease(make_address(), CPU) as lease:
        assert lease.tier is Tier.HOST
    report = store.check_integrity()
    assert (report.num_checked, report.damaged) == (2, (make_address().key,))
    assert store.lookup(make_address()).is_hit


def test_io_error_is_told_when_no_other_tier_can_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing medium is not mistaken for an entry that was never stored."""
    TieredStore(make_tiers(tmp_path)).put(make_entry())
    memory, disk = make_tiers(tmp_path)
    store = TieredStore([memory, disk])

    def failing(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk_tier_module.os, "fstat", failing)
        with pytest.raises(StoreIOError):
            store.lease(make_address(), CPU)
        assert store.lookup(make_address()).miss_reason is MissReason.IO
    store.lease(make_address(), CPU).release()


def test_miss_gives_the_most_telling_reason_when_tiers_differ(tmp_path: Path) -> None:
    """Memory never saw the text, the disk has it behind another prefix: the disk's word counts."""
    memory, disk = make_tiers(tmp_path)
    disk.put(make_entry())
    store = TieredStore([memory, disk])
    assert store.lookup(make_address(start=99)).miss_reason is MissReason.OTHER_PREFIX
    assert store.lookup(make_address((9,))).miss_reason is MissReason.NOT_STORED


def test_store_without_tiers_is_refused_when_made() -> None:
    """There is nowhere to store anything."""
    with pytest.raises(ConfigError, match="at least one tier"):
        TieredStore([])
