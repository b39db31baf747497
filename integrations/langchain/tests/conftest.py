from __future__ import annotations

from tests.support.adapter_fixtures import (
    corpus,
    one_thread,
    other_folder,
    quiet_machine,
    tiny_folder,
    waits_for_the_loop,
)

__all__ = [
    "corpus",
    "one_thread",
    "other_folder",
    "quiet_machine",
    "tiny_folder",
    "waits_for_the_loop",
]
