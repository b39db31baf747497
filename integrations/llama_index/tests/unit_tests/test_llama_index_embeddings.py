"""Our embedders behind LlamaIndex's embedding model."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading

import numpy as np
import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.llms.pc_rag import PcRagEmbedding
from llama_index.llms.pc_rag import embeddings as module

from pc_rag.corpus import default_embedder
from tests.support.corpora import CAT, DIM, DOG, FISH, TEXTS, embed_words


@pytest.fixture
def asked(monkeypatch):
    """What the embedder is asked for, in place of a real one."""
    batches = []

    def embed(texts):
        batches.append(list(texts))
        return embed_words(texts)

    monkeypatch.setattr(module, "default_embedder", lambda *, device: embed)
    return batches


def rows(vectors):
    return np.asarray(vectors, dtype=np.float32)


@pytest.mark.usefixtures("asked")
async def test_vectors_are_the_embedders_when_texts_or_queries_come():
    """One by one, in batches and from an event loop, as lists of floats."""
    embedding = PcRagEmbedding()
    expected = embed_words(TEXTS)
    assert np.allclose(rows(embedding.get_text_embedding_batch(list(TEXTS))), expected)
    assert np.allclose(rows(await embedding.aget_text_embedding_batch(list(TEXTS))), expected)
    for text, row in zip(TEXTS, expected, strict=True):
        assert np.allclose(embedding.get_query_embedding(text), row)
        assert np.allclose(embedding.get_text_embedding(text), row)
        assert np.allclose(await embedding.aget_query_embedding(text), row)
        assert np.allclose(await embedding.aget_text_embedding(text), row)
    vector = embedding.get_query_embedding(CAT)
    assert (type(vector), type(vector[0]), len(vector)) == (list, float, DIM)


async def test_texts_are_embedded_in_batches_when_there_are_many(asked):
    """``embed_batch_size`` at a time, not one by one."""
    embedding = PcRagEmbedding(embed_batch_size=2)
    embedding.get_text_embedding_batch([CAT, DOG, FISH])
    await embedding.aget_text_embedding_batch([CAT, DOG, FISH])
    assert sorted(map(len, asked)) == [1, 1, 2, 2]


@pytest.mark.parametrize("way", ["aget_query_embedding", "aget_text_embedding"])
async def test_loop_goes_on_when_a_text_is_embedded(monkeypatch, way):
    """Pitfall 28, of embeddings: this one waits for something that only the loop can do."""
    loop, has_run = asyncio.get_running_loop(), threading.Event()

    def embed(texts):
        loop.call_soon_threadsafe(has_run.set)
        assert has_run.wait(30)
        return embed_words(texts)

    monkeypatch.setattr(module, "default_embedder", lambda *, device: embed)
    assert len(await getattr(PcRagEmbedding(), way)(CAT)) == DIM


async def test_nothing_is_embedded_when_there_is_no_text(asked):
    """No text needs no model."""
    assert PcRagEmbedding().get_text_embedding_batch([]) == []
    assert await PcRagEmbedding().aget_text_embedding_batch([]) == []
    assert asked == []


def test_model_is_the_named_one_when_a_name_is_given(monkeypatch):
    """With its device; nothing is loaded before a text comes."""
    made = []
    monkeypatch.setattr(
        module, "sentence_transformer", lambda name, *, device: made.append((name, device))
    )
    embedding = PcRagEmbedding("some/model", device="cpu")
    assert made == [("some/model", "cpu")]
    assert embedding.to_dict()["model_name"] == "some/model"
    assert embedding.to_payload()["class_name"] == "PcRagEmbedding"


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    "rebuild",
    [
        copy.copy,
        copy.deepcopy,
        lambda each: pickle.loads(pickle.dumps(each)),
        lambda each: PcRagEmbedding.from_dict(each.to_dict()),
    ],
    ids=["copy", "deepcopy", "pickle", "dict"],
)
def test_copy_embeds_the_same_when_it_is_made(rebuild):
    """Pipelines copy and pickle their transforms."""
    first = PcRagEmbedding(embed_batch_size=3, device="cpu")
    second = rebuild(first)
    assert (second.embed_batch_size, second.device) == (3, "cpu")
    assert second.get_text_embedding(CAT) == first.get_text_embedding(CAT)


@pytest.mark.usefixtures("asked")
def test_index_finds_the_nearest_text_when_it_embeds_with_us():
    """As the embedding model of an index."""
    nodes = [TextNode(text=text) for text in TEXTS]
    index = VectorStoreIndex(nodes, embed_model=PcRagEmbedding())
    (found,) = index.as_retriever(similarity_top_k=1).retrieve("A dog barked at a train")
    assert found.text == DOG


@pytest.mark.slow
async def test_vectors_are_the_corpuss_own_when_the_default_model_embeds():
    """The default embedder's vectors, of length 1."""
    embedding = PcRagEmbedding()
    expected = default_embedder()([CAT, DOG])
    assert np.allclose(rows(embedding.get_text_embedding_batch([CAT, DOG])), expected, atol=1e-6)
    query = await embedding.aget_query_embedding(CAT)
    assert np.allclose(query, expected[0], atol=1e-5)
    assert np.isclose(np.linalg.norm(query), 1.0)
