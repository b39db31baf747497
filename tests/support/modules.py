"""Modules out of text, as if a user had written them."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

_NUMBERS = itertools.count()


def import_text(text: str, folder: Path) -> ModuleType:
    """Write a module to a file of its own, and import it."""
    name = f"written_{next(_NUMBERS)}"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where annotations of its classes are looked up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
