"""Unchanged query engines of LlamaIndex: one line names another LLM, and nodes are hit."""

from __future__ import annotations

import os

import pytest
from llama_index.core import Settings, SimpleDirectoryReader, SummaryIndex
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.errors import GenerationError, LayoutError
from pc_rag.types import HitKind
from tests.support.corpora import CAT, DOG, FISH
from tests.support.llama_index_indexes import (
    QUESTION,
    ListRetriever,
    WordEmbedding,
    answered,
    chunk_text,
    chunks_in,
    encode_nodes,
    events,
    failing,
    hit_labels,
    labels_of,
    requests_in,
    text_nodes,
    vector_index,
)

ONE_EACH = [1, 1, 1]
ALL_IN_ONE = [3]
HITS = {
    ResponseMode.REFINE: ONE_EACH,
    ResponseMode.COMPACT: ALL_IN_ONE,
    ResponseMode.SIMPLE_SUMMARIZE: ALL_IN_ONE,
    ResponseMode.TREE_SUMMARIZE: ALL_IN_ONE,
    ResponseMode.GENERATION: [0],  # asks without the nodes
    ResponseMode.ACCUMULATE: ONE_EACH,
    ResponseMode.COMPACT_ACCUMULATE: ALL_IN_ONE,
    ResponseMode.NO_TEXT: [],  # asks nobody
    ResponseMode.CONTEXT_ONLY: [],
}
"""Nodes that each call of the model reads from the cache, of three that are retrieved."""
WITHOUT_STREAM = (ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE)
ASKING = [mode for mode in ResponseMode if HITS[mode]]


@pytest.fixture
def llm(corpus, monkeypatch):
    """A model whose corpus holds the nodes of ``text_nodes``."""
    llm = PcRagLLM(corpus=corpus, max_tokens=4)
    encode_nodes(corpus, text_nodes())
    monkeypatch.setattr(Settings, "_llm", llm)  # modes without a model ask for one all the same
    return llm


def engine_of(llm, mode=ResponseMode.COMPACT, *, nodes=None, **options):
    return vector_index(nodes).as_query_engine(
        llm=llm, response_mode=mode, similarity_top_k=3, **options
    )


async def hits_of(engine, question=QUESTION):
    """The chunks that the one call of a query hits."""
    with events() as kept:
        await answered(engine, question)
    (metrics,) = requests_in(kept)
    return hit_labels(metrics)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("mode", list(ResponseMode))
async def test_nodes_are_hit_when_a_query_engine_of_any_mode_is_asked(
    llm, corpus, mode, streaming, is_async
):
    """Every node that a prompt holds is read from the cache with its metadata header."""
    if streaming and mode in WITHOUT_STREAM:
        pytest.skip("LlamaIndex cannot stream in this mode")
    nodes = text_nodes(source="pets.txt")
    encode_nodes(corpus, nodes)
    engine = engine_of(llm, mode, nodes=nodes, streaming=streaming)
    with events() as kept:
        await answered(engine, is_async=is_async)
    found = requests_in(kept)
    assert {label for m in found for label in hit_labels(m)} <= set(labels_of(nodes))
    assert [len(hit_labels(metrics)) for metrics in found] == HITS[mode]
    assert all(len(chunks_in(m)) == len(hit_labels(m)) for m in found)


async def test_answers_are_equal_when_a_query_streams_or_is_asynchronous(llm):
    """All four ways of asking give the same text, and none hangs (pitfall 29)."""
    answers = {
        await answered(engine_of(llm, streaming=streaming), is_async=is_async)
        for streaming in (False, True)
        for is_async in (False, True)
    }
    assert len(answers) == 1
    assert "Empty Response" not in answers


async def test_first_node_is_an_exact_hit_when_the_templates_head_was_learned(llm):
    """``learn_prefix``: nodes are encoded behind the head, once, in the background."""
    learning = llm.model_copy(update={"learn_prefix": True})
    await answered(engine_of(learning))
    learned = learning.prefix_learning
    assert learned.result() == 3
    await answered(engine_of(learning))
    assert learning.prefix_learning is learned
    with events() as kept:
        await answered(engine_of(llm))
    (metrics,) = requests_in(kept)
    assert [use.hit_kind for use in chunks_in(metrics)] == [
        HitKind.EXACT,
        HitKind.COMPOSED,
        HitKind.COMPOSED,
    ]


def read_folder(folder):
    """Nodes of a folder's files, one each."""
    documents = SimpleDirectoryReader(str(folder)).load_data()
    return [TextNode(**document.model_dump(exclude={"class_name"})) for document in documents]


async def test_nodes_are_hit_when_a_directory_reader_writes_headers(llm, corpus, tmp_path):
    """Headers belong to the chunk; excluded fields such as dates may change (pitfall 36)."""
    for name, text in (("cat.txt", CAT), ("dog.txt", DOG)):
        (tmp_path / name).write_text(text)
    encode_nodes(corpus, read_folder(tmp_path))
    os.utime(tmp_path / "cat.txt", (1e9, 1e9))
    nodes = read_folder(tmp_path)
    assert nodes[0].metadata["last_modified_date"].startswith("2001")
    assert "file_path" in chunk_text(nodes[0])
    assert sorted(await hits_of(engine_of(llm, nodes=nodes))) == sorted(labels_of(nodes))


@pytest.mark.parametrize(
    "form",
    [
        {"text_template": "[{metadata_str}]\n{content}"},
        {"metadata_separator": "; "},
        {"metadata_template": "{key} = {value}"},
        {"excluded_llm_metadata_keys": ["page"]},
    ],
)
async def test_nodes_are_hit_when_they_have_templates_of_their_own(llm, corpus, form):
    """A chunk is what LlamaIndex writes into prompts, whatever writes it."""
    nodes = [
        TextNode(text=text, metadata={"source": f"{i}.txt", "page": i}, **form)
        for i, text in enumerate((CAT, DOG, FISH))
    ]
    assert len({chunk_text(node) for node in nodes}) == 3
    encode_nodes(corpus, nodes)
    assert sorted(await hits_of(engine_of(llm, nodes=nodes))) == sorted(labels_of(nodes))


async def test_nodes_are_hit_when_their_texts_end_in_whitespace(llm):
    """LlamaIndex strips nodes, and so do chunks."""
    nodes = text_nodes(f"\n {CAT}\n\n", f"{DOG}  ")
    assert len(await hits_of(engine_of(llm, nodes=nodes))) == 2


async def test_every_miss_has_a_reason_when_entries_are_lost(llm, corpus):
    """A hit rate of 0 says why (pitfall 34); the call encodes them, and the next one hits."""
    for record in corpus.plan(f"{CAT}\n\n{DOG}\n\n{FISH}").plan.cached:
        corpus.engine.store.remove(record.key)
    with events() as kept:
        await answered(engine_of(llm))
    (metrics,) = requests_in(kept)
    uses = chunks_in(metrics)
    assert len(uses) == 3
    assert all(not use.is_hit and use.miss_reason is not None for use in uses)
    assert len(await hits_of(engine_of(llm))) == 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [ZeroDivisionError("bad"), ValueError("bad"), TypeError("bad")])
@pytest.mark.parametrize("mode", ASKING)
async def test_a_failure_surfaces_when_the_model_raises(llm, corpus, mode, error, is_async):
    """No mode makes "Empty Response" of it, of whatever kind it is."""
    engine = engine_of(llm, mode)
    with failing(corpus, error), pytest.raises((type(error), GenerationError), match="bad"):
        await answered(engine, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in ASKING if mode not in WITHOUT_STREAM])
async def test_the_next_query_works_when_a_stream_failed(llm, corpus, mode, is_async):
    """The consumer gets the error at once, and nothing stays locked (pitfall 25)."""
    engine = engine_of(llm, mode, streaming=True)
    expected = await answered(engine, is_async=is_async)
    with failing(corpus, ValueError("bad")), pytest.raises((ValueError, GenerationError)):
        await answered(engine, is_async=is_async)
    assert await answered(engine, is_async=is_async) == expected


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("mode", ASKING)
async def test_an_overlong_question_surfaces_when_it_fits_no_prompt(llm, mode, streaming, is_async):
    """LlamaIndex's own count refuses it, or the model does."""
    if streaming and mode in WITHOUT_STREAM:
        pytest.skip("LlamaIndex cannot stream in this mode")
    engine = engine_of(llm, mode, streaming=streaming)
    with pytest.raises((LayoutError, ValueError), match=r"context"):
        await answered(engine, "why? " * 2000, is_async=is_async)


async def test_long_nodes_are_counted_right_when_the_prompt_helper_is_the_models(llm, corpus):
    """LlamaIndex counts with another tokenizer; the model's helper keeps prompts in the window."""
    nodes = text_nodes(*(f"{CAT} Barn {i}. " * 14 for i in range(3)))
    encode_nodes(corpus, nodes)
    engine = engine_of(llm, nodes=nodes)
    with pytest.raises(LayoutError):  # 2,900 bytes are 700 of its tokens, and 2,900 of ours
        await answered(engine)
    synthesizer = get_response_synthesizer(llm, prompt_helper=llm.prompt_helper())
    engine = engine_of(llm, nodes=nodes, response_synthesizer=synthesizer)
    with events() as kept:
        await answered(engine)
    assert all(
        metrics.prompt_tokens <= llm.metadata.context_window for metrics in requests_in(kept)
    )


async def test_nodes_are_hit_when_a_summary_index_is_asked(llm):
    """An index without vectors gives all its nodes, in their order."""
    nodes = text_nodes()
    engine = SummaryIndex(nodes).as_query_engine(llm=llm)
    assert await hits_of(engine) == labels_of(nodes)


async def test_nodes_are_hit_in_order_when_a_retriever_is_of_the_users_own(llm):
    """What a custom retriever finds stands in the prompt in its order, each a hit."""
    nodes = text_nodes(FISH, CAT, DOG)
    engine = RetrieverQueryEngine.from_args(ListRetriever(nodes), llm=llm)
    assert await hits_of(engine) == labels_of(nodes)


async def test_nodes_are_hit_when_a_postprocessor_reorders_them(llm):
    """Positions are the prompt's, so order is free."""
    engine = engine_of(llm, node_postprocessors=[LongContextReorder()])
    assert len(await hits_of(engine)) == 3


async def test_nodes_are_hit_when_retrievers_are_fused(llm):
    """Results of several retrievers, ranked together."""
    nodes = text_nodes()
    retriever = QueryFusionRetriever(
        [ListRetriever(nodes[:2]), ListRetriever(nodes[1:])],
        llm=llm,
        num_queries=1,
        similarity_top_k=3,
        use_async=False,
    )
    assert len(await hits_of(RetrieverQueryEngine.from_args(retriever, llm=llm))) == 3


async def test_nodes_are_hit_when_a_router_chose_the_engine(llm):
    """An engine behind a router is asked like any other."""
    tools = [
        QueryEngineTool.from_defaults(engine_of(llm), description="where the cat sat"),
        QueryEngineTool.from_defaults(
            engine_of(llm, nodes=text_nodes("Nothing here.")), description="trains"
        ),
    ]
    selector = EmbeddingSingleSelector.from_defaults(embed_model=WordEmbedding())
    engine = RouterQueryEngine(selector, tools, llm=llm)
    assert len(await hits_of(engine)) == 3
