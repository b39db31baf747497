from __future__ import annotations

import pytest
import torch

from pc_rag.errors import CorruptEntry, StoreFull
from pc_rag.kv import Entry, MemoryTier
from pc_rag.types import MissReason, Tier
from tests.support.kv import CPU, make_address, make_entry, numbered_entry


def test_lease_hands_out_the_stores_own_tensors_when_on_the_cpu() -> None:
    """E5's other half: requests read in place, nothing is copied."""
    tier = MemoryTier(10_000)
    entry = make_entry()
    tier.put(entry)
    with tier.lease(entry.address, CPU) as first, tier.lease(entry.address, CPU) as second:
        assert first.entry.keys.data_ptr() == second.entry.keys.data_ptr() == entry.keys.data_ptr()
        assert first.entry.values.data_ptr() == entry.values.data_ptr()
        assert first.tier is Tier.HOST


def test_entry_is_dropped_with_a_reason_when_its_bytes_were_changed() -> None:
    """A request that writes into an entry is found out; the entry is encoded again."""
    tier = MemoryTier(10_000)
    for number in range(3):
        tier.put(numbered_entry(number))
    damaged = numbered_entry(1)
    with tier.lease(damaged.address, CPU) as lease:
        lease.entry.values[1, 1, 2, 3] += 1
    report = tier.check_integrity()
    assert (report.num_checked, report.damaged) == (3, (damaged.address.key,))
    assert tier.lookup(damaged.address).miss_reason is MissReason.CORRUPT
    assert tier.stats()[0].num_quarantined == 1
    tier.put(numbered_entry(1))
    assert tier.lookup(damaged.address).is_hit
    assert tier.check_integrity().damaged == ()


def test_bytes_count_until_the_last_release_when_removed_under_a_lease() -> None:
    """Memory that a reader holds is still occupied: the cap counts it."""
    size = numbered_entry(0).num_bytes
    tier = MemoryTier(size)
    tier.put(numbered_entry(0))
    first = tier.lease(numbered_entry(0).address, CPU)
    second = tier.lease(numbered_entry(0).address, CPU)
    tier.remove(numbered_entry(0).address.key)
    first.release()
    assert tier.stats()[0].resident_bytes == size
    with pytest.raises(StoreFull):
        tier.put(numbered_entry(1))
    second.release()
    assert tier.stats()[0].resident_bytes == 0
    tier.put(numbered_entry(1))


def test_lookup_compares_token_ids_when_the_key_agrees() -> None:
    """Two texts under one key, which SHA-256 excludes, would be no hit."""
    tier = MemoryTier(10_000)
    entry = make_entry()
    tier.put(entry)
    forged = make_address((1, 2, 3))
    object.__setattr__(forged, "key", entry.address.key)
    assert tier.lookup(forged).miss_reason is MissReason.CORRUPT
    with pytest.raises(CorruptEntry, match="other tokens"):
        tier.lease(forged, CPU)


def test_entry_made_in_inference_mode_is_stored_when_put_outside_of_it() -> None:
    """The encoder's tensors come from inference mode; the store takes them, sliced or whole."""
    with torch.inference_mode():
        batch = torch.randn(2, 2, 9, 4)
        sliced = Entry(make_address(), batch[:, :, :3], batch[:, :, 3:6])
        whole = make_entry((1, 2))
    tier = MemoryTier(10_000)
    tier.put(sliced)
    tier.put(whole)
    with tier.lease(sliced.address, CPU) as lease:
        assert torch.equal(lease.entry.keys, batch[:, :, :3])
    assert tier.check_integrity().damaged == ()


def test_claim_is_given_back_when_the_device_cannot_take_the_entry() -> None:
    """A lease that fails on its way to the device protects nothing."""
    tier = MemoryTier(numbered_entry(0).num_bytes)
    tier.put(numbered_entry(0))
    with pytest.raises((RuntimeError, AssertionError)):
        tier.lease(numbered_entry(0).address, torch.device("xpu", 99))
    tier.put(numbered_entry(1))
    assert tier.lookup(numbered_entry(1).address).is_hit
