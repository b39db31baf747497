from __future__ import annotations

import pytest
import torch

from tests.support.corpora import TEXTS, opened


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of a tiny model only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add(TEXTS)
        yield corpus
