"""The file that names the generation of a folder of entries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pc_rag.errors import StoreIOError
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.generation_file import FILE_NAME
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.tiered_store import TieredStore
from tests.support.kv import CPU, make_entry

_ASK = """
import sys
from pathlib import Path
from pc_rag.kv.disk_tier import DiskTier
print(DiskTier(Path(sys.argv[1])).generation)
"""


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def file(root):
    return root / "entries" / FILE_NAME


def test_generation_is_a_private_file_among_the_entries_when_it_was_asked_for(root, file):
    """As docs/disk-format.md shows it; nothing temporary is left beside it."""
    generation = DiskTier(root).generation
    assert re.fullmatch("[0-9a-f]{32}", generation)
    assert file.read_bytes() == f"{generation}\n".encode()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == [FILE_NAME]


def test_generation_is_the_same_when_another_process_opens_the_folder(root):
    """Over restarts, and beside one that is open."""
    generation = DiskTier(root).generation
    assert DiskTier(root).generation == generation
    asked = subprocess.run(
        [sys.executable, "-c", _ASK, root], capture_output=True, text=True, check=True
    )
    assert asked.stdout.strip() == generation


def test_generation_is_one_when_many_ask_for_the_first_at_once(root):
    """Whoever makes it first wins, and the others say the same."""
    tiers = [DiskTier(root) for _ in range(8)]
    for _ in range(20):
        (root / "entries" / FILE_NAME).unlink(missing_ok=True)
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda tier: tier.generation, tiers))
        assert len(found) == 1


@pytest.mark.parametrize("deleted", [".", "entries"])
def test_generation_is_another_when_the_folder_was_deleted_under_a_running_process(root, deleted):
    """Pitfall 42: the tier notices, and goes on working in a folder made anew."""
    tier = DiskTier(root)
    entry = make_entry()
    tier.put(entry)
    generation = tier.generation
    shutil.rmtree(root / deleted)
    assert tier.generation != generation
    assert not tier.is_stored(entry.address)
    tier.put(entry)
    assert DiskTier(root).is_stored(entry.address)
    assert DiskTier(root).generation == tier.generation


def test_entry_is_put_when_the_folder_was_deleted_and_nobody_asked(root):
    """Pitfall 42: writing makes the folders anew, too."""
    tier = DiskTier(root)
    shutil.rmtree(root)
    tier.put(make_entry(), pinned=True)
    with DiskTier(root).lease(make_entry().address, CPU) as lease:
        assert lease.entry.num_tokens == 3


@pytest.mark.parametrize("content", [b"", b"abc\n", b"G" * 32 + b"\n", b"a" * 32, b"a" * 4000])
def test_generation_is_made_anew_when_its_file_is_damaged(root, file, content):
    """Cut off, overwritten, grown: it is not what was written, so nothing can be said of before."""
    tier = DiskTier(root)
    before = tier.generation
    file.write_bytes(content)
    after = tier.generation
    assert after != before
    assert file.read_bytes() == f"{after}\n".encode()
    assert tier.generation == after


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_link_is_replaced_when_it_stands_for_the_generation(root, file, tmp_path):
    """Pitfall 47: it is not followed, and what it points to stays."""
    tier = DiskTier(root)
    outside = tmp_path / "outside"
    outside.write_text("a" * 32 + "\n")
    file.symlink_to(outside)
    assert tier.generation != "a" * 32
    assert not file.is_symlink()
    assert outside.read_text() == "a" * 32 + "\n"


@pytest.mark.skipif(os.name == "nt", reason="no named pipes there")
def test_pipe_is_replaced_when_it_stands_for_the_generation(root, file):
    """Nothing waits for a writer that never comes."""
    tier = DiskTier(root)
    os.mkfifo(file)
    assert re.fullmatch("[0-9a-f]{32}", tier.generation)


def test_medium_is_named_when_a_folder_stands_for_the_generation(root, file):
    """What cannot be repaired is said with the store's folder."""
    tier = DiskTier(root)
    file.mkdir()
    with pytest.raises(StoreIOError, match=re.escape(str(root))):
        _ = tier.generation


@pytest.mark.parametrize("age_seconds", [0, 7200])
def test_old_temporary_file_of_a_generation_is_deleted_when_a_tier_opens(root, age_seconds):
    """A crash left it; a young one may be another process's."""
    DiskTier(root)
    temporary = root / "entries" / ".0123456789abcdef.tmp"
    temporary.write_bytes(b"")
    then = time.time() - age_seconds
    os.utime(temporary, (then, then))
    DiskTier(root)
    assert temporary.exists() is (age_seconds == 0)


def test_generation_is_that_of_the_farthest_tier_when_tiers_are_stacked(root):
    """Pitfall 42: what only the nearer tier still holds is not stored, and is put there again."""
    disk = DiskTier(root)
    store = TieredStore([MemoryTier(1 << 20), disk])
    entry = make_entry()
    store.put(entry)
    generation = store.generation
    assert generation == disk.generation
    shutil.rmtree(root)
    assert store.generation != generation
    assert store.lookup(entry.address).is_hit
    assert not store.is_stored(entry.address)
    store.put(entry)
    assert disk.is_stored(entry.address)
