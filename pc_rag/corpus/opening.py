"""Opening a corpus: the parts it is made of, and how they know of each other."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog import Catalog
from pc_rag.corpus.chunking import Chunker
from pc_rag.corpus.ingest import Ingest
from pc_rag.corpus.kept import KeptEntries
from pc_rag.corpus.lookup import ChunkLookup
from pc_rag.corpus.prefix_set import PrefixSet
from pc_rag.corpus.prompts import CorpusPrompts
from pc_rag.corpus.scaffolds import Scaffolds
from pc_rag.corpus.slots import check_slots
from pc_rag.corpus.upkeep import Upkeep
from pc_rag.corpus.warming import Warmer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pc_rag.corpus.embedding import Embedder
    from pc_rag.corpus.prompt_format import PromptFormat
    from pc_rag.corpus.upkeep import Add
    from pc_rag.engine import PromptCache


class CorpusParts:
    """The parts of an open corpus.

    Args:
        engine: The model and the store. Lent.
        folder: As of ``Corpus``.
        prompt_format: Likewise.
        embedder: Makes the embedder; ``None`` without retrieval.
        chunk_tokens: Most tokens of a chunk.

    Attributes:
        catalog: Knows documents and chunks.
        lookup: Finds chunks.
        ingest: Takes documents in.
        scaffolds: Chunks that are encoded together.
        prompts: Makes requests.
        prefixes: What chunks are encoded behind.
        warmer: Brings entries near.

    Raises:
        ConfigError: The folder was made with another slot length.
        StoreError: The catalog cannot be opened.
    """

    def __init__(
        self,
        engine: PromptCache,
        folder: str | Path | None,
        *,
        prompt_format: PromptFormat,
        embedder: Callable[[], Embedder] | None,
        chunk_tokens: int,
    ) -> None:
        self._engine = engine
        tokenizer = engine.loaded.tokenizer
        chunker = Chunker(lambda text: len(tokenizer.encode_text(text)), max_tokens=chunk_tokens)
        with ExitStack() as opened:  # closes what is open already where a later step fails
            if folder is None:
                folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="pc-rag-"))
            self.catalog = Catalog(folder, tokenizer_id=tokenizer.digest)
            opened.enter_context(self.catalog)
            check_slots(self.catalog, engine.config.slot_tokens)
            self.lookup = ChunkLookup(self.catalog, embedder)
            self._make_encoders(chunker, separator=prompt_format.separator)
            self.prompts = CorpusPrompts(
                engine,
                prompt_format,
                self.lookup,
                self.ingest,
                served=lambda: self.prefixes.served,
                kept=KeptEntries(engine, self.catalog),
                scaffolds=self.scaffolds,
            )
            kinds = (self.ingest, self.scaffolds)
            self.prefixes = PrefixSet(engine, self.catalog, self.prompts.own_head(), kinds)
            opened.callback(self.prefixes.close)
            self.warmer = Warmer(
                engine,
                self.lookup,
                self.ingest.entries,
                prefixes=self.prefixes,
                scaffolds=self.scaffolds,
            )
            opened.callback(self.warmer.close)
            self._opened = opened.pop_all()

    def upkeep(self, add: Add) -> Upkeep:
        """What keeps the corpus in step, given ``Corpus.add``."""
        return Upkeep(
            self._engine,
            self.catalog,
            self.ingest,
            scaffolds=self.scaffolds,
            prefixes=lambda: self.prefixes.encoded,
            add=add,
        )

    def _make_encoders(self, chunker: Chunker, *, separator: str) -> None:
        """Make what encodes; it asks for the prefixes when they are there."""
        self.ingest = Ingest(
            self._engine,
            self.catalog,
            chunker,
            lambda: self.prefixes.encoded,
            served=lambda: self.prefixes.served,
        )
        self.scaffolds = Scaffolds(
            self._engine,
            self.catalog,
            self.ingest.entries,
            separator=separator,
            encoded=lambda: self.prefixes.encoded,
            served=lambda: self.prefixes.served,
        )

    def close(self) -> None:
        """Finish background work and close the catalog. Idempotent."""
        self._opened.close()
