"""A pipeline's cache and docstore skip what they know, and nothing goes missing for it."""

from __future__ import annotations

import shutil

import pytest
from llama_index.core.schema import MetadataMode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.pc_rag import PromptCacheEncoder

from pc_rag.corpus import Corpus
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from tests.support.corpora import CAT, DOG, FISH, loaded_model, tiny_engine
from tests.support.llama_index_nodes import LONG, document, node, pipeline


def test_cache_skips_the_encoder_when_nothing_changed_since(held):
    """The third run: the second one found that all is there."""
    run = pipeline(held, cache=True)
    for _ in range(2):
        run.run(documents=[document(LONG)])
    report = held.encoder.report
    made = run.run(documents=[document(LONG)])
    assert held.encoder.report is report
    assert held.chunks("d") == tuple(each.get_content(MetadataMode.LLM) for each in made)


def test_chunks_come_back_when_a_document_does_and_the_cache_knows_it(held):
    """Pitfall 42: a version that was replaced, and one that was removed, are taken in again."""
    run = pipeline(held, cache=True)
    for text in (CAT, DOG, CAT):
        run.run(documents=[document(text)])
        run.run(documents=[document(text)])
        assert held.chunks("d") == (text,)
    held.corpus.remove("d")
    run.run(documents=[document(CAT)])
    assert held.served(CAT) == [CAT]


@pytest.mark.parametrize("deleted", ["kv", "catalog"])
def test_nodes_are_encoded_again_when_a_folder_was_deleted_and_the_cache_persisted(
    opened, tmp_path, deleted
):
    """Pitfall 42: between two processes; the cache of the first is loaded by the second."""
    first = opened()
    run = pipeline(first, cache=True)
    for _ in range(3):
        run.run(documents=[document(LONG)])
    run.persist(tmp_path / "pipeline")
    texts = first.chunks("d")
    first.close()
    shutil.rmtree(tmp_path / deleted)

    second = opened()
    run = pipeline(second, cache=True)
    run.load(tmp_path / "pipeline")
    num_missing = len(texts) if deleted == "kv" else 0
    assert second.encodes(lambda: run.run(documents=[document(LONG)])) == num_missing
    assert second.served(*texts) == list(texts)
    run.run(documents=[document(LONG)])
    report = second.encoder.report
    run.run(documents=[document(LONG)])
    assert second.encoder.report is report


def test_nodes_are_encoded_again_when_the_folder_was_deleted_under_a_running_pipeline(held):
    """Pitfall 42: though memory holds the entries still: a restart would find none."""
    run = pipeline(held, cache=True)
    for _ in range(3):
        run.run(documents=[document(LONG)])
    texts = held.chunks("d")
    shutil.rmtree(held.folder / "kv")
    assert held.encodes(lambda: run.run(documents=[document(LONG)])) == len(texts)
    assert held.encoder.report.num_encoded == len(texts)
    assert DiskTier(held.folder / "kv").stats()[0].num_entries >= len(texts)


def test_nodes_are_encoded_again_when_a_docstore_leaves_the_encoder_none(held):
    """Pitfall 42: the pipeline knows that the documents did not change, and the store is gone."""
    run = pipeline(
        held,
        cache=True,
        docstore=SimpleDocumentStore(),
        docstore_strategy="duplicates_only",
    )
    for _ in range(3):
        run.run(documents=[document(LONG), document(CAT, "e")])
    texts = (*held.chunks("d"), *held.chunks("e"))
    shutil.rmtree(held.folder / "kv")
    assert held.encodes(lambda: run.run(documents=[document(LONG), document(CAT, "e")])) == len(
        texts
    )
    assert held.encodes(lambda: run.run(documents=[document(CAT, "e")])) == 0


def test_what_a_full_store_evicted_is_not_encoded_over_and_over(held):
    """Entries that went one by one are encoded when they are asked for, or ensured."""
    held.encoder([node(CAT), node(DOG)])
    held.encoder([])
    for part in held.corpus.plan(CAT).plan.cached:
        held.store.remove(part.key)
    assert held.encodes(lambda: held.encoder([])) == 0
    assert held.encodes(lambda: held.encoder.ensure_encoded([node(CAT)])) >= 1


def test_nodes_are_encoded_once_when_the_store_cannot_hold_them_all():
    """Pitfall 45: what was evicted is told, and is not taken for lost by the same call."""
    with tiny_engine(MemoryTier(300_000)) as engine, Corpus(engine, has_retrieval=False) as corpus:
        encoder = PromptCacheEncoder(corpus=corpus)
        encoder([node(f"{CAT} It is the cat number {i}.", f"d{i}") for i in range(20)])
        report = encoder.report
    assert report.num_encoded == 20
    assert 0 < report.num_evicted <= 20  # the corpus's prefix may be among them


@pytest.mark.parametrize(
    "change",
    [{"namespace": "other/"}, {"metadata_mode": MetadataMode.NONE}],
)
def test_cache_key_differs_when_settings_do(held, change):
    """What decides chunks and documents is part of the serialised form."""
    one, other = held.encoder.to_dict(), held.encoder.model_copy(update=change).to_dict()
    assert one != other
    assert PromptCacheEncoder.from_dict(other, corpus=held.corpus).to_dict() == other


def test_cache_key_differs_when_model_or_store_do(opened, tmp_path):
    """Pitfalls 3 and 42: named fields for people, and all of it in the revision."""
    first = opened()
    one = first.encoder.to_dict()
    first.close()
    second = opened(loaded=loaded_model(seed=1))
    two = second.encoder.to_dict()
    second.close()
    shutil.rmtree(tmp_path / "kv")
    three = opened().encoder.to_dict()
    assert one["fingerprint"] == three["fingerprint"] != two["fingerprint"]
    assert one["store_generation"] == two["store_generation"] != three["store_generation"]
    assert len({one["revision"], two["revision"], three["revision"]}) == 3


def test_pipeline_follows_when_documents_are_upserted(held):
    """A changed document replaces its version; unchanged ones do not reach the encoder."""
    run = pipeline(
        held,
        cache=True,
        docstore=SimpleDocumentStore(),
        vector_store=SimpleVectorStore(),
        docstore_strategy="upserts",
    )
    run.run(documents=[document(CAT, "a"), document(DOG, "b")])
    assert held.encodes(lambda: run.run(documents=[document(CAT, "a"), document(FISH, "b")])) == 1
    assert (held.chunks("a"), held.chunks("b")) == ((CAT,), (FISH,))
