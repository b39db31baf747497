"""Nodes are encoded when they are ingested, once, and a corpus follows what becomes of them."""

from __future__ import annotations

import asyncio
import copy
import pickle
import shutil
import threading

import pytest
from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    Document,
    ImageNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.pc_rag import PromptCacheEncoder

from pc_rag.corpus import Corpus, chunk_id_of
from pc_rag.errors import ConfigError, LayoutError, StoreIOError
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.tiered_store import TieredStore
from tests.support.corpora import CAT, DOG, FISH, SHORT, chunk_uses, loaded_model, tiny_engine
from tests.support.engines import SpyStore

LONG = " ".join(f"Line {number} tells of the number {number}." for number in range(12))


class Opened:
    """A corpus in a folder, over a store that counts; closed and opened again at will."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.store = SpyStore(TieredStore([MemoryTier(1 << 30), DiskTier(folder / "kv")]))
        self.engine = tiny_engine(self.store, **options)
        self.corpus = Corpus(self.engine, folder / "catalog", has_retrieval=False)
        self.encoder = PromptCacheEncoder(corpus=self.corpus)
        with self.engine.source.acquire(*self._prefix()):
            pass  # the prefix is encoded here, so that what is counted later are chunks

    def _prefix(self):
        request = self.corpus.plan("x")
        return list(request.recipes), request.recipes

    def encodes(self, work):
        """How many entries were made and stored while something was done."""
        before = self.store.calls["put"]
        work()
        return self.store.calls["put"] - before

    def served(self, *texts):
        """The texts of whose chunks a prompt reads the entries."""
        uses = chunk_uses(self.corpus.generate(" | ".join(texts), SHORT))
        known = {chunk_id_of(text): text for text in texts}
        return [known[use.label] for use in uses if use.is_hit]

    def chunks(self, id_):
        return self.corpus.upkeep.chunk_texts(id_)

    def close(self):
        self.corpus.close()
        self.engine.close()
        self.store.close()


@pytest.fixture
def opened(tmp_path):
    made = []

    def make(**options):
        made.append(Opened(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def held(opened):
    return opened()


def document(text, id_="d", **metadata):
    return Document(text=text, doc_id=id_, metadata=metadata)


def node(text, id_="d", **metadata):
    source = RelatedNodeInfo(node_id=id_)
    return TextNode(text=text, metadata=metadata, relationships={NodeRelationship.SOURCE: source})


def splitter():
    return SentenceSplitter(chunk_size=16, chunk_overlap=0, tokenizer=str.split)


def pipeline(held, *, cache=False, **options):
    return IngestionPipeline(
        transformations=[splitter(), held.encoder], disable_cache=not cache, **options
    )


# -- what becomes a chunk -------------------------------------------------------------------------


def test_nodes_come_back_as_they_are_when_they_were_encoded(held):
    """The same objects, not modified; their texts are chunks of one document, in order."""
    nodes = [node(f" {CAT} "), node(DOG), node(FISH, "other")]
    before = [each.model_dump() for each in nodes]
    assert held.encodes(lambda: held.encoder(nodes)) == 3
    report = held.encoder.report
    assert (report.num_added, report.num_documents, report.num_encoded) == (2, 2, 3)
    assert held.encoder(nodes) is nodes
    assert [each.model_dump() for each in nodes] == before
    assert held.chunks("d") == (CAT, DOG)
    assert held.chunks("other") == (FISH,)
    assert held.served(DOG, CAT, FISH) == [DOG, CAT, FISH]


def test_chunk_is_what_a_prompt_holds_when_a_node_has_metadata(held):
    """The header of the metadata that LlamaIndex shows a model, and the text."""
    each = node(CAT, page="2", secret="s")
    each.excluded_llm_metadata_keys = ["secret"]
    held.encoder([each])
    assert held.chunks("d") == (each.get_content(MetadataMode.LLM),)
    assert held.chunks("d") == (f"page: 2\n\n{CAT}",)


def test_chunk_is_the_text_alone_when_metadata_is_not_encoded(held):
    """Pitfall 39: then no edit of metadata encodes anything, and the text is found behind it."""
    encoder = held.encoder.model_copy(update={"metadata_mode": MetadataMode.NONE})
    encoder([node(CAT, page="2")])
    assert held.encodes(lambda: encoder([node(CAT, page="3")])) == 0
    assert held.served(f"page: 3\n\n{CAT}", CAT) == [CAT, CAT]


def test_excluded_metadata_encodes_nothing_when_it_is_edited(held):
    """Pitfalls 36 and 39: what no prompt shows is no part of a chunk; what it shows is."""

    def edited(**metadata):
        each = node(CAT, **metadata)
        each.excluded_llm_metadata_keys = ["date"]
        return [each]

    held.encoder(edited(date="1", page="1"))
    assert held.encodes(lambda: held.encoder(edited(date="2", page="1"))) == 0
    assert held.encodes(lambda: held.encoder(edited(date="2", page="2"))) == 1
    assert held.chunks("d") == (f"page: 2\n\n{CAT}",)


def test_node_is_passed_on_when_it_has_no_text(held):
    """Images and blank texts, also with a header: no chunk, and the others are encoded."""
    nodes = [
        ImageNode(image="aGk=", metadata={"file_path": "a.png"}),
        node(" \n", page="1"),
        node(CAT),
    ]
    assert held.encodes(lambda: held.encoder(nodes)) == 1
    assert held.encoder(nodes) is nodes
    assert held.chunks("d") == (CAT,)


def test_document_is_one_chunk_when_nothing_splits_it(held):
    """A source document is a node, too; a node without a source is a document of its own."""
    lone = TextNode(text=DOG)
    held.encoder([document(CAT), lone])
    assert held.chunks("d") == (CAT,)
    assert held.chunks(lone.node_id) == (DOG,)


def test_nothing_is_encoded_when_a_node_is_too_long(opened):
    """All are read before the first is encoded; the error names document and chunk."""
    held = opened(context_limit=300)
    with pytest.raises(LayoutError, match="'b', chunk 0"):
        held.encoder([node(CAT, "a"), node(LONG, "b")])
    assert held.corpus.documents() == ()


@pytest.mark.parametrize("is_first", [True, False])
def test_embeddings_are_kept_when_they_are_made_before_or_behind(held, is_first):
    """Either order gives the same nodes and the same chunks."""
    steps = [MockEmbedding(embed_dim=3), held.encoder]
    steps = steps if is_first else steps[::-1]
    made = IngestionPipeline(transformations=[splitter(), *steps]).run(documents=[document(LONG)])
    assert [each.embedding for each in made] == [[0.5] * 3] * len(made)
    assert held.chunks("d") == tuple(each.get_content(MetadataMode.LLM) for each in made)


# -- again, and changed ---------------------------------------------------------------------------


def test_nothing_is_encoded_when_a_folder_is_read_again(held, tmp_path):
    """Pitfalls 36 and 39: node ids are others, dates are metadata, the path is in the header."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text(LONG)
    (folder / "b.txt").write_text(CAT)

    def run():
        return pipeline(held).run(documents=SimpleDirectoryReader(folder).load_data())

    first = run()
    assert "file_path: " in held.chunks(first[0].ref_doc_id)[0]
    assert "last_modified" not in held.chunks(first[0].ref_doc_id)[0]
    ids = {each.ref_doc_id for each in first}
    again = []
    assert held.encodes(lambda: again.extend(run())) == 0
    assert {each.node_id for each in again}.isdisjoint(each.node_id for each in first)
    assert held.served(*(each.get_content(MetadataMode.LLM) for each in again)) == [
        each.get_content(MetadataMode.LLM) for each in again
    ]
    assert len(held.corpus.documents()) == len(ids | {each.ref_doc_id for each in again})


def test_only_new_chunks_are_encoded_when_a_document_changes(held):
    """Its former version is replaced: what went is no longer recognised."""
    held.encoder([node(CAT), node(DOG)])
    assert held.encodes(lambda: held.encoder([node(CAT), node(FISH)])) == 1
    assert held.chunks("d") == (CAT, FISH)
    assert held.served(CAT, DOG, FISH) == [CAT, FISH]
    assert held.encoder.report.num_updated == 1


def test_old_version_answers_when_encoding_the_new_one_fails(held):
    """Pitfall 41: all of a document changes, or nothing."""
    held.encoder([node(CAT), node(DOG)])
    held.store.broken.add("put")
    with pytest.raises(StoreIOError):
        held.encoder([node(CAT), node(FISH)])
    held.store.broken.clear()
    assert held.chunks("d") == (CAT, DOG)
    assert held.served(CAT, DOG, FISH) == [CAT, DOG]
    assert held.encodes(lambda: held.encoder([node(CAT), node(FISH)])) == 1
    assert held.served(CAT, DOG, FISH) == [CAT, FISH]


def test_documents_are_kept_apart_when_namespaces_differ(held):
    """The same source id in two indexes is two documents."""
    other = PromptCacheEncoder(corpus=held.corpus, namespace="other/")
    held.encoder([node(CAT)])
    other([node(DOG)])
    assert (held.chunks("d"), held.chunks("other/d")) == ((CAT,), (DOG,))


# -- a pipeline's cache ---------------------------------------------------------------------------


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


# -- repair ---------------------------------------------------------------------------------------


def test_nothing_is_dropped_when_nodes_are_ensured(held):
    """Unknown ones come behind the known chunks of their document; 0 once all is there."""
    held.encoder([node(CAT), node(DOG)])
    assert held.encoder.ensure_encoded([node(FISH), node("New.", "new")]).num_encoded == 2
    assert held.chunks("d") == (CAT, DOG, FISH)
    assert held.chunks("new") == ("New.",)
    assert held.encoder.ensure_encoded([node(DOG), node(FISH)]).num_encoded == 0
    assert held.chunks("d") == (CAT, DOG, FISH)


# -- async, copies, processes -------------------------------------------------------------------


async def test_event_loop_goes_on_when_nodes_are_encoded(held, monkeypatch):
    """Pitfall 28: a pipeline's ``arun`` computes in a thread."""
    threads, loop_ran = [], threading.Event()
    prepare = held.corpus.prepare
    loop, came = asyncio.get_running_loop(), asyncio.Event()

    def wait(documents):
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(came.set)
        assert loop_ran.wait(60)
        return prepare(documents)

    monkeypatch.setattr(held.corpus, "prepare", wait)
    running = asyncio.create_task(pipeline(held).arun(documents=[document(LONG)]))
    await came.wait()
    loop_ran.set()
    made = await running
    assert threads[0] is not threading.main_thread()
    assert held.chunks("d") == tuple(each.get_content(MetadataMode.LLM) for each in made)


def test_pipeline_is_refused_when_it_has_several_workers(held):
    """With what to do; a model cannot go to other processes."""
    with pytest.raises(ConfigError, match="num_workers"):
        pickle.dumps(held.encoder)
    with pytest.raises(ConfigError, match="num_workers"):
        pipeline(held).run(documents=[document(CAT), document(DOG, "e")], num_workers=2)
    assert held.corpus.documents() == ()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: e.model_copy(deep=True)])
def test_corpus_is_shared_when_the_encoder_is_copied(held, copied):
    """Frameworks copy components; neither model nor store is copied."""
    assert copied(held.encoder).open_corpus() is held.corpus


def test_corpus_is_opened_when_nodes_come(held):
    """``llm`` gives it; constructing asks for nothing."""
    asked = []

    class Model:
        def open_corpus(self):
            asked.append(1)
            return held.corpus

    encoder = PromptCacheEncoder(llm=Model())
    assert encoder.report is None
    assert asked == []
    encoder([node(CAT)])
    assert held.served(CAT) == [CAT]
    assert asked


@pytest.mark.parametrize("options", [{}, {"llm": object()}, {"llm": 1, "corpus": None}])
def test_encoder_is_refused_when_it_has_no_corpus(options):
    """One of two, and one that can be used."""
    with pytest.raises(ConfigError, match="corpus"):
        PromptCacheEncoder(**options)


def test_encoder_is_refused_when_it_has_two_corpora(held):
    """Which one to use could not be said."""
    with pytest.raises(ConfigError, match="one of"):
        PromptCacheEncoder(corpus=held.corpus, llm=held)


def test_progress_is_shown_when_it_is_asked_for(held, capsys):
    """A bar on stderr that reaches its end."""
    held.encoder([node(CAT), node(DOG)], show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Encoding chunks" in shown.err
    assert "100%" in shown.err


# -- in an index ----------------------------------------------------------------------------------


def test_index_follows_when_documents_are_refreshed(held):
    """``refresh_ref_docs``: unchanged ones encode nothing, changed ones what changed."""
    index = VectorStoreIndex.from_documents(
        [document(CAT, "a"), document(DOG, "b")],
        transformations=[splitter(), held.encoder],
        embed_model=MockEmbedding(embed_dim=3),
    )
    changed = [document(CAT, "a"), document(FISH, "b"), document(LONG, "c")]
    num_new = len(splitter().get_nodes_from_documents([document(LONG)])) + 1
    assert held.encodes(lambda: index.refresh_ref_docs(changed)) == num_new
    assert (held.chunks("a"), held.chunks("b")) == ((CAT,), (FISH,))
    assert held.encodes(lambda: index.refresh_ref_docs(changed)) == 0


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
