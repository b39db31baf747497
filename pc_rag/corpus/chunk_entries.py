"""The entries of chunks: their tokens, their recipes behind prefixes, what the catalog notes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, EntryRecord, NewChunk, chunk_id_of
from pc_rag.corpus.parts import head_tokens
from pc_rag.corpus.prefixes import chunk_recipe, recipe_table
from pc_rag.errors import LayoutError
from pc_rag.kv.key import VisibilityContext
from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.parts import HeadTokens
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.corpus.recognition import Recognized
    from pc_rag.engine import PromptCache
    from pc_rag.engine.request import EntryRecipe
    from pc_rag.types import TokenIds


@dataclass(frozen=True, slots=True)
class WantedEntry:
    """The entry of a chunk behind a prefix.

    Attributes:
        recipe: How it is made.
        record: What the catalog notes of it.
        prefix: What it is encoded behind.
    """

    recipe: EntryRecipe
    record: EntryRecord
    prefix: CorpusPrefix


class ChunkEntries:
    """From chunks to their entries. Thread-safe.

    Args:
        engine: Whose model, store and configuration decide.
        catalog: Knows chunks and prefixes.
    """

    def __init__(self, engine: PromptCache, catalog: Catalog) -> None:
        self._engine = engine
        self._catalog = catalog
        self._is_fixed = engine.runner.positions.placement is Placement.FIXED

    def tokens(self, text: str) -> TokenIds:
        """The tokens of a chunk's text.

        Raises:
            LayoutError: They do not fit a slot of the corpus.
        """
        token_ids = self._engine.loaded.tokenizer.encode_text(text)
        limit = self._engine.config.slot_tokens
        if limit is not None and len(token_ids) > limit:
            raise LayoutError(
                f"chunk {text[:40]!r}... has {len(token_ids)} tokens, a slot holds {limit}; use "
                f"shorter chunks (chunk_tokens={limit}, or shorter texts where documents are "
                "whole) or a corpus with longer slots"
            )
        return token_ids

    def check_fits(self, what: str, num_tokens: int, advice: str, *, prefix: TokenIds) -> None:
        """Refuse a chunk that not even the shortest prompt holds.

        That is it behind BOS; or behind the corpus's own prefix, where positions are fixed and its
        entry would be encoded there.

        Args:
            what: What has so many tokens, for the message.
            num_tokens: Tokens of the chunk.
            advice: What to do.
            prefix: The corpus's own.

        Raises:
            LayoutError: Nothing holds it.
        """
        limit = self._engine.max_position
        num_others = len(self._engine.loaded.tokenizer.bos_ids) + 1  # at least one is generated
        if self._is_fixed and len(prefix) + 1 > num_others:
            num_others = len(prefix) + 1
            advice += ", or give the corpus a shorter prefix (PromptFormat)"
        if num_tokens + num_others > limit:
            raise LayoutError(
                f"{what} has {num_tokens} tokens; the context ends at {limit} and a prompt needs "
                f"{num_others} for others, so none could hold it. {advice}"
            )

    def tokens_of(self, chunk_id: ChunkId, text: str) -> TokenIds:
        """The tokens of a chunk as it was stored, made now where another tokenizer made it."""
        record = self._catalog.chunk(chunk_id)
        if record is not None and record.token_ids is not None:
            return record.token_ids
        token_ids = self.tokens(text)
        self._catalog.record_tokens(chunk_id, token_ids)
        return token_ids

    def stored(self, chunk_id: ChunkId) -> NewChunk | None:
        """A chunk's text with its tokens; ``None`` where it has gone.

        Raises:
            LayoutError: Another tokenizer made it, and its tokens now do not fit a slot.
        """
        record = self._catalog.chunk(chunk_id)
        if record is None:
            return None
        return NewChunk(record.text, self.tokens_of(chunk_id, record.text))

    def head(self, found: Recognized) -> HeadTokens | None:
        """The tokens of a head that stands in a prompt, to be read from its chunk's entry.

        None where it is too small a part to be worth reading; nor where its chunk went meanwhile,
        or is tokenised otherwise.

        Raises:
            LayoutError: As of ``stored``.
        """
        chunk = self.stored(ChunkId(found.chunk_id))
        if chunk is None:
            return None
        tokenizer = self._engine.loaded.tokenizer
        head = head_tokens(tokenizer, chunk.text, chunk.token_ids, found.end - found.start)
        return head if head is not None and head.is_worth_reading else None

    def wanted(
        self, chunks: Iterable[NewChunk], prefixes: Sequence[CorpusPrefix]
    ) -> Iterator[WantedEntry]:
        """The entries of chunks behind prefixes, but those that the model has no positions for."""
        limit = self._engine.loaded.max_position
        for each in self._behind(chunks, prefixes):
            if not self._is_fixed or each.recipe.address.span.end <= limit:
                yield each

    def _behind(
        self, chunks: Iterable[NewChunk], prefixes: Sequence[CorpusPrefix]
    ) -> Iterator[WantedEntry]:
        fingerprint, per_token = self._engine.loaded.fingerprint, self._engine.bytes_per_token
        for chunk in chunks:
            if not chunk.token_ids:
                continue
            chunk_id = chunk_id_of(chunk.text)
            for prefix in prefixes:
                recipe = chunk_recipe(self._engine, chunk.token_ids, prefix)
                record = EntryRecord(
                    key=recipe.address.key,
                    chunk_id=chunk_id,
                    prefix_id=prefix.recorded_id,
                    fingerprint=fingerprint,
                    num_bytes=len(chunk.token_ids) * per_token,
                )
                yield WantedEntry(recipe, record, prefix)

    def made(self, chunk_id: ChunkId, prefixes: Sequence[CorpusPrefix]) -> Iterator[WantedEntry]:
        """The entries that this engine may have made of a chunk."""
        chunk = self._catalog.chunk(chunk_id)
        if chunk is not None and chunk.token_ids:
            yield from self._behind([NewChunk(chunk.text, chunk.token_ids)], prefixes)

    def note(
        self, chunk_id: ChunkId, recipe: EntryRecipe, *, behind: Sequence[CorpusPrefix]
    ) -> None:
        """Note an entry of a chunk that a request reads, where the catalog does not know it.

        Args:
            chunk_id: The chunk; nothing happens where it is none, or its tokens are others now.
            recipe: How the entry is made; it may stand for another one at another start.
            behind: What requests may have chunks encoded behind.
        """
        key = recipe.address.key
        made = {each.record.key: each.record for each in self.made(chunk_id, behind)}
        record = made.get(recipe.origin or key)
        noted = {each.key for each in self._catalog.entries.of_chunk(chunk_id)} if record else ()
        if record is not None and key not in noted:
            self.record([replace(record, key=key)])

    def starts(self, chunk_id: str) -> tuple[int, ...]:
        """The starts at which the store holds entries of a chunk; see ``KVStore.starts``."""
        chunk = self._catalog.chunk(ChunkId(chunk_id))
        if chunk is None or not chunk.token_ids:
            return ()
        context = VisibilityContext.module()  # of any: what it attended is not looked at
        address = self._engine.address(chunk.token_ids, start=0, context=context)
        return self._engine.store.starts(address)

    def record(self, records: Iterable[EntryRecord]) -> None:
        """Note entries of the store; those of chunks that ``gc`` took meanwhile leave it again.

        Call it once they are stored: what is encoded behind the back of ``gc`` would stay for ever.
        """
        noted = list(records)
        live = {each.chunk_id for each in noted if self._catalog.chunk(each.chunk_id) is not None}
        self._catalog.entries.record(each for each in noted if each.chunk_id in live)
        for each in noted:
            if each.chunk_id not in live:
                self._engine.store.remove(each.key)

    def remove_gone(
        self,
        chunks: Sequence[NewChunk],
        prefixes: Sequence[CorpusPrefix],
        current: Sequence[CorpusPrefix],
    ) -> None:
        """Remove entries from the store whose prefix was forgotten while they were encoded.

        Args:
            chunks: What was encoded.
            prefixes: What it was encoded behind; the first is the corpus's own, which stays.
            current: The prefixes that this process serves now; another may have forgotten more.
        """
        kept = {record.id for record in self._catalog.prefixes.all()}
        kept &= {prefix.record.id for prefix in current}
        gone = [p for p in prefixes[1:] if p.recorded_id and p.record.id not in kept]
        for key in recipe_table((each.recipe for each in self.wanted(chunks, gone)), gone):
            self._engine.store.remove(key)
