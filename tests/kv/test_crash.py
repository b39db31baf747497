"""E8: a store that is killed at any moment is consistent, and holds what it acknowledged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pc_rag.kv import DiskTier
from pc_rag.kv.entry_name import EntryName
from tests.support.kv import CPU, assert_same_entry, make_entry

REPOSITORY = Path(__file__).parents[2]
NUM_WRITERS = 2
NUM_KILLS = 12

# A writer imports torch once, forks again and again, and kills what it forked.
WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from pc_rag.kv import DiskTier
from tests.support.kv import make_entry

root, seed, num_kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
moments = random.Random(seed)
for life in range(num_kills):
    child = os.fork()
    if child == 0:
        tier = DiskTier(root)
        for number in range(10**6):
            ids = (seed, life, number, *range(300))
            tier.put(make_entry(ids))
            os.write(1, f"{seed} {life} {number}\\n".encode())
    time.sleep(moments.uniform(0.01, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked writers")
def test_e8_acknowledged_entries_are_intact_when_writers_are_killed(tmp_path: Path) -> None:
    """E8: two processes over one store, killed at random moments, again and again."""
    writers = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                WRITER,
                str(tmp_path),
                str(seed),
                str(NUM_KILLS),
            ],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
        )
        for seed in range(NUM_WRITERS)
    ]
    lines = [line for writer in writers for line in writer.communicate(timeout=60)[0].splitlines()]
    assert [writer.returncode for writer in writers] == [0] * NUM_WRITERS
    acknowledged = [tuple(int(part) for part in line.split()) for line in lines]
    lives = {numbers[:2] for numbers in acknowledged}
    assert len(lives) > NUM_WRITERS * NUM_KILLS // 2, "most writers were killed before they wrote"

    tier = DiskTier(tmp_path)
    for numbers in acknowledged:
        entry = make_entry((*numbers, *range(300)))
        with tier.lease(entry.address, CPU) as lease:
            assert_same_entry(lease.entry, entry)
    report = tier.check_integrity()
    assert report.damaged == ()
    assert report.num_checked >= len(acknowledged)
    visible = [path for path in (tmp_path / "entries").rglob("*") if EntryName.parse(path.name)]
    assert len(visible) == tier.stats()[0].num_entries == report.num_checked
