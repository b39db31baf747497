"""Taking documents in: chunk, encode what the store lacks, then publish document by document.

A document becomes visible in one step, after the entries of its chunks are stored. Until then its
former version answers, also when encoding fails half-way.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import DocumentChange, EntryRecord, NewChunk, chunk_id_of
from pc_rag.corpus.prefixes import chunk_recipe, recipe_table
from pc_rag.corpus.reports import IngestEstimate, IngestProgress, IngestReport
from pc_rag.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.catalog.records import ChunkId
    from pc_rag.corpus.chunking import Chunker
    from pc_rag.corpus.documents import Document
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache
    from pc_rag.engine.entry_source import Encoded
    from pc_rag.engine.request import EntryRecipe
    from pc_rag.types import ModuleKey, TokenIds

    OnProgress = Callable[[IngestProgress], None]

_WINDOW_TOKENS = 16_384
"""Documents are published once about this many tokens of them are encoded."""


@dataclass(frozen=True, slots=True)
class PreparedDocument:
    """A document with its chunks.

    Attributes:
        document: The document.
        change: What adding it changes.
        chunks: Its chunks with their tokens.
    """

    document: Document
    change: DocumentChange
    chunks: tuple[NewChunk, ...]


@dataclass(slots=True)
class _Tally:
    changes: dict[DocumentChange, int] = field(
        default_factory=lambda: dict.fromkeys(DocumentChange, 0)
    )
    num_encoded: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_dropped: int = 0

    def count(self, encoded: Encoded) -> None:
        self.num_encoded += 1
        self.num_tokens += encoded.num_tokens
        self.num_bytes += encoded.num_bytes
        self.num_dropped += encoded.refusal is not None


class Ingest:
    """Takes documents into a corpus.

    Args:
        engine: Encodes chunks.
        catalog: Knows documents and chunks.
        chunker: Splits texts.
        prefixes: Chunks are encoded behind each of them.
    """

    def __init__(
        self,
        engine: PromptCache,
        catalog: Catalog,
        chunker: Chunker,
        prefixes: Sequence[CorpusPrefix],
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._chunker = chunker
        self._prefixes = tuple(prefixes)

    def prepare(self, documents: Iterable[Document]) -> Iterator[PreparedDocument]:
        """Split and tokenise documents; those that did not change keep the chunks they have.

        Raises:
            LayoutError: A chunk is longer than a slot of the corpus.
        """
        for document in documents:
            change = self._catalog.compare(document, chunking=self._chunker.id)
            texts = [chunk.text for chunk in self._chunker.split(document.text)]
            chunks = tuple(NewChunk(text, self._tokens(text)) for text in texts)
            yield PreparedDocument(document, change, chunks)

    def estimate(self, prepared: Sequence[PreparedDocument]) -> IngestEstimate:
        """What encoding them will need."""
        recipes = self._recipes(prepared)
        missing = self._engine.source.missing(recipes.values())
        num_tokens = sum(len(recipes[key].address.token_ids) for key in missing)
        per_token = self._engine.bytes_per_token
        unchanged = sum(p.change is DocumentChange.UNCHANGED for p in prepared)
        return IngestEstimate(
            num_documents=len(prepared),
            num_unchanged=unchanged,
            num_chunks=len(missing),
            num_tokens=num_tokens,
            num_bytes=num_tokens * per_token,
        )

    def add(
        self,
        prepared: Iterable[PreparedDocument],
        *,
        on_progress: OnProgress | None = None,
        pinned: bool = False,
    ) -> IngestReport:
        """Encode what the store lacks and publish the documents; see ``Corpus.add``."""
        started = time.monotonic()
        tally = _Tally()
        for window in _windows(prepared):
            self._add_window(window, tally, started, on_progress, pinned=pinned)
        return IngestReport(
            num_added=tally.changes[DocumentChange.ADDED],
            num_updated=tally.changes[DocumentChange.UPDATED],
            num_metadata_only=tally.changes[DocumentChange.METADATA],
            num_unchanged=tally.changes[DocumentChange.UNCHANGED],
            num_encoded=tally.num_encoded,
            num_encoded_tokens=tally.num_tokens,
            num_bytes=tally.num_bytes,
            num_dropped=tally.num_dropped,
            seconds=time.monotonic() - started,
        )

    def encode_live(self, prefix: CorpusPrefix) -> int:
        """Encode every live chunk behind one prefix; how many were missing."""
        recipes: dict[ModuleKey, EntryRecipe] = {}
        owners: dict[ModuleKey, ChunkId] = {}
        for chunk_id, text in self._catalog.live_texts():
            recipe = chunk_recipe(self._engine, self.tokens_of(chunk_id, text), prefix)
            recipes[recipe.address.key] = recipe
            owners[recipe.address.key] = chunk_id
        table = recipe_table(recipes.values(), [prefix])
        missing = self._engine.source.missing(recipes.values())
        self._catalog.entries.record(
            [
                self._record(encoded.key, owners[encoded.key], prefix, recipes)
                for encoded in self._engine.source.encode(missing, table)
                if encoded.refusal is None
            ]
        )
        return len(missing)

    def tokens_of(self, chunk_id: ChunkId, text: str) -> TokenIds:
        """The tokens of a stored chunk, made now where another tokenizer made it."""
        record = self._catalog.chunk(chunk_id)
        if record is not None and record.token_ids is not None:
            return record.token_ids
        token_ids = self._tokens(text)
        self._catalog.record_tokens(chunk_id, token_ids)
        return token_ids

    def _tokens(self, text: str) -> TokenIds:
        token_ids = self._engine.loaded.tokenizer.encode_text(text)
        limit = self._engine.config.slot_tokens
        if limit is not None and len(token_ids) > limit:
            raise LayoutError(
                f"chunk {text[:40]!r}... has {len(token_ids)} tokens, a slot holds {limit}; use "
                "shorter chunks or longer slots"
            )
        return token_ids

    def _add_window(
        self,
        window: list[PreparedDocument],
        tally: _Tally,
        started: float,
        on_progress: OnProgress | None,
        *,
        pinned: bool,
    ) -> None:
        recipes = self._recipes(window)
        missing = self._engine.source.missing(recipes.values())
        table = recipe_table(recipes.values(), self._prefixes)
        refused: set[ModuleKey] = set()
        for encoded in self._engine.source.encode(missing, table, pinned=pinned):
            tally.count(encoded)
            if encoded.refusal is not None:
                refused.add(encoded.key)
            if on_progress is not None:
                on_progress(
                    IngestProgress(
                        num_chunks=tally.num_encoded,
                        num_tokens=tally.num_tokens,
                        num_bytes=tally.num_bytes,
                        seconds=time.monotonic() - started,
                    )
                )
        for prepared in window:
            change = self._catalog.add_document(
                prepared.document,
                prepared.chunks,
                chunking=self._chunker.id,
                entries=list(self._entry_records(prepared, refused)),
            )
            tally.changes[change] += 1

    def _recipes(self, window: Iterable[PreparedDocument]) -> dict[ModuleKey, EntryRecipe]:
        recipes = (
            chunk_recipe(self._engine, chunk.token_ids, prefix)
            for prepared in window
            for chunk in prepared.chunks
            for prefix in self._prefixes
        )
        return {recipe.address.key: recipe for recipe in recipes}

    def _entry_records(
        self, prepared: PreparedDocument, refused: set[ModuleKey]
    ) -> Iterator[EntryRecord]:
        # Those that were stored already too: an interrupted run stores entries whose documents it
        # does not publish, and what is not recorded is never reclaimed.
        for chunk in prepared.chunks:
            for prefix in self._prefixes:
                recipe = chunk_recipe(self._engine, chunk.token_ids, prefix)
                key = recipe.address.key
                if key not in refused:
                    yield self._record(key, chunk_id_of(chunk.text), prefix, {key: recipe})

    def _record(
        self,
        key: ModuleKey,
        chunk_id: ChunkId,
        prefix: CorpusPrefix,
        recipes: dict[ModuleKey, EntryRecipe],
    ) -> EntryRecord:
        num_tokens = len(recipes[key].address.token_ids)
        return EntryRecord(
            key=key,
            chunk_id=chunk_id,
            prefix_id=prefix.record.id,
            fingerprint=self._engine.loaded.fingerprint,
            num_bytes=num_tokens * self._engine.bytes_per_token,
        )


def _windows(prepared: Iterable[PreparedDocument]) -> Iterator[list[PreparedDocument]]:
    window: list[PreparedDocument] = []
    num_tokens = 0
    for document in prepared:
        window.append(document)
        num_tokens += sum(len(chunk.token_ids) for chunk in document.chunks)
        if num_tokens >= _WINDOW_TOKENS:
            yield window
            window, num_tokens = [], 0
    if window:
        yield window
