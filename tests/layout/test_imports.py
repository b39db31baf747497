"""Rooms below the model load no tensor library."""

from __future__ import annotations

import subprocess
import sys


def test_no_tensor_library_is_loaded_when_layout_and_pml_are_imported():
    """Both are usable without torch and transformers, and start fast."""
    code = (
        "import sys, pc_rag.pml, pc_rag.layout; "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
