from pathlib import Path

import pytest

from tests.support.threads import one_torch_thread

__all__ = ["one_torch_thread"]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Benchmarks are scripts: they import each other as neighbours."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return BENCHMARKS
