"""A corpus follows the docstore of a pipeline or an index, also when documents are deleted."""

from __future__ import annotations

import shutil

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import Document, MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.pc_rag import PromptCacheEncoder

from pc_rag.corpus import Corpus
from pc_rag.corpus import Document as CorpusDocument
from pc_rag.errors import IngestError, StoreIOError
from tests.support.corpora import CAT, DOG, FISH, SHORT, chunk_uses, opened, tiny_engine
from tests.support.engines import SpyStore
from tests.support.llama_index_nodes import LONG, splitter

TEXTS = {"a": CAT, "b": DOG, "c": LONG}


def documents(**texts):
    return [Document(text=text, doc_id=id_) for id_, text in texts.items()]


@pytest.fixture
def corpus():
    with opened(has_retrieval=False) as corpus:
        yield corpus


@pytest.fixture
def encoder(corpus):
    return PromptCacheEncoder(corpus=corpus, namespace="ns/")


@pytest.fixture
def index(encoder):
    """An index over the texts, whose docstore holds the nodes."""
    return VectorStoreIndex.from_documents(
        documents(**TEXTS),
        transformations=[splitter(), encoder],
        embed_model=MockEmbedding(embed_dim=3),
    )


def pipeline(encoder, strategy="upserts_and_delete", **options):
    return IngestionPipeline(
        transformations=[splitter(), encoder, MockEmbedding(embed_dim=3)],
        docstore=SimpleDocumentStore(),
        vector_store=SimpleVectorStore(),
        docstore_strategy=strategy,
        **options,
    )


def ids(corpus):
    return [record.id for record in corpus.documents()]


def is_served(corpus, text):
    return [use.is_hit for use in chunk_uses(corpus.generate(f"x {text} y", SHORT))] == [True]


# -- the docstore of an index ---------------------------------------------------------------------


def test_document_goes_when_the_index_deleted_it(corpus, encoder, index):
    """Its chunks are no longer recognised, ``gc`` reclaims them; the others cost nothing."""
    index.delete_ref_doc("b", delete_from_docstore=True)
    report = encoder.reconcile(index.docstore)
    assert (report.removed, report.missing, report.num_kept) == (("b",), (), 2)
    assert report.ingest.num_encoded == 0
    assert ids(corpus) == ["ns/a", "ns/c"]
    assert is_served(corpus, CAT)
    assert not is_served(corpus, DOG)
    assert corpus.gc().num_entries == 1
    assert encoder.reconcile(index.docstore).removed == ()


def test_document_stays_when_the_docstore_keeps_it(corpus, encoder, index):
    """LlamaIndex leaves nodes in the docstore unless told otherwise: another index may use them."""
    index.delete_ref_doc("b")
    assert encoder.reconcile(index.docstore).removed == ()
    assert ids(corpus) == ["ns/a", "ns/b", "ns/c"]


def test_chunks_follow_when_the_docstore_has_other_nodes(corpus, encoder, index):
    """Nodes that came past the encoder are encoded, and replace what the corpus had."""
    index.delete_ref_doc("b", delete_from_docstore=True)
    (node,) = splitter().get_nodes_from_documents(documents(b=FISH))
    index.insert_nodes([node, TextNode(text="alone", id_="n")])
    report = encoder.reconcile(index.docstore)
    assert (report.removed, report.num_kept) == ((), 4)
    assert (report.ingest.num_encoded, report.ingest.num_updated, report.ingest.num_added) == (
        2,
        1,
        1,
    )
    assert corpus.upkeep.chunk_texts("ns/b") == (FISH,)
    assert corpus.upkeep.chunk_texts("ns/n") == ("alone",)


def test_corpus_is_rebuilt_when_it_was_lost_and_the_docstore_has_the_nodes(encoder, index):
    """In the order in which they were split."""
    with opened(has_retrieval=False) as other:
        encoder = PromptCacheEncoder(corpus=other)
        report = encoder.reconcile(index.docstore)
        assert (report.missing, report.num_kept) == ((), 3)
        nodes = splitter().get_nodes_from_documents(documents(c=LONG))
        expected = tuple(each.get_content(MetadataMode.LLM) for each in nodes)
        assert other.upkeep.chunk_texts("c") == expected
        assert len(expected) > 1


def test_chunks_keep_their_order_when_a_docstore_lists_nodes_in_another(corpus, encoder, index):
    """A database lists them as it likes."""
    before = corpus.upkeep.chunk_texts("ns/c")
    other = SimpleDocumentStore.from_dict(index.docstore.to_dict())
    data = other._kvstore._collections_mappings
    name = "docstore/data"
    data[name] = dict(reversed(data[name].items()))
    assert encoder.reconcile(other).ingest.num_unchanged == 3
    assert corpus.upkeep.chunk_texts("ns/c") == before


def test_documents_stay_when_the_docstore_knows_their_nodes_without_text(corpus, encoder, index):
    """It says which documents the nodes are of."""
    docstore = SimpleDocumentStore()
    docstore.add_documents(list(index.docstore.docs.values()), store_text=False)
    report = encoder.reconcile(docstore)
    assert (report.removed, report.num_kept) == ((), 3)


def test_document_goes_when_its_nodes_are_not_among_those_given(corpus, encoder, index):
    """For vector stores that keep the texts: what they have is passed itself."""
    index.delete_ref_doc("b", delete_from_docstore=True)
    report = encoder.reconcile(list(index.docstore.docs.values()))
    assert (report.removed, report.num_kept, report.ingest.num_encoded) == (("b",), 2, 0)
    with pytest.raises(IngestError, match="drops_all"):
        encoder.reconcile([])


# -- the docstore of a pipeline -------------------------------------------------------------------


def test_document_goes_when_the_pipeline_deleted_it(corpus, encoder):
    """``upserts_and_delete`` takes it out of docstore and vector store."""
    run = pipeline(encoder)
    run.run(documents=documents(**TEXTS))
    run.run(documents=documents(a=CAT, c=LONG))
    report = encoder.reconcile(run.docstore)
    assert (report.removed, report.missing, report.num_kept) == (("b",), (), 2)
    assert report.ingest.num_encoded == 0
    assert ids(corpus) == ["ns/a", "ns/c"]


async def test_document_goes_when_the_pipeline_deleted_it_in_an_event_loop(corpus, encoder):
    """As above, by ``arun``."""
    run = pipeline(encoder)
    await run.arun(documents=documents(**TEXTS))
    await run.arun(documents=documents(a=CAT, c=FISH))
    assert encoder.reconcile(run.docstore).removed == ("b",)
    assert corpus.upkeep.chunk_texts("ns/c") == (FISH,)


def test_documents_stay_when_the_docstore_keeps_only_their_hashes(corpus, encoder):
    """A pipeline may be told to store no text."""
    run = pipeline(encoder, "upserts")
    run.run(documents=documents(**TEXTS), store_doc_text=False)
    assert run.docstore.docs == {}
    report = encoder.reconcile(run.docstore)
    assert (report.removed, report.num_kept) == ((), 3)


def test_documents_stay_when_two_have_one_hash_and_no_text(corpus, encoder):
    """A docstore lists one of them; it is asked for the other by name."""
    run = pipeline(encoder, "upserts")
    run.run(documents=documents(a=CAT, b=CAT, c=DOG), store_doc_text=False)
    assert encoder.reconcile(run.docstore).removed == ()
    assert ids(corpus) == ["ns/a", "ns/b", "ns/c"]


def test_document_is_named_when_the_corpus_lost_it(corpus, encoder):
    """Pitfall 42: the pipeline knows it and would not run it again; its chunks are not at hand."""
    run = pipeline(encoder)
    run.run(documents=documents(**TEXTS))
    corpus.remove("ns/b")
    report = encoder.reconcile(run.docstore)
    assert (report.removed, report.missing, report.num_kept) == ((), ("b",), 2)
    nodes = splitter().get_nodes_from_documents(documents(b=DOG))
    assert encoder.ensure_encoded(nodes).num_added == 1
    assert encoder.reconcile(run.docstore).missing == ()


def test_entries_come_back_when_the_store_was_deleted_and_only_documents_are_known(tmp_path):
    """Pitfall 42: the corpus has the chunks' texts, so nothing needs to be split again."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        encoder = PromptCacheEncoder(corpus=corpus)
        run = pipeline(encoder)
        run.run(documents=documents(**TEXTS))
        num_chunks = corpus.stats().catalog.num_chunks
        shutil.rmtree(tmp_path / "kv")
        assert encoder.reconcile(run.docstore).ingest.num_encoded == num_chunks


def test_nodes_are_taken_when_pipeline_and_index_share_a_docstore(corpus, encoder, index):
    """Where it has both a document and its nodes, the nodes say what the chunks are."""
    index.docstore.add_documents(documents(**TEXTS))
    before = {id_: corpus.upkeep.chunk_texts(id_) for id_ in ids(corpus)}
    report = encoder.reconcile(index.docstore)
    assert (report.removed, report.missing, report.ingest.num_unchanged) == ((), (), 3)
    assert {id_: corpus.upkeep.chunk_texts(id_) for id_ in ids(corpus)} == before


# -- what is not touched --------------------------------------------------------------------------


def test_others_stay_when_a_namespace_is_reconciled(corpus, encoder, index):
    """Documents of another namespace, also one that begins alike, and those added by hand."""
    PromptCacheEncoder(corpus=corpus, namespace="ns/x")(documents(a=FISH))
    PromptCacheEncoder(corpus=corpus)(documents(a=FISH))
    corpus.add([CorpusDocument(FISH, id="ns/by-hand")])
    index.delete_ref_doc("b", delete_from_docstore=True)
    assert encoder.reconcile(index.docstore).removed == ("b",)
    assert ids(corpus) == ["a", "ns/a", "ns/by-hand", "ns/c", "ns/xa"]


def test_nothing_is_removed_when_the_docstore_is_empty(corpus, encoder, index):
    """It may be the wrong one: the docstore of an index whose vector store keeps the texts, say."""
    with pytest.raises(IngestError, match=r"3.*drops_all"):
        encoder.reconcile(SimpleDocumentStore())
    assert len(ids(corpus)) == 3
    report = encoder.reconcile(SimpleDocumentStore(), drops_all=True)
    assert report.removed == ("a", "b", "c")
    assert ids(corpus) == []
    assert encoder.reconcile(SimpleDocumentStore()).removed == ()


def test_nothing_is_removed_when_something_else_than_a_docstore_is_given(corpus, encoder, index):
    """An index or its vector store, say: what of it is wanted is told."""
    for given in (index, index.vector_store, None):
        with pytest.raises(IngestError, match=r"got a \w+; pass a docstore"):
            encoder.reconcile(given)
    with pytest.raises(IngestError, match="pass nodes"):
        encoder.reconcile(["a"])
    assert len(ids(corpus)) == 3


def test_nothing_is_removed_when_encoding_fails():
    """What is encoded comes first; the next call does both."""
    store = SpyStore()
    with tiny_engine(store) as engine, Corpus(engine, has_retrieval=False) as corpus:
        encoder = PromptCacheEncoder(corpus=corpus)
        encoder(documents(a=CAT, b=DOG))
        docstore = SimpleDocumentStore()
        nodes = splitter().get_nodes_from_documents(documents(c=FISH))
        docstore.add_documents(nodes)
        store.broken.add("put")
        with pytest.raises(StoreIOError):
            encoder.reconcile(docstore)
        assert ids(corpus) == ["a", "b"]
        store.broken.clear()
        assert encoder.reconcile(docstore).removed == ("a", "b")
        assert ids(corpus) == ["c"]


def test_persisted_docstore_is_followed_when_it_is_loaded_again(corpus, encoder, index, tmp_path):
    """Through a storage context, as an index is kept between processes."""
    index.delete_ref_doc("c", delete_from_docstore=True)
    index.storage_context.persist(tmp_path / "index")
    loaded = StorageContext.from_defaults(persist_dir=str(tmp_path / "index"))
    assert encoder.reconcile(loaded.docstore).removed == ("c",)
