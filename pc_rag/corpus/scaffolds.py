"""The scaffolds of a corpus: chunks known to belong together, encoded together.

The entry of a scaffold holds its chunks with the corpus's separator between them, as they stand in
the corpus's own prompts, so that every chunk attended those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import ChunkId, ScaffoldEntry, ScaffoldRecord, scaffold_id_of
from pc_rag.corpus.places import (
    KnownScaffold,
    ScaffoldPlace,
    join_tokens,
    place_scaffolds,
    side_by_side,
)
from pc_rag.corpus.prefixes import chunk_recipe, recipe_table
from pc_rag.corpus.reports import ScaffoldReport
from pc_rag.errors import IngestError, LayoutError, StoreFull

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.chunk_entries import ChunkEntries
    from pc_rag.corpus.places import CutPiece
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache, Request
    from pc_rag.engine.request import EntryRecipe
    from pc_rag.types import ModuleKey, TokenIds

_MIN_CHUNKS = 2


def _ids(chunk_ids: object) -> tuple[ChunkId, ...]:
    """Ids as a caller gives them, in order.

    Raises:
        IngestError: They are no list of ids.
    """
    if isinstance(chunk_ids, str) or not isinstance(chunk_ids, Iterable):
        what = "a single text" if isinstance(chunk_ids, str) else f"a {type(chunk_ids).__name__}"
        raise IngestError(f"scaffold: got {what}; pass a list of ids of chunks, in order")
    ids = tuple(chunk_ids)
    others = sorted({type(each).__name__ for each in ids if not isinstance(each, str)})
    if others:
        raise IngestError(
            f"scaffold: an id of a chunk is a str; got {', '.join(others)}. Pass the id of each, "
            "as in [chunk.id for chunk in corpus.search(...)]"
        )
    return tuple(ChunkId(each) for each in ids)


@dataclass(frozen=True, slots=True)
class _Known:
    """The live scaffolds of one moment; replaced as a whole, so that readers need no lock.

    Attributes:
        revision: See ``ScaffoldTable.revision``.
        records: The scaffolds in the order they came.
        by_first: What prompts see of them, by id of their first chunk.
        noted: Entries that the catalog was told of by requests since.
    """

    revision: tuple[int, int]
    records: tuple[ScaffoldRecord, ...]
    by_first: dict[str, list[KnownScaffold]]
    noted: set[ModuleKey] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The entry of a scaffold behind a prefix: how it is made, and what the catalog notes of it."""

    recipe: EntryRecipe
    entry: ScaffoldEntry


class Scaffolds:
    """Makes, keeps and finds the scaffolds of a corpus. Thread-safe.

    Follows changes by any process. A scaffold of which a chunk is gone is not found; ``gc`` removes
    it.

    Args:
        engine: Encodes them.
        catalog: Knows them.
        entries: Knows the chunks' tokens.
        separator: The text between chunks in the corpus's own prompts.
        encoded: Says what scaffolds are encoded behind at this moment.
        served: Says what requests may have had them encoded behind.
    """

    def __init__(
        self,
        engine: PromptCache,
        catalog: Catalog,
        entries: ChunkEntries,
        *,
        separator: str,
        encoded: Callable[[], Sequence[CorpusPrefix]],
        served: Callable[[], Sequence[CorpusPrefix]],
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._entries = entries
        self._separator = separator
        self._encoded = encoded
        self._served = served
        self._held = _Known((-1, -1), (), {})

    @property
    def live(self) -> tuple[ScaffoldRecord, ...]:
        """The scaffolds whose chunks are all there, in the order they came."""
        return self._known().records

    def add(self, chunk_ids: Sequence[str], *, pinned: bool = False) -> ScaffoldReport:
        """Encode chunks together; see ``Corpus.scaffold``."""
        scaffold = self._checked(chunk_ids)
        token_ids = self._token_ids(scaffold)
        prefixes = list(self._encoded())
        self._check_fits(token_ids, prefixes)
        num_encoded = self._make(scaffold, token_ids, prefixes, pinned=pinned)
        # Asked after it is known: an adoption that ends later than this sees it.
        known = {prefix.record.id for prefix in prefixes}
        late = [prefix for prefix in self._encoded() if prefix.record.id not in known]
        num_encoded += self._make(scaffold, token_ids, late, pinned=pinned)
        # Prefixes that chunks see nothing of share one entry.
        num_prefixes = len({(each.context_keys, each.start) for each in (*prefixes, *late)})
        return ScaffoldReport(
            chunk_ids=scaffold.chunk_ids,
            num_tokens=len(token_ids),
            num_bytes=len(token_ids) * self._engine.bytes_per_token * num_prefixes,
            num_prefixes=num_prefixes,
            num_encoded=num_encoded,
        )

    def remove(self, chunk_ids: Sequence[str]) -> bool:
        """Drop the scaffold of these chunks, and its entries; see ``Corpus.unscaffold``."""
        wanted = _ids(chunk_ids)
        known = (*self._catalog.scaffolds.live(), *self._catalog.scaffolds.dead())
        found = [each for each in known if each.chunk_ids == wanted]
        for scaffold in found:
            for key in self._catalog.scaffolds.entries_of(scaffold.id):
                self._engine.store.remove(key)
        self._catalog.scaffolds.remove(scaffold.id for scaffold in found)
        return bool(found)

    def placed(self, cut: Sequence[CutPiece]) -> Sequence[CutPiece]:
        """A cut prompt whose chunks are read from scaffolds where all of one stand in it."""
        known = self._known().by_first
        return place_scaffolds(cut, known) if known else cut

    def arranged(self, chunk_ids: Sequence[str]) -> list[str]:
        """Retrieved chunks, those of scaffolds together; see ``side_by_side``."""
        return side_by_side(chunk_ids, self._known().by_first)

    def note(self, placed: Sequence[CutPiece], request: Request) -> None:
        """Note the entries that a request reads, which it stores where they are missing.

        Args:
            placed: What ``placed`` returned.
            request: What was planned of it.
        """
        ids = {each.scaffold.id for each in placed if isinstance(each, ScaffoldPlace)}
        known = self._known() if ids else self._held
        keys = {part.key for part in request.plan.cached} - known.noted if ids else set()
        for scaffold in known.records if keys else ():
            if scaffold.id in ids:
                wanted = self._wanted(scaffold, self._token_ids(scaffold), self._served())
                made = {each.entry.key: each.entry for each in wanted}
                origins = {key: request.recipes[key].origin or key for key in keys}
                found = [
                    replace(made[origin], key=key)
                    for key, origin in origins.items()
                    if origin in made
                ]
                self._catalog.scaffolds.record(scaffold, found, adds=False)
                known.noted.update(entry.key for entry in found)

    def bring_near(self, chunk_ids: AbstractSet[str], *, is_ending: Callable[[], bool]) -> None:
        """Bring near the entries of scaffolds whose chunks are all among some; one at a time.

        What is missing is encoded behind every prefix that scaffolds are encoded behind.

        Args:
            chunk_ids: The chunks.
            is_ending: Asked before each entry; nothing more is done once it says so.

        Raises:
            StoreFull: The store has no room for a missing one.
            StoreIOError: The store's medium failed.
        """
        encoded_ids = {prefix.record.id for prefix in self._encoded()}
        whole = (each for each in self.live if chunk_ids >= set(each.chunk_ids))
        for scaffold, prefix in product(whole, self._served()):
            if is_ending():
                return
            token_ids = self._token_ids(scaffold)
            (wanted,) = self._wanted(scaffold, token_ids, [prefix])
            if not self._engine.source.missing([wanted.recipe]):
                table = recipe_table([wanted.recipe], [prefix])
                with self._engine.source.acquire([wanted.entry.key], table):
                    pass  # a lease brings the entry near, and giving it back leaves it there
            elif prefix.record.id in encoded_ids and self._fits(token_ids, prefix):
                with suppress(IngestError):  # it went meanwhile
                    self._make(scaffold, token_ids, [prefix], pinned=False, adds=False)

    def encode_live(self, prefix: CorpusPrefix) -> int:
        """Encode every scaffold behind one prefix; how many entries were missing.

        Those that do not fit behind it are left out, as no prompt can hold them there; so are those
        that the store has no room for.
        """
        return self._encode_behind([prefix])

    def encode_known(self) -> int:
        """Encode what the store lacks of every scaffold; how many entries that were."""
        return self._encode_behind(self._encoded())

    def remove_behind(self, prefix: CorpusPrefix) -> int:
        """Remove from the store what is behind a prefix; how many entries those were."""
        keys = self._catalog.scaffolds.keys_behind(prefix.record.id)
        return sum(self._engine.store.remove(key) for key in keys)

    def _encode_behind(self, prefixes: Iterable[CorpusPrefix]) -> int:
        num_encoded = 0
        for scaffold in self.live:
            token_ids = self._token_ids(scaffold)
            fitting = [each for each in prefixes if self._fits(token_ids, each)]
            with suppress(IngestError, StoreFull):  # encoded when it is asked for
                num_encoded += self._make(scaffold, token_ids, fitting, pinned=False, adds=False)
        return num_encoded

    def _known(self) -> _Known:
        revision = self._catalog.scaffolds.revision()
        held = self._held
        if held.revision != revision:
            records = self._catalog.scaffolds.live()
            by_first: dict[str, list[KnownScaffold]] = {}
            for record in records:
                known = KnownScaffold(record.id, record.chunk_ids, self._separator_ids(record))
                by_first.setdefault(record.chunk_ids[0], []).append(known)
            self._held = held = _Known(revision, records, by_first)
        return held

    def _separator_ids(self, scaffold: ScaffoldRecord) -> TokenIds:
        separator = scaffold.separator
        return self._engine.loaded.tokenizer.encode_text(separator) if separator else ()

    def _token_ids(self, scaffold: ScaffoldRecord) -> TokenIds:
        """The tokens of a scaffold's entry; those of a chunk that has just gone are left out."""
        stored = map(self._entries.stored, scaffold.chunk_ids)
        chunks = (chunk.token_ids for chunk in stored if chunk is not None)
        return join_tokens(chunks, self._separator_ids(scaffold))

    def _checked(self, chunk_ids: Sequence[str]) -> ScaffoldRecord:
        """The scaffold of these chunks, or all that is wrong with them."""
        ids = _ids(chunk_ids)
        problems: list[str] = []
        if len(ids) < _MIN_CHUNKS:
            problems.append(
                f"got {len(ids)} chunks; pass the ids of at least {_MIN_CHUNKS}, in order"
            )
        if repeated := [id_ for id_, count in Counter(ids).items() if count > 1]:
            problems.append(f"repeated: {', '.join(repeated)}; name each chunk once")
        live = self._catalog.chunks_where({}) if ids else frozenset()
        if unknown := [id_ for id_ in dict.fromkeys(ids) if id_ not in live]:
            problems.append(
                f"no document has: {', '.join(unknown)}; pass ids of chunks, as search returns them"
            )
        if problems:
            raise IngestError("scaffold: " + ". ".join(problems))
        return ScaffoldRecord(
            id=scaffold_id_of(ids, self._separator), chunk_ids=ids, separator=self._separator
        )

    def _fits(self, token_ids: TokenIds, prefix: CorpusPrefix) -> bool:
        return len(prefix.token_ids) + len(token_ids) < self._engine.max_position

    def _check_fits(self, token_ids: TokenIds, prefixes: Iterable[CorpusPrefix]) -> None:
        for prefix in prefixes:
            if not self._fits(token_ids, prefix):
                raise LayoutError(
                    f"scaffold: its chunks have {len(token_ids)} tokens with the separators between"
                    f" them, and stand behind {len(prefix.token_ids)} tokens of a prefix; the "
                    f"context ends at {self._engine.max_position}, and at least one token follows. "
                    "Name fewer chunks, or add them as shorter ones"
                )

    def _wanted(
        self, scaffold: ScaffoldRecord, token_ids: TokenIds, prefixes: Iterable[CorpusPrefix]
    ) -> list[_Wanted]:
        wanted = []
        for prefix in prefixes:
            recipe = chunk_recipe(self._engine, token_ids, prefix)
            entry = ScaffoldEntry(
                key=recipe.address.key,
                scaffold_id=scaffold.id,
                prefix_id=prefix.recorded_id,
                fingerprint=self._engine.loaded.fingerprint,
                num_bytes=len(token_ids) * self._engine.bytes_per_token,
            )
            wanted.append(_Wanted(recipe, entry))
        return wanted

    def _make(
        self,
        scaffold: ScaffoldRecord,
        token_ids: TokenIds,
        prefixes: Sequence[CorpusPrefix],
        *,
        pinned: bool,
        adds: bool = True,
    ) -> int:
        """Encode what the store lacks, then note it; how many entries were encoded.

        Args:
            scaffold: What is encoded.
            token_ids: Its tokens.
            prefixes: What it is encoded behind.
            pinned: Never evict the entries.
            adds: Whether it is made known where it is not; one that was dropped stays so otherwise.

        Raises:
            StoreFull: The store has no room; what was stored of it has left again.
            IngestError: A chunk went meanwhile, or a scaffold that is not added did; likewise.
        """
        engine = self._engine
        wanted = self._wanted(scaffold, token_ids, prefixes)
        missing = engine.source.missing(each.recipe for each in wanted)
        if pinned:
            for key in {each.entry.key for each in wanted}.difference(missing):
                engine.store.pin(key)
        table = recipe_table((each.recipe for each in wanted), prefixes)
        for encoded in engine.source.encode(missing, table, pinned=pinned):
            if encoded.refusal is not None:
                self._drop(missing)
                raise encoded.refusal
        noted = (each.entry for each in wanted)
        if not self._catalog.scaffolds.record(scaffold, noted, adds=adds):
            self._drop(missing)
            raise IngestError(
                "scaffold: it or a chunk of it was removed while it was encoded; look the ids up "
                "again"
            )
        kept = {record.id for record in self._catalog.prefixes.all()}
        forgotten = (e.entry.key for e in wanted if e.entry.prefix_id not in (None, *kept))
        self._drop(forgotten)
        return len(missing)

    def _drop(self, keys: Iterable[ModuleKey]) -> None:
        """Remove entries that nobody knows."""
        for key in keys:
            self._engine.store.remove(key)
