"""The ready query engine: every piece in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core import (
    PromptTemplate,
    Settings,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
)
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.storage.docstore import keyval_docstore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryResult
from llama_index.llms.pc_rag import (
    PcRagLLM,
    PromptCacheEncoder,
    PromptCacheQueryEngine,
)
from llama_index.llms.pc_rag.query_engine import nodes_of
from pydantic import BaseModel, Field

from pc_rag.corpus import Corpus, IngestReport
from pc_rag.errors import ConfigError, LayoutError
from pc_rag.kv.memory_tier import MemoryTier
from tests.support.corpora import CAT, DOG, FISH, loaded_model, opened, recorded, tiny_engine
from tests.support.counted_corpora import counted_corpus, warmings
from tests.support.engines import scripted
from tests.support.llama_index_calls import shown
from tests.support.llama_index_indexes import (
    QUESTION,
    ListRetriever,
    WordEmbedding,
    answered,
    encode_nodes,
    hits_of,
    labels_of,
    text_nodes,
    vector_index,
)


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


@pytest.fixture
def llm(counted):
    return PcRagLLM(corpus=counted.corpus, max_tokens=6)


class KeepingStore(BasePydanticVectorStore):
    """Keeps the nodes' texts, as remote stores do, finds all of them, and can list them."""

    stores_text: bool = True
    nodes: list[TextNode] = Field(default_factory=list)

    @property
    def client(self):
        return None

    def add(self, nodes, **_):
        self.nodes += nodes
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id, **_):
        raise NotImplementedError

    def query(self, query, **_):
        found = self.nodes[: query.similarity_top_k]
        return VectorStoreQueryResult(found, [1.0 for _ in found], [n.node_id for n in found])

    def get_nodes(self, node_ids=None, filters=None):
        return self.nodes


class QueryOnlyStore(KeepingStore):
    """Cannot list what it keeps."""

    get_nodes = BasePydanticVectorStore.get_nodes


class FilteringStore(KeepingStore):
    """Lists what it keeps by ids or filters only, and says so by the error it was given."""

    refusal: Any = None

    def get_nodes(self, node_ids=None, filters=None):
        raise self.refusal


def index_over(store):
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(text_nodes(), embed_model=WordEmbedding(), storage_context=context)


@pytest.mark.parametrize(("family", "num_first"), [("gpt2", 0), ("bloom", 3)])
async def test_second_query_hits_whatever_the_positions_of_the_model_are(family, num_first):
    """Learned positions: the first query encodes nodes where they stand."""
    with opened(loaded=loaded_model(family)) as corpus:
        llm = PcRagLLM(corpus=corpus, max_tokens=6)
        engine = PromptCacheQueryEngine.from_index(vector_index(), llm=llm)
        assert [len(await hits_of(engine)) for _ in range(2)] == [num_first, 3]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_the_first_query_hits_when_the_engine_was_made_from_an_index(
    llm, streaming, is_async
):
    """Nodes are encoded when the engine is made; no ingestion step is needed."""
    engine = PromptCacheQueryEngine.from_index(vector_index(), llm=llm, streaming=streaming)
    assert sorted(await hits_of(engine, is_async=is_async)) == sorted(labels_of(text_nodes()))


@pytest.mark.parametrize(
    "make_index",
    [vector_index, lambda: index_over(KeepingStore()), lambda: SummaryIndex(text_nodes())],
)
async def test_an_index_is_encoded_once_when_it_can_list_its_nodes(counted, llm, make_index):
    """By its docstore or its vector store; another engine or query encodes nothing."""
    PromptCacheQueryEngine.from_index(make_index(), llm=llm)
    assert counted.num_encoded == 4  # three nodes and the corpus's prefix
    engine = PromptCacheQueryEngine.from_index(make_index(), llm=llm)
    assert len(await hits_of(engine)) == 3
    assert counted.num_encoded == 4


@pytest.mark.parametrize(
    "store",
    [
        QueryOnlyStore(),
        FilteringStore(refusal=ValueError("node_ids or filters, please")),
        FilteringStore(refusal=AssertionError("node_ids or filters, please")),
    ],
    ids=["none", "value", "assertion"],
)
async def test_nodes_are_encoded_when_retrieved_if_the_index_cannot_list_them(counted, llm, store):
    """A vector store that only answers queries: the first query encodes what it found."""
    engine = PromptCacheQueryEngine.from_index(index_over(store), llm=llm, similarity_top_k=2)
    assert counted.num_encoded <= 1
    assert len(await hits_of(engine)) == 2
    assert counted.num_encoded == 3


async def test_later_nodes_are_encoded_when_they_are_retrieved(counted, llm):
    """An index that grows behind the engine's back."""
    index = index_over(KeepingStore())
    engine = PromptCacheQueryEngine.from_index(index, llm=llm)
    later = TextNode(text="Where the cat sat the day after nobody in the village knows.")
    index.insert_nodes([later])
    assert len(await hits_of(engine)) == 4
    assert counted.num_encoded == 5


async def test_nothing_is_encoded_when_the_engine_is_told_so(counted, llm):
    """For nodes that ingestion encoded; others are computed with the prompt."""
    engine = PromptCacheQueryEngine.from_index(vector_index(), llm=llm, encode=False)
    assert await hits_of(engine) == []
    encode_nodes(counted.corpus, text_nodes()[:1])
    before = counted.num_encoded
    assert await hits_of(engine) == labels_of(text_nodes()[:1])
    assert counted.num_encoded == before


@pytest.mark.parametrize("make_index", [vector_index, SummaryIndex])
def test_only_the_indexs_own_nodes_are_listed_when_others_share_its_docstore(make_index):
    """A docstore may hold documents, parents and other indexes' nodes."""
    index = make_index(text_nodes(CAT))
    (other,) = text_nodes(DOG)
    other.id_ = "other"
    index.docstore.add_documents([other])
    assert [node.node_id for node in nodes_of(index)] == ["node-0"]


def test_each_node_is_read_once_when_an_index_lists_its_own(monkeypatch):
    """A docstore parses every node whenever it is asked for all of them."""
    index = vector_index()
    read = []
    parse = keyval_docstore.json_to_doc
    monkeypatch.setattr(
        keyval_docstore, "json_to_doc", lambda data: read.append(data) or parse(data)
    )
    assert len(nodes_of(index)) == len(read) == 3


def test_what_a_small_store_dropped_is_told_when_an_engine_is_made():
    """Pitfall 45: by the engine, which encoded it; nothing where it encoded nothing."""
    with tiny_engine(MemoryTier(300_000)) as engine, Corpus(engine, has_retrieval=False) as corpus:
        llm = PcRagLLM(corpus=corpus)
        nodes = text_nodes(*(f"{CAT} It is the cat number {i}." for i in range(20)))
        report = PromptCacheQueryEngine.from_index(vector_index(nodes), llm=llm).encoded
        assert report.num_encoded == 20
        assert report.num_evicted > 0
        made = PromptCacheQueryEngine.from_index(vector_index(nodes), llm=llm, encode=False)
        assert made.encoded == IngestReport()


def test_progress_is_shown_when_an_engine_is_made_with_it(llm, capsys):
    """Thousands of nodes take a while."""
    PromptCacheQueryEngine.from_index(vector_index(), llm=llm, show_progress=True)
    assert "100%" in capsys.readouterr().err


async def test_deleted_nodes_go_when_the_engine_knows_the_encoder_of_their_ingestion(counted, llm):
    """Engine, prefetch and ingestion write one document, which ``reconcile`` removes."""
    encoder = PromptCacheEncoder(llm=llm, namespace="mine/")
    index = vector_index(text_nodes(CAT, DOG))
    encoder(text_nodes(CAT, DOG))
    PromptCacheQueryEngine.from_index(index, llm=llm, encoder=encoder)
    later = ListRetriever([TextNode(text=FISH, id_="later")])
    engine = PromptCacheQueryEngine.from_retriever(later, llm=llm, encoder=encoder)
    assert len(await hits_of(engine)) == 1
    found = [each.id for each in counted.corpus.documents()]
    assert found == ["mine/later", "mine/node-0", "mine/node-1"]
    index.delete_nodes(["node-0"], delete_from_docstore=True)
    assert encoder.reconcile(index.docstore).removed == ("later", "node-0")
    assert not counted.corpus.holds(CAT)


async def test_headers_are_not_encoded_when_the_encoder_of_the_ingestion_leaves_them_out(
    counted, llm
):
    """The engine and its prefetch look for the text alone, and find it."""
    encoder = PromptCacheEncoder(llm=llm, metadata_mode=MetadataMode.NONE)
    nodes = text_nodes(CAT, DOG, place="barn")
    encoder(nodes)
    before = counted.num_encoded
    begun = warmings(counted.corpus)
    engine = PromptCacheQueryEngine.from_index(vector_index(nodes), llm=llm, encoder=encoder)
    assert len(await hits_of(engine)) == 2
    assert counted.num_encoded == before
    assert sorted(begun[0][0]) == sorted([CAT, DOG])


def test_an_encoder_is_refused_when_its_corpus_is_not_the_models(llm):
    """Nothing of what it encodes would be found."""
    with opened(has_retrieval=False) as other:
        encoder = PromptCacheEncoder(corpus=other)
        with pytest.raises(ConfigError, match="encoder's corpus"):
            PromptCacheQueryEngine.from_index(vector_index(), llm=llm, encoder=encoder)
    with pytest.raises(ConfigError, match="encoder is a Corpus"):
        PromptCacheQueryEngine.from_index(vector_index(), llm=llm, encoder=llm.corpus)


async def test_answers_equal_the_drop_ins_when_both_are_asked(llm):
    """The same prompt, answer and sources as an unchanged query engine's."""
    index = vector_index()
    own = PromptCacheQueryEngine.from_index(index, llm=llm, similarity_top_k=2)
    plain = index.as_query_engine(llm=llm, similarity_top_k=2)
    assert own.query(QUESTION) == plain.query(QUESTION)


async def test_options_reach_their_pieces_when_they_are_given(counted, llm):
    """Templates, postprocessors, number of nodes, filters and callbacks of the retriever."""
    nodes = [*text_nodes(CAT, kind="pet"), *text_nodes(FISH, kind="fish")]
    nodes[1].id_ = "fish"
    engine = PromptCacheQueryEngine.from_index(
        vector_index(nodes),
        llm=llm,
        similarity_top_k=1,
        text_qa_template=PromptTemplate("ASK {context_str} {query_str}"),
        filters=MetadataFilters(filters=[MetadataFilter(key="kind", value="fish")]),
    )
    with recorded(counted.corpus.engine) as requests:
        response = engine.query(QUESTION)
    assert [node.node_id for node in response.source_nodes] == ["fish"]
    assert "ASK kind: fish" in shown(counted.corpus, requests[0])
    none_passes = SimilarityPostprocessor(similarity_cutoff=2.0)
    engine = PromptCacheQueryEngine.from_index(
        vector_index(nodes), llm=llm, node_postprocessors=[none_passes]
    )
    assert str(engine.query(QUESTION)) == "Empty Response"  # no node is left, none is warmed


class Place(BaseModel):
    """Where something is."""

    name: str


async def test_the_answer_is_an_object_when_the_engine_has_a_class(counted, llm):
    """``output_cls`` reaches the synthesizer."""
    pytest.importorskip("llguidance")
    engine = PromptCacheQueryEngine.from_index(
        vector_index(), llm=PcRagLLM(corpus=counted.corpus, max_tokens=60), output_cls=Place
    )
    with scripted(counted.corpus.engine, json.dumps({"name": "mat"})):
        response = engine.query(QUESTION)
    assert isinstance(response, PydanticResponse)
    assert response.response == Place(name="mat")


async def test_any_retriever_serves_when_an_engine_is_made_from_it(llm):
    """Nodes are encoded when they are first retrieved, and keep the retriever's order."""
    nodes = text_nodes(FISH, CAT, DOG)
    engine = PromptCacheQueryEngine.from_retriever(ListRetriever(nodes), llm=llm)
    assert isinstance(engine, RetrieverQueryEngine)
    assert await hits_of(engine) == labels_of(nodes)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_node_is_refused_by_name_when_an_engine_retrieves_one_too_long(llm, is_async):
    """The error comes out of the query as it is."""
    engine = PromptCacheQueryEngine.from_retriever(
        ListRetriever(text_nodes("word " * 500)), llm=llm, encode=False
    )
    with pytest.raises(LayoutError, match="'node-0' has 2499 tokens"):
        await answered(engine, is_async=is_async)


def test_another_llm_is_refused_when_an_engine_is_made(monkeypatch):
    """What would not cache anything; the pieces work with it alone."""
    with pytest.raises(ConfigError, match="llm is a MockLLM"):
        PromptCacheQueryEngine.from_index(vector_index(), llm=MockLLM())
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    with pytest.raises(ConfigError, match="llm is a MockLLM"):
        PromptCacheQueryEngine.from_retriever(ListRetriever([]))


async def test_nodes_that_ingestion_encoded_are_not_encoded_again_when_an_engine_is_made(
    counted, llm
):
    """The encoder of a pipeline and the engine know nodes by the same name."""
    nodes = text_nodes()
    PromptCacheEncoder(llm=llm)(nodes)
    before = counted.num_encoded
    engine = PromptCacheQueryEngine.from_index(vector_index(nodes), llm=llm)
    assert len(await hits_of(engine)) == 3
    assert counted.num_encoded == before
