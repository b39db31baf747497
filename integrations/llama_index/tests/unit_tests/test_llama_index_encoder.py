"""Nodes are encoded when they are ingested, once, and a corpus follows what becomes of them."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading

import pytest
from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import (
    ImageNode,
    MetadataMode,
    NodeWithScore,
    TextNode,
)
from llama_index.llms.pc_rag import PcRagLLM, PromptCacheEncoder

from pc_rag.corpus import chunk_id_of
from pc_rag.errors import ConfigError, IngestError, LayoutError, StoreIOError
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    recorded,
)
from tests.support.llama_index_nodes import LONG, document, node, pipeline, splitter

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


# -- repair ---------------------------------------------------------------------------------------


def test_nothing_is_dropped_when_nodes_are_ensured(held):
    """Unknown ones come behind the known chunks of their document; 0 once all is there."""
    held.encoder([node(CAT), node(DOG)])
    assert held.encoder.ensure_encoded([node(FISH), node("New.", "new")]).num_encoded == 2
    assert held.chunks("d") == (CAT, DOG, FISH)
    assert held.chunks("new") == ("New.",)
    assert held.encoder.ensure_encoded([node(DOG), node(FISH)]).num_encoded == 0
    assert held.chunks("d") == (CAT, DOG, FISH)


def test_what_a_retriever_found_is_refused_when_nodes_are_ensured(held):
    """Nodes stand within it; what to pass is told."""
    with pytest.raises(IngestError, match=r"NodeWithScore.*each\.node"):
        held.encoder.ensure_encoded([NodeWithScore(node=node(CAT))])


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


async def test_thread_is_waited_for_when_the_task_is_cancelled(held, monkeypatch):
    """Whoever cancels may close the corpus then."""
    begun, go_on, done = threading.Event(), threading.Event(), []
    prepare = held.corpus.prepare

    def wait(documents):
        begun.set()
        assert go_on.wait(60)
        done.append(True)
        return prepare(documents)

    monkeypatch.setattr(held.corpus, "prepare", wait)
    running = asyncio.create_task(held.encoder.acall([node(CAT)]))
    assert await asyncio.to_thread(begun.wait, 60)
    running.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert done
    assert held.chunks("d") == (CAT,)


def test_source_is_the_file_when_a_reader_says_it(held):
    """What metrics and listings of the corpus show."""
    held.encoder([node(CAT, file_path="/notes/cat.txt"), node(DOG, "e", file_path=3)])
    assert [each.source for each in held.corpus.documents()] == ["/notes/cat.txt", ""]


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


def test_progress_is_shown_when_nodes_are_ensured_with_it(held, capsys):
    """For the call, or for all calls of the encoder; not otherwise."""
    held.encoder.ensure_encoded([node(CAT)])
    assert "Encoding" not in capsys.readouterr().err
    held.encoder.ensure_encoded([node(DOG)], show_progress=True)
    assert "100%" in capsys.readouterr().err
    PromptCacheEncoder(corpus=held.corpus, show_progress=True).ensure_encoded([node(FISH)])
    assert "100%" in capsys.readouterr().err


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


def test_query_reads_what_was_encoded_when_an_index_answers(held, tmp_path):
    """Pitfall 36: nodes of a folder, with the header of their path, in LlamaIndex's own prompt."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in (("a.txt", CAT), ("b.txt", DOG), ("c.txt", FISH)):
        (folder / name).write_text(text)
    llm = PcRagLLM(corpus=held.corpus, max_tokens=4)
    index = VectorStoreIndex.from_documents(
        SimpleDirectoryReader(folder).load_data(),
        transformations=[splitter(), PromptCacheEncoder(llm=llm)],
        embed_model=MockEmbedding(embed_dim=3),
    )
    engine = index.as_query_engine(
        llm=llm, similarity_top_k=2, prompt_helper=llm.prompt_helper(), response_mode="compact"
    )
    found = []
    with recorded(held.engine) as requests:
        assert held.encodes(lambda: found.append(engine.query("What did the cat do?"))) == 0
    texts = [each.node.get_content(MetadataMode.LLM) for each in found[0].source_nodes]
    assert len(texts) == 2
    assert all("file_path: " in text for text in texts)
    read = {part.label for request in requests for part in request.plan.cached}
    assert {chunk_id_of(text) for text in texts} <= read
