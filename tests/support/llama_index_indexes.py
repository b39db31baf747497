"""LlamaIndex's embeddings, nodes and indexes for tests, and what its queries found."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.llms.pc_rag import PromptCacheEncoder, PromptCacheEvent

from pc_rag.corpus import chunk_id_of
from tests.support.corpora import TEXTS, embed_words
from tests.support.llama_index_calls import heard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llama_index.core.schema import BaseNode, QueryBundle

    from pc_rag.corpus import Corpus
    from pc_rag.metrics import ModuleUse, RequestMetrics

QUESTION = "Where did the cat sit?"


class WordEmbedding(BaseEmbedding):
    """Bags of words: texts that share words are near each other."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector: list[float] = embed_words([text])[0].tolist()
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class ListRetriever(BaseRetriever):
    """Gives the same nodes for every question, in their order."""

    def __init__(self, nodes: Sequence[BaseNode]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return scored(self._nodes)


def text_nodes(*texts: str, **metadata: Any) -> list[TextNode]:
    """Nodes of texts, by default of ``TEXTS``; their ids are ``node-0`` and so on."""
    return [
        TextNode(text=text, id_=f"node-{i}", metadata=dict(metadata))
        for i, text in enumerate(texts or TEXTS)
    ]


def scored(nodes: Sequence[BaseNode]) -> list[NodeWithScore]:
    """Nodes as a retriever gives them."""
    return [NodeWithScore(node=node, score=1.0) for node in nodes]


def vector_index(nodes: Sequence[BaseNode] | None = None) -> VectorStoreIndex:
    """An index over words; of ``text_nodes()`` by default."""
    return VectorStoreIndex(text_nodes() if nodes is None else nodes, embed_model=WordEmbedding())


@contextmanager
def failing(corpus: Corpus, error: Exception) -> Iterator[None]:
    """The corpus's model raises an error in every forward pass."""

    def fail(*_: Any) -> None:
        raise error

    handle = corpus.engine.loaded.model.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def events() -> Iterator[list[Any]]:
    """What LlamaIndex's instrumentation tells meanwhile, in order."""
    with heard() as handler:
        yield handler.events


def requests_in(kept: Sequence[Any]) -> list[RequestMetrics]:
    """The metrics that ``PromptCacheEvent`` told, one for every call of a model."""
    return [event.request_metrics for event in kept if isinstance(event, PromptCacheEvent)]


def chunks_in(metrics: RequestMetrics) -> list[ModuleUse]:
    """What became of the chunks of a prompt, the corpus's prefix left out."""
    return [use for use in metrics.modules if use.label != "(prefix)"]


def chunk_text(node: BaseNode) -> str:
    """The text of a node as LlamaIndex puts it into prompts."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def encode_nodes(corpus: Corpus, nodes: Sequence[BaseNode]) -> None:
    """Encode nodes as ingestion does."""
    PromptCacheEncoder(corpus=corpus)(nodes)


def labels_of(nodes: Sequence[BaseNode]) -> list[str]:
    """The nodes' names in metrics."""
    return [chunk_id_of(chunk_text(node)) for node in nodes]


def hit_labels(metrics: RequestMetrics) -> list[str]:
    """The chunks of a prompt that were hit whole, in order."""
    return [use.label for use in chunks_in(metrics) if use.is_hit]


async def answered(engine: Any, question: str = QUESTION, *, is_async: bool = False) -> str:
    """The text of an answer of a query engine, streamed or not."""
    response = await engine.aquery(question) if is_async else engine.query(question)
    return await text_of(response)


async def text_of(response: Any) -> str:
    """The text of a response, of which the stream is drained."""
    if isinstance(response, StreamingResponse):
        return "".join(response.response_gen)
    if isinstance(response, AsyncStreamingResponse):
        return "".join([piece async for piece in response.async_response_gen()])
    return str(response)


async def hits_of(engine, *, is_async=False, question=QUESTION):
    """The chunks that the one call of a query hits."""
    with events() as kept:
        await answered(engine, question, is_async=is_async)
    (metrics,) = requests_in(kept)
    return hit_labels(metrics)
