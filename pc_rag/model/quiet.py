"""Loading models one at a time, without transformers' progress bars."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

TRANSFORMERS_LOCK = threading.RLock()
"""Held around ``from_pretrained``: it patches torch's initialisers while it runs, and two threads
that load at once leave the patches behind for the whole process."""


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Hide transformers' progress bars meanwhile; what the host has set comes back at the end.

    The switch is global, so this runs under ``TRANSFORMERS_LOCK``.
    """
    was_shown = transformers_logging.is_progress_bar_enabled()
    if was_shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
