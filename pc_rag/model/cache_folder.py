"""Where pc-rag keeps what it derives from models, and small facts about files that it remembers."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

if TYPE_CHECKING:
    from collections.abc import Iterable

CACHE_DIR_VARIABLE = "PC_RAG_CACHE_DIR"
"""Environment variable that moves the cache folder."""


def cache_folder() -> Path:
    """The folder for converted models and digests; not created."""
    return Path(os.environ.get(CACHE_DIR_VARIABLE) or user_cache_path("pc-rag"))


def file_signature(files: Iterable[Path], *, salt: str = "") -> str:
    """A digest of the files' places, sizes and times: another one means that they may differ.

    Args:
        files: Existing files.
        salt: What else the remembered fact depends on.
    """
    digest = hashlib.sha256(salt.encode())
    for path in sorted(files):
        status = path.stat()
        facts = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(repr(facts).encode())
    return digest.hexdigest()


def recall(memo: Path, signature: str) -> str | None:
    """The value remembered in a file under this signature; ``None`` if there is none."""
    try:
        content = json.loads(memo.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # absent, or cut off by a crash: it is computed anew
    value = content.get(signature) if isinstance(content, dict) else None
    return value if isinstance(value, str) else None


def remember(memo: Path, signature: str, value: str) -> None:
    """Write a value under a signature, replacing what the file held; quietly not, if read-only."""
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=memo.parent, prefix=".memo-", delete=False
        ) as temporary:
            temporary.write(json.dumps({signature: value}))
        os.replace(temporary.name, memo)  # noqa: PTH105 - the name is a string
    except OSError:
        return  # a cache that cannot be written costs time, not correctness
