from __future__ import annotations

import pytest
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.corpus import Corpus
from tests.support.adapter_fixtures import (
    corpus,
    one_thread,
    other_folder,
    quiet_machine,
    tiny_folder,
    waits_for_the_loop,
)
from tests.support.corpora import CAT, tiny_engine
from tests.support.engines import SpyStore
from tests.support.llama_index_nodes import Opened

__all__ = [
    "corpus",
    "one_thread",
    "other_folder",
    "quiet_machine",
    "tiny_folder",
    "waits_for_the_loop",
]


@pytest.fixture
def spied():
    """A model over a store that knows open leases, used once."""
    store = SpyStore()
    with tiny_engine(store) as engine, Corpus(engine, None, has_retrieval=False) as corpus:
        corpus.add([CAT])
        llm = PcRagLLM(corpus=corpus, max_tokens=100)
        llm.complete(CAT, max_tokens=1)
        yield llm, engine, store


@pytest.fixture
def opened(tmp_path):
    """Opens corpora over one folder, with an encoder each; closes them."""
    made = []

    def make(**options):
        made.append(Opened(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def held(opened):
    """One of them, with the defaults."""
    return opened()
