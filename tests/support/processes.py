"""Scripts in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_script(script, folder, *, seed):
    """What a script prints last, as JSON, in a new process with another hash seed.

    Args:
        script: Python; ``sys.argv[1]`` is the folder.
        folder: Given to it.
        seed: ``PYTHONHASHSEED``.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
