"""Has the retrieved nodes' keys and values loaded while the prompt is being built."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.llms.pc_rag._nodes import chunk_text_of
from llama_index.llms.pc_rag.base import PcRagLLM
from llama_index.llms.pc_rag.encoder import PromptCacheEncoder
from pydantic import ConfigDict, Field, model_validator

from pc_rag.corpus import Corpus
from pc_rag.errors import ConfigError, IngestError, LayoutError, StoreIOError

if TYPE_CHECKING:
    from llama_index.core.schema import NodeWithScore, QueryBundle


class PromptCachePrefetch(BaseNodePostprocessor):
    """Brings what was retrieved near the model, in the background; nodes pass unchanged.

    Put it behind the postprocessors that drop, reorder or rewrite nodes. The query does not wait,
    and what the corpus does not know is left alone, unless ``encode_missing`` is set. Nodes that
    cannot be encoded, for their length, because the store's medium fails, or because others change
    their document over and over, are computed in the prompt.

    Raises:
        ConfigError: Not exactly one of ``llm``, ``corpus`` and ``encoder`` is given.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: PcRagLLM | None = Field(default=None, exclude=True, repr=False)
    """The model that answers; its corpus is used."""
    corpus: Corpus | None = Field(default=None, exclude=True, repr=False)
    """Holds the keys and values of the nodes' texts. Lent."""
    encoder: PromptCacheEncoder | None = Field(default=None, exclude=True, repr=False)
    """What ingested the nodes: its corpus, namespace and metadata mode are used."""
    encode_missing: bool = False
    """Encode nodes that the corpus does not know, before the query goes on. It takes about as long
    as computing them in the prompt, and is done once. Not for nodes that a postprocessor rewrites
    by the question: each text would be kept as a chunk of its document."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(each is not None for each in (self.llm, self.corpus, self.encoder)) != 1:
            raise ConfigError(
                f"{type(self).__name__}: give either llm, a PcRagLLM, or corpus, a pc_rag.Corpus, "
                "or encoder, a PromptCacheEncoder"
            )
        return self

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "PromptCachePrefetch"

    def _postprocess_nodes(
        self,
        nodes: list[NodeWithScore],
        query_bundle: QueryBundle | None = None,  # noqa: ARG002 - LlamaIndex's
    ) -> list[NodeWithScore]:
        encoder = self.encoder or PromptCacheEncoder(llm=self.llm, corpus=self.corpus)
        corpus = encoder.open_corpus()
        texts = [chunk_text_of(each.node, encoder.metadata_mode) for each in nodes]
        if self.encode_missing:
            pairs = zip(nodes, texts, strict=True)
            missing = [each.node for each, text in pairs if text and not corpus.holds(text)]
            if missing:
                # The prompt computes what is not encoded, and its metrics tell.
                with suppress(IngestError, LayoutError, StoreIOError):
                    encoder.ensure_encoded(missing)
        corpus.warm(texts)
        return nodes
