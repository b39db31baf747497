from __future__ import annotations

import numpy as np
import pytest
from langchain_pc_rag import PcRagEmbeddings

from pc_rag.corpus import default_embedder
from tests.support.corpora import CAT, DOG


def test_nothing_is_embedded_when_there_is_no_text():
    """No text needs no model."""
    assert PcRagEmbeddings().embed_documents([]) == []


@pytest.mark.slow
async def test_vectors_are_the_corpuss_own_when_the_default_model_embeds():
    """The default embedder's vectors, as lists of floats, in both worlds."""
    embeddings = PcRagEmbeddings()
    expected = default_embedder()([CAT, DOG])
    assert np.allclose(embeddings.embed_documents([CAT, DOG]), expected, atol=1e-6)
    assert np.allclose(await embeddings.aembed_documents([CAT, DOG]), expected, atol=1e-6)
    query = embeddings.embed_query(CAT)
    assert np.allclose(query, expected[0], atol=1e-5)
    assert np.isclose(np.linalg.norm(query), 1.0)
    assert type(query[0]) is float
