"""Nodes as chunks of a corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.schema import MetadataMode

from pc_rag.corpus import Document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llama_index.core.schema import BaseNode

    from pc_rag.corpus import Corpus


def chunk_text(node: BaseNode) -> str:
    """The text of a node as LlamaIndex puts it into prompts, its metadata header included."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def encode_nodes(corpus: Corpus, nodes: Iterable[BaseNode]) -> None:
    """Encode the nodes that the corpus does not know."""
    corpus.ensure(
        [Document.of_chunks([text]) for text in dict.fromkeys(map(chunk_text, nodes)) if text]
    )
