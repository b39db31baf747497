"""The prefixes that a corpus encodes its chunks behind: its own, and those it adopted."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from pc_rag.corpus.catalog.records import PrefixRole
from pc_rag.corpus.prefixes import corpus_prefix
from pc_rag.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pc_rag.corpus.catalog import Catalog
    from pc_rag.corpus.catalog.records import PrefixRecord
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache
    from pc_rag.types import TokenIds


MAX_PREFIXES = 4
"""Each prefix multiplies the bytes of the corpus and the time of every ingest."""


class PrefixSet:
    """Prefixes that prompts are served from. Thread-safe; adopts one at a time, in the background.

    A prefix is current once all chunks are encoded behind it, and from then on with every later
    opening by the same model. A former default stays current: its entries are there.

    Args:
        engine: Whose model encodes.
        catalog: Keeps the prefixes.
        own: Tokens of the corpus's own prefix; may be empty.
        encode_live: Encodes every live chunk behind a prefix, and says how many were missing.
    """

    def __init__(
        self,
        engine: PromptCache,
        catalog: Catalog,
        own: TokenIds,
        encode_live: Callable[[CorpusPrefix], int],
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._encode_live = encode_live
        self._lock = Lock()
        self._pending: dict[str, Future[int]] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="pc-rag-prefix")
        default = catalog.prefixes.record(self._text_of(own), own, role=PrefixRole.DEFAULT)
        self._mark_ready(default)
        adopted = [
            corpus_prefix(engine, record)
            for record in catalog.prefixes.all()
            if record.id != default.id and catalog.setting(self._ready_setting(record)) is not None
        ]
        self._current = (corpus_prefix(engine, default), *adopted)

    @property
    def current(self) -> tuple[CorpusPrefix, ...]:
        """What chunks are encoded behind, the corpus's own prefix first."""
        return self._current

    def is_current(self, head: TokenIds) -> bool:
        """Whether chunks are encoded behind just these tokens."""
        return any(prefix.token_ids == head for prefix in self._current)

    def adopt(self, head: TokenIds) -> Future[int]:
        """Encode all chunks behind a prefix too; see ``Corpus.adopt_prefix``.

        Raises:
            PromptError: There is no token.
            ConfigError: There are ``MAX_PREFIXES`` already.
        """
        if not head:
            raise PromptError("a prefix needs at least one token; the head is empty")
        with self._lock:
            if self.is_current(head):
                done: Future[int] = Future()
                done.set_result(0)
                return done
            if self._is_full():
                raise ConfigError(
                    f"the corpus is encoded behind {MAX_PREFIXES} prefixes, which is the most; "
                    "forget_prefix one of: "
                    + ", ".join(repr(prefix.record.text) for prefix in self._current[1:])
                )
            record = self._catalog.prefixes.record(
                self._text_of(head), head, role=PrefixRole.ADOPTED
            )
            pending = self._pending.get(record.id)
            if pending is None:
                pending = self._background.submit(self._adopt, record)
                self._pending[record.id] = pending
            return pending

    @property
    def is_full(self) -> bool:
        """Whether no further prefix can be adopted."""
        with self._lock:
            return self._is_full()

    def forget(self, text: str) -> int:
        """Drop an adopted prefix and its entries; see ``Corpus.forget_prefix``."""
        with self._lock:
            found = [prefix for prefix in self._current[1:] if prefix.record.text == text]
            self._current = tuple(prefix for prefix in self._current if prefix not in found)
        num_removed = 0
        for prefix in found:
            entries = self._catalog.entries.of_prefix(prefix.record.id)
            num_removed += sum(self._engine.store.remove(entry.key) for entry in entries)
            self._catalog.prefixes.remove(prefix.record.id)
        return num_removed

    def close(self) -> None:
        """Finish what was begun. Idempotent."""
        self._background.shutdown()

    def _adopt(self, record: PrefixRecord) -> int:
        try:
            prefix = corpus_prefix(self._engine, record)
            generation = self._catalog.generation()
            num_encoded = self._encode_live(prefix)
            with self._lock:
                self._current = (*self._current, prefix)
            self._mark_ready(record)
            if self._catalog.generation() != generation:  # published meanwhile, without it
                num_encoded += self._encode_live(prefix)
            return num_encoded
        finally:
            with self._lock:
                del self._pending[record.id]

    def _is_full(self) -> bool:
        return len(self._current) + len(self._pending) >= MAX_PREFIXES

    def _mark_ready(self, record: PrefixRecord) -> None:
        name = self._ready_setting(record)
        if self._catalog.setting(name) is None:
            self._catalog.put_setting(name, "1")

    def _ready_setting(self, record: PrefixRecord) -> str:
        """What notes that this model has encoded the chunks behind a prefix."""
        return f"ready {self._engine.loaded.fingerprint} {record.id}"

    def _text_of(self, token_ids: TokenIds) -> str:
        """Text of a prefix, control tokens shown."""
        return self._engine.loaded.tokenizer.backend.decode(
            list(token_ids), skip_special_tokens=False
        )
