"""The prefixes of a corpus: its own, those it adopted, and those of former prompt formats."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from pc_rag.corpus.catalog.records import PrefixRole
from pc_rag.corpus.prefixes import corpus_prefix
from pc_rag.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.catalog.records import PrefixRecord
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache
    from pc_rag.types import TokenIds


MAX_PREFIXES = 4
"""Each prefix multiplies the bytes of the corpus and the time of every ingest."""


class EncodedBehind(Protocol):
    """What is encoded behind every prefix: ``Ingest`` for chunks, ``Scaffolds``."""

    def encode_live(self, prefix: CorpusPrefix) -> int:
        """Encode all there is behind one prefix; how many entries were missing."""

    def remove_behind(self, prefix: CorpusPrefix) -> int:
        """Remove from the store what is behind a prefix; how many entries those were."""


class _Standing(StrEnum):
    """What the catalog notes of a prefix for one kind of entries; see ``_standing_name``."""

    ADOPTED = "adopted"
    """Every chunk was encoded behind it, and every later one is."""
    DEFAULT = "default"
    """It was the corpus's own at one time: the chunks of that time were encoded behind it."""


@dataclass(frozen=True, slots=True)
class _Held:
    """Prefixes of one moment; replaced as a whole, so that readers need no lock.

    Attributes:
        encoded: Those that every chunk is encoded behind, the corpus's own first.
        former: Former defaults, whose missing chunks are encoded when they are asked for.
    """

    encoded: tuple[CorpusPrefix, ...]
    former: tuple[CorpusPrefix, ...]

    def without(self, prefix_ids: set[str]) -> _Held:
        return _Held(
            tuple(prefix for prefix in self.encoded if prefix.record.id not in prefix_ids),
            tuple(prefix for prefix in self.former if prefix.record.id not in prefix_ids),
        )

    def adopting(self, prefix: CorpusPrefix) -> _Held:
        others = self.without({prefix.record.id})
        return _Held((*others.encoded, prefix), others.former)


class PrefixSet:
    """Prefixes that prompts are served from. Thread-safe; adopts one at a time, in the background.

    An adopted prefix is complete once all chunks are encoded behind it, and from then on with every
    later opening for the same kind of entries. A former default stays served, as its entries are
    there, and costs no ingest anything.

    Args:
        engine: Whose model encodes.
        catalog: Keeps the prefixes.
        own: Tokens of the corpus's own prefix; may be empty.
        kinds: What is encoded behind prefixes: chunks, and scaffolds.
    """

    def __init__(
        self,
        engine: PromptCache,
        catalog: Catalog,
        own: TokenIds,
        kinds: Sequence[EncodedBehind],
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._kinds = kinds
        self._lock = Lock()
        self._pending: dict[TokenIds, Future[int]] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="pc-rag-prefix")
        default = catalog.prefixes.record(self._text_of(own), own, role=PrefixRole.DEFAULT)
        if self._standing(default) is None:
            self._note(default, _Standing.DEFAULT)
        encoded = [corpus_prefix(engine, default)]
        former: list[CorpusPrefix] = []
        for record in catalog.prefixes.all():
            standing = self._standing(record)
            if record.id != default.id and standing is not None:
                group = encoded if standing is _Standing.ADOPTED else former
                group.append(corpus_prefix(engine, record))
        self._held = _Held(tuple(encoded), tuple(former))

    @property
    def encoded(self) -> tuple[CorpusPrefix, ...]:
        """What every chunk is encoded behind, the corpus's own prefix first."""
        return self._held.encoded

    @property
    def served(self) -> tuple[CorpusPrefix, ...]:
        """What prompts are served from: those of ``encoded``, then former defaults."""
        held = self._held
        return held.encoded + held.former

    @property
    def is_full(self) -> bool:
        """Whether no prefix can be adopted before another is forgotten."""
        return len(self.encoded) >= MAX_PREFIXES

    def adopt(self, head: TokenIds) -> Future[int]:
        """Encode all chunks behind a prefix too; see ``Corpus.adopt_prefix``.

        Raises:
            PromptError: There is no token.
            ConfigError: There are ``MAX_PREFIXES`` already.
        """
        if not head:
            raise PromptError("a prefix needs at least one token; the head is empty")
        with self._lock:
            if _is_among(head, self.encoded):
                done: Future[int] = Future()
                done.set_result(0)
                return done
            begun = self._begin(head)
            if begun is None:
                raise ConfigError(
                    f"the corpus is encoded behind {MAX_PREFIXES} prefixes, which is the most; "
                    "forget_prefix one of: " + ", ".join(map(repr, self._texts_to_forget()))
                )
            return begun

    def try_adopt(self, head: TokenIds) -> Future[int] | None:
        """As ``adopt``; ``None`` where the prefix is served already, or there is no room."""
        with self._lock:
            return None if _is_among(head, self.served) else self._begin(head)

    def forget(self, text: str) -> int:
        """Drop prefixes of this text and their entries; see ``Corpus.forget_prefix``."""
        own_id = self.encoded[0].record.id
        with self._lock:
            # Asked of the catalog: an adoption that failed half-way has left entries too.
            known = self._catalog.prefixes.all()
            found = [each for each in known if each.text == text and each.id != own_id]
            begun = [self._pending[r.token_ids] for r in found if r.token_ids in self._pending]
        wait([each for each in begun if not each.cancel()])
        with self._lock:
            self._held = self._held.without({record.id for record in found})
        num_removed = 0
        for record in found:
            # Before the entries go: after a crash in between, it must not count as complete.
            self._catalog.delete_settings(_standings_of(record))
            prefix = corpus_prefix(self._engine, record)
            num_removed += sum(kind.remove_behind(prefix) for kind in self._kinds)
            self._catalog.prefixes.remove(record.id)
        return num_removed

    def close(self) -> None:
        """Finish what was begun. Idempotent."""
        self._background.shutdown()

    def _begin(self, head: TokenIds) -> Future[int] | None:
        """The adoption in progress, or a new one; ``None`` if there is no room. Lock held."""
        # A cancelled one never ran, so it could not take itself out.
        self._pending = {ids: f for ids, f in self._pending.items() if not f.cancelled()}
        pending = self._pending.get(head)
        if pending is not None:
            return pending
        # Once each: an adoption about to end is in both.
        if len({prefix.token_ids for prefix in self.encoded} | set(self._pending)) >= MAX_PREFIXES:
            return None
        record = self._catalog.prefixes.record(self._text_of(head), head, role=PrefixRole.ADOPTED)
        self._pending[head] = begun = self._background.submit(self._adopt, record)
        return begun

    def _adopt(self, record: PrefixRecord) -> int:
        try:
            prefix = corpus_prefix(self._engine, record)
            revision = self._catalog.scaffolds.revision()
            num_encoded = self._encode_live(prefix)
            with self._lock:
                self._held = self._held.adopting(prefix)
            self._note(record, _Standing.ADOPTED)
            if self._catalog.scaffolds.revision() != revision:  # some came meanwhile, without it
                num_encoded += self._encode_live(prefix)
            return num_encoded
        finally:
            with self._lock:
                self._pending.pop(record.token_ids, None)

    def _encode_live(self, prefix: CorpusPrefix) -> int:
        return sum(kind.encode_live(prefix) for kind in self._kinds)

    def _texts_to_forget(self) -> list[str]:
        adopted = [prefix.record.text for prefix in self.encoded[1:]]
        return list(dict.fromkeys([*adopted, *map(self._text_of, self._pending)]))

    def _standing(self, record: PrefixRecord) -> _Standing | None:
        noted = self._catalog.setting(self._standing_name(record))
        return None if noted is None else _Standing(noted)

    def _note(self, record: PrefixRecord, standing: _Standing) -> None:
        self._catalog.put_setting(self._standing_name(record), standing)

    def _standing_name(self, record: PrefixRecord) -> str:
        """Names the setting of a prefix for the entries of this engine's kind.

        The key of the prefix's own tokens stands for model, numeric type and tenant: entries of
        another do not serve here.
        """
        recipe = corpus_prefix(self._engine, record).recipe
        kind = self._engine.loaded.fingerprint if recipe is None else recipe.address.key
        return f"{_standings_of(record)}{self._engine.config.visibility} {kind}"

    def _text_of(self, token_ids: TokenIds) -> str:
        """Text of a prefix, control tokens shown."""
        return self._engine.loaded.tokenizer.backend.decode(
            list(token_ids), skip_special_tokens=False
        )


def _is_among(head: TokenIds, prefixes: tuple[CorpusPrefix, ...]) -> bool:
    return any(prefix.token_ids == head for prefix in prefixes)


def _standings_of(record: PrefixRecord) -> str:
    """How the names of a prefix's settings begin, those for other kinds of entries included."""
    return f"prefix {record.id} "
