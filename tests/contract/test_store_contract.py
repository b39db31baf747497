"""One promise after the other, over every tier and over a stack of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pc_rag.errors import ConfigError, EntryNotFound, StoreError, StoreFull
from pc_rag.kv import DiskTier, KVStore, MemoryTier, TieredStore, VisibilityContext
from pc_rag.kv.file_format import entry_file_bytes
from pc_rag.types import Fingerprint, MissReason, ModuleKey, StorageDtype, Visibility
from tests.support.kv import CPU, assert_same_entry, make_address, make_entry, numbered_entry

if TYPE_CHECKING:
    from pathlib import Path

ENTRY_BYTES = entry_file_bytes(numbered_entry(0))
"""The larger of what a tier counts for one of the numbered entries."""

Make = Callable[[int], KVStore]


@pytest.fixture(params=["memory", "disk", "tiered"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes an empty store with room for a number of numbered entries."""
    made: list[KVStore] = []

    def make(num_entries: int) -> KVStore:
        folder = tmp_path / str(len(made))
        stores: dict[str, Callable[[], KVStore]] = {
            "memory": lambda: MemoryTier(num_entries * numbered_entry(0).num_bytes),
            "disk": lambda: DiskTier(folder, num_entries * ENTRY_BYTES),
            "tiered": lambda: TieredStore(
                [
                    MemoryTier(max(num_entries // 2, 1) * numbered_entry(0).num_bytes),
                    DiskTier(folder, num_entries * ENTRY_BYTES),
                ]
            ),
        }
        made.append(stores[request.param]())
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: Make) -> KVStore:
    """A store with room for eight numbered entries."""
    return make_store(8)


def is_within_capacity(store: KVStore) -> bool:
    return all(
        s.capacity_bytes is None or s.resident_bytes <= s.capacity_bytes for s in store.stats()
    )


def test_starts_are_those_of_one_text_when_it_is_held_at_several(store: KVStore) -> None:
    """Of the same tokens, model, dtype and tenant, whatever they attended; rising, each once."""
    ids = (5, 6, 7)
    behind = VisibilityContext.of(Visibility.PREFIX, (1, 2), (0, 1))
    for entry in (
        make_entry(ids, start=40),
        make_entry(ids, start=9),
        make_entry(ids, start=9, context=behind),
        make_entry(ids, start=2, fingerprint=Fingerprint("0" * 64)),
        make_entry(ids, start=3, tenant="other"),
        make_entry(ids, start=4, dtype=StorageDtype.BFLOAT16),
        make_entry((*ids, 8), start=5),
    ):
        store.put(entry)
    asked = make_entry(ids, start=100).address
    assert store.starts(asked) == (9, 40)
    store.remove(make_entry(ids, start=40).address.key)
    assert store.starts(asked) == (9,)
    assert store.starts(make_entry((1,)).address) == ()


@pytest.mark.parametrize("dtype", list(StorageDtype))
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_lease_gives_the_same_bits_when_put_before(
    make_store: Make, dtype: StorageDtype, num_tokens: int
) -> None:
    """What is leased is what was put, for every dtype and length."""
    entry = make_entry(tuple(range(num_tokens)), dtype=dtype)
    store = make_store(20)
    store.put(entry)
    assert store.lookup(entry.address).is_hit
    with store.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)
        assert lease.entry.keys.is_contiguous()
        assert lease.entry.values.is_contiguous()
        assert lease.load_seconds >= 0


def test_lease_takes_the_entry_to_the_device_when_asked(store: KVStore) -> None:
    """A lease on another device has its tensors there; the meta device stands for a GPU."""
    entry = make_entry()
    store.put(entry)
    with store.lease(entry.address, torch.device("meta")) as lease:
        assert lease.entry.keys.device.type == "meta"
    with store.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


def test_e5_stored_bytes_stay_when_leased_again_and_again(store: KVStore) -> None:
    """E5, pitfall 1: leases do not change an entry, its length included."""
    entry = make_entry()
    expected = entry.keys.clone(), entry.values.clone()
    store.put(entry)
    for _ in range(4):
        with store.lease(entry.address, CPU) as lease:
            assert torch.equal(lease.entry.keys, expected[0])
            assert torch.equal(lease.entry.values, expected[1])
    assert store.check_integrity().damaged == ()


def test_put_changes_nothing_when_the_entry_is_there(store: KVStore) -> None:
    """Put is idempotent: the numbers stay, and so do the bytes."""
    entry = make_entry()
    store.put(entry)
    before = store.stats()
    store.put(make_entry())
    assert store.stats() == before
    with store.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


def test_put_is_safe_when_threads_put_one_key_at_once(make_store: Make) -> None:
    """Eight puts of one entry that fills the store: all succeed, one is kept."""
    store = make_store(1)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(store.put, numbered_entry(1)) for _ in range(8)]:
            done.result()
    assert [s.num_entries for s in store.stats()] == [1] * len(store.stats())
    assert [s.num_evictions for s in store.stats()] == [0] * len(store.stats())


def test_put_keeps_no_larger_storage_alive_when_given_slices(store: KVStore) -> None:
    """An entry cut out of a batch is stored with its own bytes only."""
    batch = torch.randn(2, 2, 300, 4)
    entry = make_entry((1, 2, 3))
    sliced = type(entry)(entry.address, batch[:, :, 3:6], batch[:, :, 6:9])
    store.put(sliced)
    with store.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, sliced)
        storage = lease.entry.keys.untyped_storage()
        assert storage.nbytes() <= sliced.num_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": (9, 9)}, MissReason.NOT_STORED),
        ({"tenant": "other"}, MissReason.NOT_STORED),
        ({"fingerprint": Fingerprint("a" * 64)}, MissReason.FINGERPRINT),
        ({"dtype": StorageDtype.BFLOAT16}, MissReason.FINGERPRINT),
        ({"start": 11}, MissReason.OTHER_PREFIX),
        (
            {"context": VisibilityContext.of(Visibility.PREFIX, (1, 2), (0, 1))},
            MissReason.OTHER_PREFIX,
        ),
    ],
    ids=str,
)
def test_e6_misses_with_the_reason_when_anything_of_the_address_differs(
    store: KVStore, changes: dict[str, object], reason: MissReason
) -> None:
    """E6, pitfalls 3 and 34: an entry of another address is never served, and the miss says why."""
    entry = make_entry()
    store.put(entry)
    other = make_address(**{"token_ids": entry.address.token_ids, **changes})
    result = store.lookup(other)
    assert (result.tier, result.miss_reason) == (None, reason)
    with pytest.raises(EntryNotFound):
        store.lease(other, CPU)


def test_reason_is_not_stored_when_the_other_entry_was_removed(store: KVStore) -> None:
    """A removed entry no longer explains a miss."""
    entry = make_entry()
    store.put(entry)
    assert store.remove(entry.address.key)
    assert store.lookup(make_address(start=77)).miss_reason is MissReason.NOT_STORED
    assert store.lookup(entry.address).miss_reason is MissReason.NOT_STORED


def test_least_recently_used_goes_first_when_room_is_needed(make_store: Make) -> None:
    """A leased entry counts as used, in every tier; the one that was not used goes."""
    store = make_store(2)
    first, second, third = (numbered_entry(n) for n in range(3))
    store.put(first)
    store.put(second)
    store.lease(first.address, CPU).release()
    store.lookup(second.address)
    store.put(third)
    assert store.lookup(first.address).tier is store.stats()[-1].tier
    assert not store.lookup(second.address).is_hit
    assert store.stats()[-1].num_evictions == 1


def test_e9_leased_entries_stay_when_more_is_put_than_fits(make_store: Make) -> None:
    """E9: what is leased is not evicted, whatever else comes."""
    store = make_store(2)
    kept = numbered_entry(0)
    store.put(kept)
    with store.lease(kept.address, CPU) as lease:
        for number in range(1, 12):
            store.put(numbered_entry(number))
            assert is_within_capacity(store)
        assert store.lookup(kept.address).is_hit
        assert_same_entry(lease.entry, kept)


def test_pinned_entries_stay_when_ingesting_far_more_than_fits(make_store: Make) -> None:
    """Pitfall 45: pinned entries survive an ingest of many times the capacity."""
    store = make_store(4)
    pinned = [numbered_entry(n) for n in range(3)]
    for entry in pinned:
        store.put(entry, pinned=True)
    for number in range(10, 40):
        store.put(numbered_entry(number))
    for entry in pinned:
        with store.lease(entry.address, CPU) as lease:
            assert_same_entry(lease.entry, entry)
    assert is_within_capacity(store)


def test_pin_protects_and_unpin_gives_free_when_called_later(make_store: Make) -> None:
    """Pins can be set and taken back by key; an unknown key is no pin."""
    store = make_store(1)
    first, second = numbered_entry(1), numbered_entry(2)
    store.put(first)
    assert store.pin(first.address.key)
    assert not store.pin(second.address.key)
    with pytest.raises(StoreFull):
        store.put(second)
    assert store.pin(first.address.key, pinned=False)
    store.put(second)
    assert store.lookup(second.address).is_hit
    assert not store.lookup(first.address).is_hit or isinstance(store, TieredStore)


def test_put_pins_when_the_entry_was_there_unpinned(make_store: Make) -> None:
    """A second put with a pin pins; a second put without one does not unpin."""
    store = make_store(1)
    first, second = numbered_entry(1), numbered_entry(2)
    store.put(first)
    store.put(first, pinned=True)
    store.put(first)
    with pytest.raises(StoreFull):
        store.put(second)


def test_store_is_full_and_unchanged_when_an_entry_is_larger_than_it(make_store: Make) -> None:
    """An entry that cannot fit evicts nothing."""
    store = make_store(2)
    small = numbered_entry(1)
    store.put(small)
    with pytest.raises(StoreFull, match="capacity"):
        store.put(numbered_entry(2, num_tokens=500))
    assert store.lookup(small.address).is_hit


def test_lease_stays_readable_when_the_entry_is_removed(store: KVStore) -> None:
    """Removing under a reader takes nothing from the reader; the entry is gone for others."""
    entry = make_entry()
    store.put(entry)
    with store.lease(entry.address, CPU) as lease:
        assert store.remove(entry.address.key)
        assert not store.remove(entry.address.key)
        assert not store.lookup(entry.address).is_hit
        assert_same_entry(lease.entry, entry)
        store.put(make_entry())  # and it can come back meanwhile
    assert store.lookup(entry.address).is_hit
    store.remove(entry.address.key)
    assert [s.resident_bytes for s in store.stats()] == [0] * len(store.stats())


def test_lease_counts_once_when_released_twice(make_store: Make) -> None:
    """A second release does not give another reader's claim back."""
    store = make_store(1)
    entry, other = numbered_entry(1), numbered_entry(2)
    store.put(entry)
    first = store.lease(entry.address, CPU)
    with store.lease(entry.address, CPU):
        first.release()
        first.release()
        with contextlib.suppress(StoreFull):  # of a stack, the disk has room: nothing lies there
            store.put(other)
        assert store.lookup(entry.address).is_hit
    store.put(other)
    assert store.lookup(other.address).is_hit


def test_closed_store_refuses_when_called(store: KVStore) -> None:
    """Closing twice is harmless; anything else afterwards is an error that says so."""
    entry = make_entry()
    store.put(entry)
    lease = store.lease(entry.address, CPU)
    store.close()
    store.close()
    assert_same_entry(lease.entry, entry)
    lease.release()
    for call in (
        lambda: store.lookup(entry.address),
        lambda: store.lease(entry.address, CPU),
        lambda: store.put(entry),
        lambda: store.pin(entry.address.key),
        lambda: store.remove(entry.address.key),
        store.stats,
        store.check_integrity,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_integrity_report_names_nothing_when_all_is_well(store: KVStore) -> None:
    """Every entry of every tier is read."""
    for number in range(3):
        store.put(numbered_entry(number))
    report = store.check_integrity()
    assert report.num_checked == sum(s.num_entries for s in store.stats())
    assert report.damaged == ()


def test_e9_bytes_never_exceed_the_capacity_when_eight_threads_work(make_store: Make) -> None:
    """E9: eight threads put, lease, pin and remove; the cap holds at every look."""
    store = make_store(5)
    stop = threading.Event()

    def watch() -> bool:
        always = True
        while not stop.is_set():
            always = always and is_within_capacity(store)
        return always

    def work(seed: int) -> None:
        for step in range(30):
            entry = numbered_entry((seed * 7 + step * 3) % 11)
            try:
                store.put(entry)
                with store.lease(entry.address, CPU) as lease:
                    assert_same_entry(lease.entry, entry)
            except (StoreFull, EntryNotFound):
                pass  # others lease all there is, or evicted it in between: both are allowed
            if step % 7 == 0:
                store.remove(entry.address.key)

    with ThreadPoolExecutor(9) as pool:
        watching = pool.submit(watch)
        try:
            for done in [pool.submit(work, seed) for seed in range(8)]:
                done.result()
        finally:
            stop.set()
        assert watching.result()
    assert is_within_capacity(store)
    assert store.check_integrity().damaged == ()


@pytest.mark.parametrize("capacity", [-1, -(10**12)])
def test_capacity_is_refused_when_negative(tmp_path: Path, capacity: int) -> None:
    """A malformed setting is an error, not a store without room."""
    with pytest.raises(ConfigError, match="capacity_bytes"):
        MemoryTier(capacity)
    with pytest.raises(ConfigError, match="capacity_bytes"):
        DiskTier(tmp_path, capacity)


Operation = tuple[str, int]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "pin", "lease", "release", "remove"]), st.integers(0, 6)),
        max_size=40,
    )
)
def test_e9_holds_when_operations_come_in_any_order(
    make_store: Make, operations: list[Operation]
) -> None:
    """E9 as a property: the cap holds, claims and pins hold, and what is served is right."""
    store = make_store(3)
    leases: dict[ModuleKey, list[object]] = {}
    pinned: set[ModuleKey] = set()
    for operation, number in operations:
        entry = numbered_entry(number)
        key = entry.address.key
        if operation in ("put", "pin"):
            try:
                store.put(entry, pinned=operation == "pin")
            except StoreFull:
                assert not store.lookup(entry.address).is_hit
            else:
                assert store.lookup(entry.address).is_hit
                pinned |= {key} if operation == "pin" else set()
        elif operation == "lease" and store.lookup(entry.address).is_hit:
            lease = store.lease(entry.address, CPU)
            assert_same_entry(lease.entry, entry)
            leases.setdefault(key, []).append(lease)
        elif operation == "release" and leases.get(key):
            leases[key].pop().release()  # type: ignore[attr-defined]
        elif operation == "remove":
            store.remove(key)
            pinned.discard(key)
            leases.pop(key, None)  # claims on what was removed protect nothing later
        assert is_within_capacity(store)
        for number_held in range(7):
            held = numbered_entry(number_held).address
            if leases.get(held.key) or held.key in pinned:
                assert store.lookup(held).is_hit


def test_generation_stays_when_entries_come_and_go(store: KVStore) -> None:
    """It names the medium, not what lies on it: puts, evictions and removals do not change it."""
    generation = store.generation
    for number in range(12):
        store.put(numbered_entry(number))
    assert store.remove(numbered_entry(11).address.key)
    assert store.generation == generation
    assert generation


def test_generation_is_another_when_the_store_is_another(make_store: Make) -> None:
    """Two stores never share one, however alike they are."""
    assert len({make_store(4).generation for _ in range(3)}) == 3


def test_generation_is_refused_when_the_store_is_closed(store: KVStore) -> None:
    """Like every other call."""
    store.close()
    with pytest.raises(StoreError):
        _ = store.generation


def test_entry_is_stored_when_it_was_put_and_until_it_is_removed(store: KVStore) -> None:
    """``is_stored`` follows put and remove."""
    entry = make_entry()
    assert not store.is_stored(entry.address)
    store.put(entry)
    assert store.is_stored(entry.address)
    store.remove(entry.address.key)
    assert not store.is_stored(entry.address)
