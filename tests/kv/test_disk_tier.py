from __future__ import annotations

import errno
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pc_rag.errors import CorruptEntry, EntryNotFound, StoreError, StoreFull, StoreIOError
from pc_rag.kv import DiskTier, Entry
from pc_rag.kv import disk_tier as disk_tier_module
from pc_rag.kv.entry_folder import EntryFolder
from pc_rag.kv.entry_name import EntryName
from pc_rag.kv.file_format import entry_file_bytes
from pc_rag.types import MissReason
from tests.support.kv import CPU, assert_same_entry, make_address, make_entry, numbered_entry

REPOSITORY = Path(__file__).parents[2]
ENTRY_BYTES = entry_file_bytes(numbered_entry(0))


@pytest.fixture
def entry() -> Entry:
    return make_entry()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def path_of(root: Path, entry: Entry) -> Path:
    return EntryFolder(root).path_of(EntryName.of(entry.address))


def files_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_entries_are_there_when_the_folder_is_opened_again(root: Path, entry: Entry) -> None:
    """What one run stored, the next one finds, counts and serves."""
    DiskTier(root).put(entry)
    again = DiskTier(root)
    assert again.stats()[0].num_entries == 1
    assert again.stats()[0].resident_bytes == entry_file_bytes(entry)
    assert again.lookup(entry.address).is_hit
    with again.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


def test_full_hits_when_restarted_with_another_hash_seed(root: Path) -> None:
    """Pitfall 43: a new process with another PYTHONHASHSEED hits everything."""
    tier = DiskTier(root)
    for number in range(5):
        tier.put(numbered_entry(number))
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from pc_rag.kv import DiskTier\n"
        "from tests.support.kv import CPU, assert_same_entry, numbered_entry\n"
        "tier = DiskTier(Path(sys.argv[1]))\n"
        "for n in range(5):\n"
        "    with tier.lease(numbered_entry(n).address, CPU) as lease:\n"
        "        assert_same_entry(lease.entry, numbered_entry(n))\n"
        "print(tier.stats()[0].num_hits)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["5"]


def test_cap_holds_when_files_of_an_earlier_run_exceed_it(root: Path) -> None:
    """Pitfall 44: files found at opening count, and the least recently used go."""
    tier = DiskTier(root)
    for number in range(6):
        tier.put(numbered_entry(number))
        moment = 1_000_000_000 + number
        os.utime(path_of(root, numbered_entry(number)), (moment, moment))
    smaller = DiskTier(root, 2 * ENTRY_BYTES)
    assert smaller.stats()[0].resident_bytes == 2 * ENTRY_BYTES
    hits = [smaller.lookup(numbered_entry(n).address).is_hit for n in range(6)]
    assert hits == [False] * 4 + [True] * 2
    smaller.put(numbered_entry(7))
    assert sum(path.stat().st_size for path in files_in(root)) == 2 * ENTRY_BYTES


def test_recent_use_outlives_the_process_when_entries_were_leased(root: Path) -> None:
    """The order of eviction is kept in the files' modification times."""
    tier = DiskTier(root)
    for number in range(3):
        tier.put(numbered_entry(number))
        moment = 1_000_000_000 + number
        os.utime(path_of(root, numbered_entry(number)), (moment, moment))
    tier.lease(numbered_entry(0).address, CPU).release()
    smaller = DiskTier(root, ENTRY_BYTES)
    assert smaller.lookup(numbered_entry(0).address).is_hit


def test_pins_hold_when_the_folder_is_opened_again(root: Path) -> None:
    """A pin is a mark in the folder: it outlives the process, and goes with its entry."""
    tier = DiskTier(root)
    tier.put(numbered_entry(0), pinned=True)
    tier.put(numbered_entry(1))
    tier.pin(numbered_entry(1).address.key)
    tier.put(numbered_entry(2))
    with pytest.raises(StoreFull):
        DiskTier(root, ENTRY_BYTES)
    again = DiskTier(root, 2 * ENTRY_BYTES)
    with pytest.raises(StoreFull):
        again.put(numbered_entry(3))
    assert again.lookup(numbered_entry(0).address).is_hit
    assert again.lookup(numbered_entry(1).address).is_hit
    again.remove(numbered_entry(0).address.key)
    again.pin(numbered_entry(1).address.key, pinned=False)
    assert list((root / "pins").iterdir()) == []
    again.put(numbered_entry(3))
    again.put(numbered_entry(4))


def test_pins_and_quarantine_are_made_again_when_deleted_under_the_tier(root: Path) -> None:
    """A pin holds, and a damaged file is set aside rather than met for ever (pitfall 42)."""
    tier = DiskTier(root)
    for number in range(2):
        tier.put(numbered_entry(number))
    shutil.rmtree(root / "pins")
    shutil.rmtree(root / "quarantine")
    assert tier.pin(numbered_entry(0).address.key)
    assert [path.name for path in (root / "pins").iterdir()] == [numbered_entry(0).address.key]
    flipped_byte(path_of(root, numbered_entry(1)), root)
    with pytest.raises(CorruptEntry):
        tier.lease(numbered_entry(1).address, CPU)
    tier.put(numbered_entry(1))
    tier.lease(numbered_entry(1).address, CPU).release()
    assert tier.stats()[0].num_quarantined == 1


def test_entries_of_another_process_are_found_when_asked_for(root: Path) -> None:
    """Two open tiers over one folder see each other's entries, removals and pins."""
    ours, theirs = DiskTier(root, 2 * ENTRY_BYTES), DiskTier(root)
    first, second, third = (numbered_entry(n) for n in range(3))
    theirs.put(first)
    assert ours.lookup(first.address).is_hit
    assert ours.stats()[0].num_entries == 1
    ours.put(second)
    with theirs.lease(second.address, CPU) as lease:
        assert_same_entry(lease.entry, second)
    theirs.pin(first.address.key)
    ours.put(third)  # would evict `first`, the least recently used
    assert theirs.lookup(first.address).is_hit
    assert not theirs.lookup(second.address).is_hit
    theirs.remove(third.address.key)
    assert ours.lookup(third.address).miss_reason is MissReason.NOT_STORED
    assert ours.stats()[0].num_entries == 1
    with pytest.raises(EntryNotFound):
        ours.lease(third.address, CPU)


def test_put_by_another_process_is_no_second_entry_when_repeated(root: Path, entry: Entry) -> None:
    """Put of what another process stored writes nothing."""
    ours, theirs = DiskTier(root), DiskTier(root)
    theirs.put(entry)
    before = path_of(root, entry).stat().st_ino
    ours.put(entry)
    assert path_of(root, entry).stat().st_ino == before


def test_files_are_private_when_written(root: Path, entry: Entry) -> None:
    """Folders are 0700 and files 0600, whatever the umask gives away."""
    before = os.umask(0)
    try:
        DiskTier(root).put(entry, pinned=True)
    finally:
        os.umask(before)
    for path in [root, *root.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_old_temporary_files_are_deleted_when_opened(root: Path, entry: Entry) -> None:
    """What a crashed run left is cleaned up; what another process may be writing is not."""
    DiskTier(root).put(entry)
    folder = path_of(root, entry).parent
    old, young = folder / ".old.tmp", folder / ".young.tmp"
    for path in (old, young):
        path.write_bytes(b"half an entry")
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    (root / "pins" / ("a" * 64)).touch()
    os.utime(root / "pins" / ("a" * 64), (long_ago, long_ago))
    tier = DiskTier(root)
    assert not old.exists()
    assert young.exists()
    assert list((root / "pins").iterdir()) == []
    assert tier.stats()[0].num_entries == 1


# ── Damage ──────────────────────────────────────────────────────────────────────────────────────


def pickle_bomb(path: Path, root: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(root / "exploded"),))

    path.write_bytes(pickle.dumps(Bomb()))


def truncated(path: Path, root: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flipped_byte(path: Path, root: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)


def huge_sizes(path: Path, root: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def link_out_of_the_store(path: Path, root: Path) -> None:
    outside = root.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def another_entrys_file(path: Path, root: Path) -> None:
    DiskTier(root).put(make_entry((8, 8, 8)))
    path_of(root, make_entry((8, 8, 8))).replace(path)


def named_pipe(path: Path, root: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def another_users(path: Path, root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


DAMAGES = [
    pickle_bomb,
    truncated,
    flipped_byte,
    huge_sizes,
    link_out_of_the_store,
    another_entrys_file,
    named_pipe,
    another_users,
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("looks_first", [True, False])
@pytest.mark.parametrize("reopens", [True, False])
def test_e10_damage_is_refused_quarantined_and_replaced_when_met(
    root: Path, entry: Entry, damage: Any, looks_first: bool, reopens: bool
) -> None:
    """E10, pitfall 47: a miss with a reason, a file set aside with one, and a put that heals."""
    tier = DiskTier(root)
    tier.put(entry)
    path = path_of(root, entry)
    damage(path, root)
    if reopens:
        tier = DiskTier(root)
    if looks_first and damage is not flipped_byte:
        assert tier.lookup(entry.address).miss_reason is MissReason.CORRUPT
    else:
        with pytest.raises(CorruptEntry):
            tier.lease(entry.address, CPU)
    assert tier.lookup(entry.address).miss_reason is MissReason.CORRUPT
    with pytest.raises(EntryNotFound):
        tier.lease(entry.address, CPU)
    assert not os.path.lexists(path)
    assert tier.stats()[0].num_quarantined == 1
    reasons = list((root / "quarantine").glob("*.reason.txt"))
    assert len(reasons) == 1
    assert reasons[0].read_text()
    assert not (root / "exploded").exists()
    tier.put(entry)
    assert tier.lookup(entry.address).is_hit
    with tier.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


@pytest.mark.parametrize("damage", DAMAGES)
def test_e10_put_heals_or_changes_nothing_when_a_damaged_file_is_there(
    root: Path, entry: Entry, damage: Any
) -> None:
    """A put over a damaged file never makes a damaged entry that is served."""
    tier = DiskTier(root)
    tier.put(entry)
    damage(path_of(root, entry), root)
    tier.put(entry)
    try:
        tier.lease(entry.address, CPU).release()
    except CorruptEntry:
        tier.put(entry)
    with tier.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


def test_integrity_check_sets_aside_what_is_damaged_when_called(root: Path) -> None:
    """Only damaged entries are named and quarantined; the others stay."""
    tier = DiskTier(root)
    for number in range(4):
        tier.put(numbered_entry(number))
    flipped_byte(path_of(root, numbered_entry(2)), root)
    report = tier.check_integrity()
    assert report.num_checked == 4
    assert report.damaged == (numbered_entry(2).address.key,)
    assert tier.lookup(numbered_entry(2).address).miss_reason is MissReason.CORRUPT
    assert tier.stats()[0].num_entries == 3
    assert tier.check_integrity().damaged == ()


def test_quarantine_counts_and_goes_first_when_room_is_needed(root: Path) -> None:
    """Quarantined bytes are inside the cap, and no good entry is evicted for them."""
    tier = DiskTier(root, 3 * ENTRY_BYTES)
    for number in range(3):
        tier.put(numbered_entry(number))
    flipped_byte(path_of(root, numbered_entry(0)), root)
    with pytest.raises(CorruptEntry):
        tier.lease(numbered_entry(0).address, CPU)
    assert tier.stats()[0].resident_bytes > 3 * ENTRY_BYTES - 10
    tier.put(numbered_entry(0))
    assert tier.stats()[0].num_entries == 3
    assert sum(path.stat().st_size for path in files_in(root)) <= 3 * ENTRY_BYTES
    assert list((root / "quarantine").iterdir()) == []


def test_quarantine_stays_small_when_much_is_damaged(root: Path) -> None:
    """Of damaged files the newest 32 are kept."""
    tier = DiskTier(root)
    for number in range(40):
        tier.put(numbered_entry(number))
        truncated(path_of(root, numbered_entry(number)), root)
        assert not tier.lookup(numbered_entry(number).address).is_hit
    assert len(list((root / "quarantine").glob("*.safetensors"))) == 32
    assert len(list((root / "quarantine").iterdir())) == 64
    assert len(DiskTier(root)._quarantine.file_names) == 32


def test_linked_folder_is_refused_and_nothing_outside_is_touched_when_met(
    root: Path, entry: Entry
) -> None:
    """A fan-out folder that leads out of the store is neither read nor written nor emptied."""
    tier = DiskTier(root)
    tier.put(entry)
    path = path_of(root, entry)
    outside = root.parent / "outside"
    shutil.move(path.parent, outside)
    path.parent.symlink_to(outside)
    assert tier.lookup(entry.address).miss_reason is MissReason.IO
    for call in (
        lambda: tier.lease(entry.address, CPU),
        lambda: tier.put(entry),
        lambda: tier.remove(entry.address.key),
    ):
        with pytest.raises(StoreIOError, match="link"):
            call()
    assert [file.name for file in outside.iterdir()] == [path.name]
    assert DiskTier(root).stats()[0].num_entries == 0


def test_linked_entries_folder_is_refused_when_opened(root: Path) -> None:
    """The store's own folders are no links either; the root may be one."""
    (root.parent / "outside").mkdir()
    root.mkdir()
    (root / "entries").symlink_to(root.parent / "outside")
    with pytest.raises(StoreIOError, match="link"):
        DiskTier(root)
    (root / "entries").unlink()
    (root.parent / "link").symlink_to(root)
    DiskTier(root.parent / "link").put(make_entry())
    assert DiskTier(root).stats()[0].num_entries == 1


# ── Failing media ───────────────────────────────────────────────────────────────────────────────


def fail(number: int) -> Any:
    def failing(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing


def test_entry_stays_when_reading_fails_for_a_while(
    root: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing medium is an I/O error or a miss with reason ``io``; the entry is not removed."""
    tier = DiskTier(root)
    tier.put(entry)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail(errno.EIO))
        assert tier.lookup(entry.address).miss_reason is MissReason.IO
        with pytest.raises(StoreIOError, match="may be intact"):
            tier.lease(entry.address, CPU)
        with pytest.raises(StoreIOError):
            tier.check_integrity()
    assert tier.stats()[0].num_quarantined == 0
    with tier.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, StoreIOError), (errno.ENOSPC, StoreFull)]
)
@pytest.mark.parametrize("where", ["fsync", "rename"])
def test_nothing_is_visible_when_writing_fails(
    *,
    root: Path,
    entry: Entry,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[StoreError],
    where: str,
) -> None:
    """A failed put leaves no file, no temporary file and no promised bytes; the next one works."""
    tier = DiskTier(root, entry_file_bytes(entry))
    with monkeypatch.context() as patch:
        if where == "fsync":
            patch.setattr(os, "fsync", fail(number))
        else:
            patch.setattr(Path, "replace", fail(number))
        with pytest.raises(error):
            tier.put(entry)
    assert files_in(root / "entries") == []
    assert tier.lookup(entry.address).miss_reason is MissReason.NOT_STORED
    tier.put(entry)
    assert tier.lookup(entry.address).is_hit


def test_e8_bytes_are_flushed_before_the_name_when_put(
    root: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E8 for a power cut: data first, then the name, then the folder; new folders as well."""
    tier = DiskTier(root)
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else "data")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append("name")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    tier.put(entry)
    assert events == ["folder", "folder", "data", "name", "folder"]
    events.clear()
    tier.remove(entry.address.key)
    tier.put(entry, pinned=True)
    assert events == ["data", "folder", "name", "folder"]


def test_store_error_names_the_folder_when_it_cannot_be_made(tmp_path: Path) -> None:
    """A file where the folder should be is an I/O error with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreIOError, match="file"):
        DiskTier(tmp_path / "file")


def test_other_keys_are_served_when_one_is_being_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one entry blocks no other, neither a lookup nor a lease nor a put."""
    tier = DiskTier(root)
    slow, quick = numbered_entry(1), numbered_entry(2)
    tier.put(slow)
    tier.put(quick)
    is_reading, may_finish = threading.Event(), threading.Event()
    read_entry = disk_tier_module.read_entry

    def wait_for_slow(file: Any, address: Any) -> Entry:
        if address == slow.address:
            is_reading.set()
            assert may_finish.wait(10)
        return read_entry(file, address)

    monkeypatch.setattr(disk_tier_module, "read_entry", wait_for_slow)
    reader = threading.Thread(target=lambda: tier.lease(slow.address, CPU).release())
    reader.start()
    try:
        assert is_reading.wait(10)
        assert tier.lookup(quick.address).is_hit
        tier.lease(quick.address, CPU).release()
        tier.put(numbered_entry(3))
        assert tier.remove(quick.address.key)
    finally:
        may_finish.set()
        reader.join()


def test_entry_is_not_evicted_when_it_is_being_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E9: a lease counts from the moment it is asked for, not from the end of the read."""
    tier = DiskTier(root, ENTRY_BYTES)
    entry = numbered_entry(1)
    tier.put(entry)
    read_entry = disk_tier_module.read_entry

    def put_another(file: Any, address: Any) -> Entry:
        with pytest.raises(StoreFull):
            tier.put(numbered_entry(2))
        return read_entry(file, address)

    monkeypatch.setattr(disk_tier_module, "read_entry", put_another)
    with tier.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


def test_good_file_stays_when_it_replaced_the_damaged_one_meanwhile(
    root: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of a damaged file does not quarantine the good one that has taken its place."""
    tier = DiskTier(root)
    tier.put(entry)
    flipped_byte(path_of(root, entry), root)
    read_entry = disk_tier_module.read_entry

    def replaced_meanwhile(file: Any, address: Any) -> Entry:
        monkeypatch.setattr(disk_tier_module, "read_entry", read_entry)
        tier.remove(entry.address.key)
        tier.put(entry)
        return read_entry(file, address)

    monkeypatch.setattr(disk_tier_module, "read_entry", replaced_meanwhile)
    with pytest.raises(CorruptEntry):
        tier.lease(entry.address, CPU)
    with tier.lease(entry.address, CPU) as lease:
        assert_same_entry(lease.entry, entry)


def test_names_of_strangers_are_left_alone_when_opened(root: Path, entry: Entry) -> None:
    """Files that are no entries are neither counted nor deleted."""
    DiskTier(root).put(entry)
    stranger = path_of(root, entry).parent / "notes.txt"
    stranger.write_text("hello")
    misplaced = root / "entries" / "zz"
    misplaced.mkdir()
    tier = DiskTier(root, entry_file_bytes(entry))
    assert tier.stats()[0].num_entries == 1
    assert stranger.read_text() == "hello"
    assert not tier.remove(make_address(start=5).key)
