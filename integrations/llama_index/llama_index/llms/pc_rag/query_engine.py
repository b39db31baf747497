"""A query engine with every piece in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from llama_index.core import Settings
from llama_index.core.data_structs import IndexDict, IndexList
from llama_index.core.indices import VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.pc_rag.base import PcRagLLM
from llama_index.llms.pc_rag.encoder import PromptCacheEncoder
from llama_index.llms.pc_rag.prefetch import PromptCachePrefetch
from llama_index.llms.pc_rag.synthesizer import PromptCacheSynthesizer

from pc_rag.corpus import IngestReport
from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.llms import LLM
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.schema import BaseNode
    from pydantic import BaseModel


class PromptCacheQueryEngine(RetrieverQueryEngine):
    """Retrieves, brings the nodes' entries near, and answers from whole nodes.

    Build it with ``from_index`` or ``from_retriever``. It is a ``RetrieverQueryEngine`` of a
    retriever, the given postprocessors, ``PromptCachePrefetch`` and ``PromptCacheSynthesizer``.

    Attributes:
        encoded: What ``from_index`` encoded, and what a store that is too small for it dropped.
    """

    encoded: IngestReport = IngestReport()

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        *,
        llm: LLM | None = None,
        similarity_top_k: int = 4,
        streaming: bool = False,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        encode: bool = True,
        encoder: PromptCacheEncoder | None = None,
        show_progress: bool = False,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        output_cls: type[BaseModel] | None = None,
        **retriever_options: Any,
    ) -> Self:
        """An engine over an index of any kind.

        Args:
            index: Holds the nodes; not modified.
            llm: A ``PcRagLLM``; that of LlamaIndex's ``Settings`` by default.
            similarity_top_k: Most nodes to retrieve, where the index ranks them.
            streaming: Answers stream.
            node_postprocessors: Run before the prefetch, in order.
            encode: Encode the index's nodes now, where it can list them: those of its docstore, or
                of a vector store that keeps them and lists them by ``get_nodes()``. What is already
                encoded is not encoded again, and ``encoded`` tells what was. Nodes that cannot be
                listed, or come later, are encoded when they are first retrieved. ``False`` encodes
                nothing, for nodes that ``PromptCacheEncoder`` encoded.
            encoder: That of the ingestion, where it has a namespace or a metadata mode of its own:
                without it the nodes would be other documents of the corpus, which its ``reconcile``
                leaves alone.
            show_progress: Show a progress bar over what is encoded now.
            text_qa_template: As for ``PromptCacheSynthesizer``, and so is what follows.
            refine_template: See there.
            output_cls: See there.
            **retriever_options: As for ``index.as_retriever``, such as ``filters``.

        Raises:
            ConfigError: The LLM is no ``PcRagLLM``, or the encoder has another corpus.
            PromptCacheError: A node cannot be encoded.
        """
        llm = _checked(llm, cls.__name__)
        encoder = _encoder_of(llm, encoder, cls.__name__)
        retriever = index.as_retriever(similarity_top_k=similarity_top_k, **retriever_options)
        engine = cls.from_retriever(
            retriever,
            llm=llm,
            streaming=streaming,
            node_postprocessors=node_postprocessors,
            encode=encode,
            encoder=encoder,
            text_qa_template=text_qa_template,
            refine_template=refine_template,
            output_cls=output_cls,
        )
        if encode:
            nodes = nodes_of(index)
            engine.encoded = encoder.ensure_encoded(nodes, show_progress=show_progress)
        return engine

    @classmethod
    def from_retriever(
        cls,
        retriever: BaseRetriever,
        *,
        llm: LLM | None = None,
        streaming: bool = False,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        encode: bool = True,
        encoder: PromptCacheEncoder | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        output_cls: type[BaseModel] | None = None,
    ) -> Self:
        """An engine over a retriever; with ``encode``, nodes are encoded when first retrieved.

        Args:
            retriever: Finds nodes.
            llm: As for ``from_index``, and so is what follows.
            streaming: See there.
            node_postprocessors: See there.
            encode: ``False`` encodes nothing; give it where a postprocessor rewrites nodes by the
                question.
            encoder: See there.
            text_qa_template: See there.
            refine_template: See there.
            output_cls: See there.

        Raises:
            ConfigError: The LLM is no ``PcRagLLM``, or the encoder has another corpus.
        """
        llm = _checked(llm, cls.__name__)
        prefetch = PromptCachePrefetch(
            encoder=_encoder_of(llm, encoder, cls.__name__), encode_missing=encode
        )
        return cls(
            retriever=retriever,
            response_synthesizer=PromptCacheSynthesizer(
                llm,
                text_qa_template=text_qa_template,
                refine_template=refine_template,
                streaming=streaming,
                output_cls=output_cls,
            ),
            node_postprocessors=[*node_postprocessors, prefetch],
        )


def nodes_of(index: BaseIndex[Any]) -> list[BaseNode]:
    """The nodes that an index can list: of its docstore, else of its vector store, else none."""
    struct, docstore = index.index_struct, index.docstore
    # A docstore may hold documents, parents and nodes of other indexes too.
    if isinstance(struct, IndexDict):
        nodes = docstore.get_nodes(list(struct.nodes_dict.values()), raise_error=False)
    elif isinstance(struct, IndexList):
        nodes = docstore.get_nodes(struct.nodes, raise_error=False)
    else:
        nodes = list(docstore.docs.values())
    if nodes or not isinstance(index, VectorStoreIndex):
        return nodes
    try:
        return index.vector_store.get_nodes()
    except (NotImplementedError, ValueError, AssertionError):
        # It has no such method, or wants ids or filters, and says so by one of the others.
        return []


def _encoder_of(
    llm: PcRagLLM, encoder: PromptCacheEncoder | None, owner: str
) -> PromptCacheEncoder:
    if encoder is None:
        return PromptCacheEncoder(llm=llm)
    if not isinstance(encoder, PromptCacheEncoder):
        raise ConfigError(
            f"{owner}: encoder is a {type(encoder).__name__}; give the PromptCacheEncoder of the "
            "ingestion"
        )
    if encoder.llm is not llm and encoder.open_corpus() is not llm.open_corpus():
        raise ConfigError(
            f"{owner}: the encoder's corpus is not that of llm, which would find nothing of what "
            "it encoded; make both from one llm, or from one corpus"
        )
    return encoder


def _checked(llm: LLM | None, owner: str) -> PcRagLLM:
    llm = llm or Settings.llm
    if not isinstance(llm, PcRagLLM):
        raise ConfigError(
            f"{owner}: llm is a {type(llm).__name__}; give a PcRagLLM, or use LlamaIndex's "
            "RetrieverQueryEngine with PromptCacheSynthesizer, which work with every LLM"
        )
    return llm
