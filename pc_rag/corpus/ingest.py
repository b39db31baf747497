"""Taking documents in: chunk, encode what the store lacks, then publish document by document.

A document becomes visible in one step, after the entries of its chunks are stored. Until then its
former version answers, also when encoding fails half-way.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, DocumentChange, NewChunk, chunk_id_of
from pc_rag.corpus.chunk_entries import ChunkEntries
from pc_rag.corpus.documents import as_documents, document_id, refuse_single
from pc_rag.corpus.prefixes import recipe_table
from pc_rag.corpus.publishing import PreparedDocument, Published, Tally, windows
from pc_rag.corpus.reports import IngestEstimate
from pc_rag.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.chunking import Chunker
    from pc_rag.corpus.documents import Document
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.corpus.reports import IngestProgress, IngestReport
    from pc_rag.engine import PromptCache, Request
    from pc_rag.types import ModuleKey, TokenIds

    OnProgress = Callable[[IngestProgress], None]

_LIVE_BATCH = 512
"""Chunks encoded behind a new prefix before they are recorded, so that a crash loses few."""

_WHOLE = "whole"
"""Names the chunking of documents that are one chunk each."""

_GIVEN = "given"
"""Names the chunking of documents that were split elsewhere."""


class Ingest:
    """Takes documents into a corpus. Thread-safe.

    Args:
        engine: Encodes chunks.
        catalog: Knows documents and chunks.
        chunker: Splits texts.
        prefixes: Says what new chunks are encoded behind at this moment, the default first.
        served: Says what requests may have had chunks encoded behind; the same by default.

    Attributes:
        entries: The entries of the corpus's chunks.
    """

    def __init__(
        self,
        engine: PromptCache,
        catalog: Catalog,
        chunker: Chunker,
        prefixes: Callable[[], Sequence[CorpusPrefix]],
        *,
        served: Callable[[], Sequence[CorpusPrefix]] | None = None,
    ) -> None:
        self.entries = ChunkEntries(engine, catalog)
        self._engine = engine
        self._catalog = catalog
        self._chunker = chunker
        self._prefixes = prefixes
        self._served = served or prefixes
        self._noted: set[ModuleKey] = set()
        self._noted_at = -1

    def prepare(self, documents: Iterable[Document]) -> Iterator[PreparedDocument]:
        """Split and tokenise documents; those whose text did not change keep the chunks they have.

        Raises:
            LayoutError: A chunk is longer than a slot of the corpus, or one that is not to be split
                is longer than the model's context.
        """
        for document in documents:
            change = self._catalog.compare(document, chunking=self._chunking(document))
            chunks = self._known_chunks(document, change) or self._split(document)
            yield PreparedDocument(document, change, chunks)

    def as_prepared(
        self, documents: Iterable[Document | str | PreparedDocument]
    ) -> Iterator[PreparedDocument]:
        """Prepare what is not prepared yet, one by one.

        Raises:
            IngestError: Not a collection of documents.
        """
        refuse_single(documents)
        return (prepared for each in documents for prepared in self._prepared(each))

    def _prepared(self, document: Document | str | PreparedDocument) -> Iterable[PreparedDocument]:
        if isinstance(document, PreparedDocument):
            return (document,)
        return self.prepare(as_documents([document]))

    def estimate(self, prepared: Sequence[PreparedDocument]) -> IngestEstimate:
        """What encoding them will need."""
        prefixes = self._prefixes()
        wanted = [w for each in prepared for w in self.entries.wanted(each.chunks, prefixes)]
        table = recipe_table((each.recipe for each in wanted), prefixes)
        source = self._engine.source
        missing = set(source.missing(each.recipe for each in wanted))
        contexts = dict.fromkeys(context for key in missing for context in table[key].context)
        needed = [*missing, *source.missing(table[key] for key in contexts)]
        num_tokens = sum(len(table[key].address.token_ids) for key in needed)
        return IngestEstimate(
            num_documents=len(prepared),
            num_unchanged=sum(p.change is DocumentChange.UNCHANGED for p in prepared),
            num_chunks=len({w.record.chunk_id for w in wanted if w.record.key in missing}),
            num_tokens=num_tokens,
            num_bytes=num_tokens * self._engine.bytes_per_token,
        )

    def add(
        self,
        prepared: Iterable[PreparedDocument],
        *,
        on_progress: OnProgress | None = None,
        on_published: Callable[[Published], None],
        pinned: bool = False,
    ) -> IngestReport:
        """Encode what the store lacks and publish the documents; see ``Corpus.add``.

        Args:
            prepared: The documents.
            on_progress: Called after every encoded chunk.
            on_published: Called after every window of documents that became visible.
            pinned: Never evict the chunks' entries.
        """
        tally = Tally(num_evicted_before=self._num_evictions())
        for window in windows(prepared):
            prefixes = self._prefixes()
            chunks = [chunk for each in window for chunk in each.chunks]
            refused = self._encode(chunks, prefixes, tally, on_progress, pinned=pinned)
            published = self._publish(window, prefixes, tally, refused)
            self._follow_prefixes(chunks, prefixes, tally, on_progress, pinned=pinned)
            on_published(published)
        return tally.report(num_evictions=self._num_evictions())

    def encode_known(
        self, document_ids: Iterable[str], *, on_progress: OnProgress | None = None
    ) -> IngestReport:
        """Encode what the store lacks of the chunks of documents, which stay as they are.

        Args:
            document_ids: Of live documents; of others there is nothing to encode.
            on_progress: Called after every encoded chunk.

        Returns:
            What was encoded; no document is counted.
        """
        tally = Tally(num_evicted_before=self._num_evictions())
        known = self._chunks_of(document_ids)
        while chunks := list(islice(known, _LIVE_BATCH)):
            prefixes = self._prefixes()
            refused = self._encode(chunks, prefixes, tally, on_progress, pinned=False)
            self._record(chunks, prefixes, refused)
            self._follow_prefixes(chunks, prefixes, tally, on_progress, pinned=False)
        return tally.report(num_evictions=self._num_evictions())

    def _chunks_of(self, document_ids: Iterable[str]) -> Iterator[NewChunk]:
        """The chunks of live documents, each once."""
        seen: set[ChunkId] = set()
        for document_id_ in document_ids:
            for record in self._catalog.chunks_of(document_id_):
                if record.id not in seen:
                    seen.add(record.id)
                    yield NewChunk(record.text, self.entries.tokens_of(record.id, record.text))

    def encode_live(self, prefix: CorpusPrefix) -> int:
        """Encode every live chunk behind one prefix; how many were missing."""
        tally = Tally()
        live = iter(self._catalog.live_texts())
        while batch := list(islice(live, _LIVE_BATCH)):
            chunks = [NewChunk(text, self.entries.tokens_of(id_, text)) for id_, text in batch]
            refused = self._encode(chunks, [prefix], tally, None, pinned=False)
            # Those that were stored already too: a run before this one may have been cut off.
            self._record(chunks, [prefix], refused)
        return tally.num_encoded

    def remove_behind(self, prefix: CorpusPrefix) -> int:
        """Remove what the store holds of a prefix and behind it; how many entries those were.

        Those that were noted, by whatever model, and those that this engine encoded for a request.
        """
        keys = {each.key for each in self._catalog.entries.of_prefix(prefix.record.id)}
        for chunk_id, _ in self._catalog.live_texts() if prefix.recorded_id else ():
            keys.update(each.record.key for each in self.entries.made(chunk_id, [prefix]))
        if prefix.recipe is not None:
            keys.add(prefix.recipe.address.key)
        return sum(self._engine.store.remove(key) for key in keys)

    def entries_of(self, chunk_id: ChunkId) -> Mapping[ModuleKey, int]:
        """Every entry that a chunk may have in the store, with its bytes of keys and values.

        Those that were noted, by whatever model, and those that this engine may have encoded for a
        request, which are not.
        """
        entries = {each.key: each.num_bytes for each in self._catalog.entries.of_chunk(chunk_id)}
        own = self.entries.made(chunk_id, self._served())
        return entries | {each.record.key: each.record.num_bytes for each in own}

    def _late(self, prefixes: Sequence[CorpusPrefix]) -> list[CorpusPrefix]:
        """The prefixes that came since these were listed.

        Asked after publishing: an adoption that ends later than this sees what was published.
        """
        known = {prefix.record.id for prefix in prefixes}
        return [prefix for prefix in self._prefixes() if prefix.record.id not in known]

    def note(self, request: Request) -> None:
        """Note the entries that a request reads, which it stores where they are missing.

        What another model or dtype stores for a request, or this one at another start, would
        otherwise be known to nobody but it, and stay when the document is gone.
        """
        generation = self._catalog.generation()
        if generation != self._noted_at:  # what was noted may have gone with its document
            self._noted, self._noted_at = set(), generation
        for part in request.plan.cached:
            if part.key not in self._noted:
                self._noted.add(part.key)
                self.entries.note(
                    ChunkId(part.label), request.recipes[part.key], behind=self._served()
                )

    def _known_chunks(self, document: Document, change: DocumentChange) -> tuple[NewChunk, ...]:
        """The chunks that the catalog has of this text; none where it has not."""
        if change not in (DocumentChange.UNCHANGED, DocumentChange.METADATA):
            return ()
        if document.chunks is not None:
            return self._given(document)
        chunks: list[NewChunk] = []
        end = 0
        for record in self._catalog.chunks_of(document_id(document)):
            start = document.text.find(record.text, end)
            if start < 0:  # another process has replaced the document since it was compared
                return ()
            end = start + len(record.text)
            token_ids = record.token_ids
            chunks.append(
                NewChunk(
                    record.text,
                    self.entries.tokens(record.text) if token_ids is None else token_ids,
                )
            )
        return tuple(chunks)

    def _chunking(self, document: Document) -> str:
        if document.chunks is not None:
            return _GIVEN
        return _WHOLE if document.is_whole else self._chunker.id

    def _split(self, document: Document) -> tuple[NewChunk, ...]:
        if document.chunks is not None:
            return self._given(document)
        if document.is_whole:
            texts = [text] if (text := document.text.strip()) else []
        else:
            texts = [chunk.text for chunk in self._chunker.split(document.text)]
        chunks = tuple(NewChunk(text, self.entries.tokens(text)) for text in texts)
        id_ = document_id(document)
        if document.is_whole and chunks:
            self._check_fits(
                f"document {id_!r} is whole and",
                len(chunks[0].token_ids),
                "Split its text, or add it with is_whole=False",
            )
        for chunk in chunks:
            self._check_fits(
                f"document {id_!r}: chunk {chunk.text[:40]!r}...",
                len(chunk.token_ids),
                "Use shorter chunks (chunk_tokens)",
            )
        # A tokenizer may drop a text whole, such as one of zero-width characters.
        return tuple(chunk for chunk in chunks if chunk.token_ids)

    def _given(self, document: Document) -> tuple[NewChunk, ...]:
        """The chunks of a document that was split elsewhere; known ones are not tokenised again."""
        id_ = document_id(document)
        known = {record.text: record.token_ids for record in self._catalog.chunks_of(id_)}
        chunks = []
        for number, text in enumerate(document.chunks or ()):
            token_ids = known.get(text)
            if token_ids is None:
                token_ids = self._tokens_of_given(id_, number, text)
            if token_ids:  # see _split
                chunks.append(NewChunk(text, token_ids))
        return tuple(chunks)

    def _tokens_of_given(self, id_: str, number: int, text: str) -> TokenIds:
        place = f"document {id_!r}, chunk {number}"
        try:
            token_ids = self.entries.tokens(text)
        except LayoutError as error:
            raise LayoutError(f"{place}: {error}") from error
        self._check_fits(
            f"{place} ({text[:40]!r}...)", len(token_ids), "Split the text into shorter chunks"
        )
        return token_ids

    def _check_fits(self, what: str, num_tokens: int, advice: str) -> None:
        own = self._prefixes()[0].token_ids
        self.entries.check_fits(what, num_tokens, advice, prefix=own)

    def _encode(
        self,
        chunks: Sequence[NewChunk],
        prefixes: Sequence[CorpusPrefix],
        tally: Tally,
        on_progress: OnProgress | None,
        *,
        pinned: bool,
    ) -> set[ModuleKey]:
        """Encode what the store lacks; what it had no room for."""
        source = self._engine.source
        recipes = [each.recipe for each in self.entries.wanted(chunks, prefixes)]
        missing = source.missing(recipes)
        if pinned:
            for key in {recipe.address.key for recipe in recipes}.difference(missing):
                self._engine.store.pin(key)
        refused: set[ModuleKey] = set()
        for encoded in source.encode(missing, recipe_table(recipes, prefixes), pinned=pinned):
            tally.count(encoded)
            if encoded.refusal is not None:
                refused.add(encoded.key)
            if on_progress is not None:
                on_progress(tally.progress)
        return refused

    def _follow_prefixes(
        self,
        chunks: Sequence[NewChunk],
        prefixes: Sequence[CorpusPrefix],
        tally: Tally,
        on_progress: OnProgress | None,
        *,
        pinned: bool,
    ) -> None:
        """What has to be done where prefixes came or went while chunks were encoded."""
        if late := self._late(prefixes):
            refused = self._encode(chunks, late, tally, on_progress, pinned=pinned)
            self._record(chunks, late, refused)
        self.entries.remove_gone(chunks, prefixes, self._prefixes())

    def _record(
        self,
        chunks: Sequence[NewChunk],
        prefixes: Sequence[CorpusPrefix],
        refused: Container[ModuleKey],
    ) -> None:
        wanted = self.entries.wanted(chunks, prefixes)
        self.entries.record(each.record for each in wanted if each.record.key not in refused)

    def _publish(
        self,
        window: list[PreparedDocument],
        prefixes: Sequence[CorpusPrefix],
        tally: Tally,
        refused: set[ModuleKey],
    ) -> Published:
        chunks: dict[ChunkId, str] = {}
        before, num_changes = self._catalog.generation(), 0
        has_replaced = False
        for prepared in window:
            wanted = self.entries.wanted(prepared.chunks, prefixes)
            records = [each.record for each in wanted if each.record.key not in refused]
            change = self._catalog.add_document(
                prepared.document,
                prepared.chunks,
                chunking=self._chunking(prepared.document),
                entries=records,
                based_on=prepared.based_on,
            )
            tally.changes[change] += 1
            if change is DocumentChange.OUTDATED:
                self.entries.record(records)  # those of chunks that nobody has leave the store
                continue
            num_changes += change is not DocumentChange.UNCHANGED
            has_replaced = has_replaced or change is DocumentChange.UPDATED
            if change in (DocumentChange.ADDED, DocumentChange.UPDATED):
                chunks.update((chunk_id_of(chunk.text), chunk.text) for chunk in prepared.chunks)
        after = self._catalog.generation()
        is_alone = after - before == num_changes and not has_replaced
        return Published(tuple(chunks.items()), before if is_alone else None, after)

    def _num_evictions(self) -> int:
        """Of the farthest tier: what nearer ones drop is still stored."""
        return self._engine.store.stats()[-1].num_evictions
