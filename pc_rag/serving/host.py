"""A model with the corpus whose chunks it recognises, opened when it is first needed."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from pc_rag.config import EngineConfig
from pc_rag.corpus import Corpus
from pc_rag.engine import PromptCache
from pc_rag.errors import ConfigError, PromptCacheError
from pc_rag.model.builtin import DEFAULT_MODEL
from pc_rag.model.chat import ChatFormat
from pc_rag.model.loading import load_max_position, load_model, load_tokenizer
from pc_rag.model.tool_parser import ToolCallParser
from pc_rag.serving.reply import ReplyStream, new_call_id
from pc_rag.types import MissReason

if TYPE_CHECKING:
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.serving.call import Call
    from pc_rag.serving.reply import Reply

_ENTRIES = "kv"
"""Folder of the entries below a store, as the command line names it."""

_BEHIND_ANOTHER_PREFIX = frozenset({MissReason.OTHER_PREFIX, MissReason.UNPLACED})
"""What chunks report that would be served better behind the prompt's own head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What a host is opened with; equal settings share one host.

    Attributes:
        model: Hub name, folder, ``.gguf`` file, or ``"smollm2"``.
        store: Folder that keeps catalog and entries; ``None`` keeps them in memory.
        dtype: Compute dtype; see ``load_model``.
        device: Where the model runs; see ``load_model``.
        chat_template: Jinja source in place of the model's own template.
        max_position: Position IDs that requests may use; see ``load_model``.
        config: Capacities and policies.
    """

    model: str = DEFAULT_MODEL
    store: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    chat_template: str | None = None
    max_position: int | None = None
    config: EngineConfig = field(default_factory=EngineConfig)


class Hold:
    """One owner's claim on a host: what a host opened is closed when its last hold is released.

    A hold that nobody refers to any more counts as released, but closes nothing: memory and files
    are given back by Python.

    Attributes:
        host: The host.
    """

    def __init__(self, host: Host) -> None:
        self.host = host

    def release(self) -> None:
        """Give the claim up. Idempotent."""
        self.host.release(self)


@dataclass(frozen=True, slots=True)
class OwnHold:
    """The hold of one object, which a copy of the object does not share.

    Attributes:
        hold: The hold.
        owner_id: Whose it is.
        source: What it was opened from.
    """

    hold: Hold
    owner_id: int
    source: object

    @classmethod
    def renewed(
        cls, held: OwnHold | None, owner: object, source: HostSettings | PromptCache | Corpus
    ) -> OwnHold:
        """The hold of an object: the one it has, or a new one for a copy or a changed source."""
        if held is not None and held.owner_id == id(owner) and held.source == source:
            return held
        return cls(open_host(source).hold(), id(owner), source)

    def release(self, owner: object) -> None:
        """Give the claim up, if it is this object's own; see ``Hold.release``."""
        if self.owner_id == id(owner):
            self.hold.release()


class Host:
    """A model with a corpus, opened at the first use. Thread-safe; a failed opening is tried again.

    The corpus recognises chunks and retrieves nothing: frameworks bring vector stores. Get one by
    ``open_host``, and a ``hold`` on it while you use it.

    Args:
        settings: What to open, and what siblings are opened with.
        engine: An engine that is open already. Lent: it is never closed here.
        corpus: A corpus that is open already. Lent likewise.
    """

    def __init__(
        self,
        settings: HostSettings,
        *,
        engine: PromptCache | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._lent_corpus, self._lent_engine = corpus, engine
        self._corpus = corpus
        self._holds: WeakSet[Hold] = WeakSet()
        self._tokenizer: TextTokenizer | None = None
        self._chat_format: ChatFormat | None = None
        self._max_position: int | None = None
        self._siblings: dict[str, Hold] = {}
        self._learning: Future[int] | None = None

    def hold(self) -> Hold:
        """Claim the host: it stays open until this and all other holds are released."""
        hold = Hold(self)
        with self._lock:
            self._holds.add(hold)
        return hold

    def release(self, hold: Hold) -> None:
        """Take a claim back, and close what was opened if it was the last; see ``Hold``."""
        with self._lock:
            if hold not in self._holds:
                return
            self._holds.discard(hold)
            if self._holds:
                return
            siblings, self._siblings = list(self._siblings.values()), {}
            corpus, self._corpus = self._corpus, self._lent_corpus
            if self._lent_corpus is None and self._lent_engine is None:
                with _registry_lock:
                    _open_corpora.pop(self.settings, None)
        for sibling in siblings:
            sibling.release()
        if corpus is not None and corpus is not self._lent_corpus:
            corpus.close()
            if corpus.engine is not self._lent_engine:
                corpus.engine.close()

    @property
    def is_open(self) -> bool:
        """Whether the model is in memory."""
        return self._corpus is not None

    @property
    def is_described(self) -> bool:
        """Whether tokenizer and window are known without reading a file."""
        is_read = self._chat_format is not None and self._max_position is not None
        return self._engine_at_hand is not None or is_read

    @property
    def model_name(self) -> str:
        """What the model is called; does not open it."""
        engine = self._engine_at_hand
        return engine.loaded.name if engine else self.settings.model

    @property
    def _engine_at_hand(self) -> PromptCache | None:
        """The engine, where it is open already."""
        corpus = self._corpus
        return self._lent_engine if corpus is None else corpus.engine

    @property
    def corpus(self) -> Corpus:
        """The corpus; opens it.

        Raises:
            ModelError: The model cannot be loaded.
            StoreError: The store cannot be opened.
        """
        if self._corpus is None:
            with self._lock:
                if self._corpus is None:
                    self._corpus = self._open()
        return self._corpus

    @property
    def engine(self) -> PromptCache:
        """The engine of the corpus; opens it."""
        return self.corpus.engine

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer, without loading weights for it."""
        if (engine := self._engine_at_hand) is not None:
            return engine.loaded.tokenizer
        if self._tokenizer is None:
            settings = self.settings
            self._tokenizer = load_tokenizer(settings.model, chat_template=settings.chat_template)
        return self._tokenizer

    @property
    def chat_format(self) -> ChatFormat:
        """How the model writes conversations, without loading weights for it."""
        if (engine := self._engine_at_hand) is not None:
            return engine.chat_format
        if self._chat_format is None:  # kept: finding out what a template knows takes renderings
            self._chat_format = ChatFormat(self.tokenizer)
        return self._chat_format

    @property
    def max_position(self) -> int:
        """Position IDs that a prompt and its answer may use, without loading weights for it."""
        if (engine := self._engine_at_hand) is not None:
            return engine.max_position
        if self._max_position is None:
            self._max_position = load_max_position(
                self.settings.model, max_position=self.settings.max_position
            )
        return min(self._max_position, self.settings.config.context_limit or self._max_position)

    @property
    def learning(self) -> Future[int] | None:
        """The encoding behind another prefix that a call began last; ``None`` if none did."""
        return self._learning

    def stream(self, call: Call) -> ReplyStream:
        """Run a call; its prefill starts at the first ``next``.

        Raises:
            PromptError: The prompt is empty, or its roles are refused by the chat template.
            LayoutError: It does not fit the model's context.
            UnsupportedModelError: It has tools, and the chat template knows none, or writes calls
                otherwise than as JSON.
            ConfigError: A tool must be called that is not given.
        """
        chat_format = self.engine.chat_format
        tools = call.tools
        tool_format = chat_format.require_tool_format() if tools else None
        stream = self.corpus.stream_prompt(
            call.shown_prompt(),
            call.held_config(tool_format),
            reuse=call.reuse,
            template=call.template,
        )
        parser = None
        if tool_format is not None:
            parser = ToolCallParser(tool_format, tools, make_id=new_call_id)
        return ReplyStream(
            stream,
            model_name=self.model_name,
            parser=parser,
            max_tool_calls=call.max_tool_calls,
            timeout_seconds=call.timeout_seconds,
            on_end=(lambda reply: self._learn_from(call, reply)) if call.learn_prefix else None,
        )

    def sibling(self, model: str) -> Host:
        """The host of another model with the same settings otherwise; opened once, then kept.

        Its entries lie in the same store, where no model is served another's.

        Raises:
            ConfigError: The corpus was given, so that there are no settings to open another with.
        """
        if model in {self.model_name, self.settings.model}:
            return self
        if self._lent_corpus is not None or self._lent_engine is not None:
            raise ConfigError(
                f"model {model!r} is not the model of the engine or corpus that was given, which "
                f"is {self.model_name!r}; give a model name instead, so that others can be opened"
            )
        with self._lock:
            if model not in self._siblings:
                self._siblings[model] = open_host(replace(self.settings, model=model)).hold()
            return self._siblings[model].host

    def _open(self) -> Corpus:
        """Open what was not lent. The lock is held."""
        settings = self.settings
        root = None if settings.store is None else Path(settings.store).expanduser()
        if self._lent_engine is not None:
            return Corpus(self._lent_engine, has_retrieval=False)
        with _registry_lock:
            # That of a host which is gone, but whose corpus somebody still uses.
            corpus = _open_corpora.get(settings)
        if corpus is None:
            loaded = load_model(
                settings.model,
                dtype=settings.dtype,
                device=settings.device,
                chat_template=settings.chat_template,
                max_position=settings.max_position,
            )
            engine = PromptCache.from_pretrained(
                loaded, store=None if root is None else root / _ENTRIES, config=settings.config
            )
            corpus = Corpus(engine, root, has_retrieval=False)
            with _registry_lock:
                _open_corpora[settings] = corpus
        return corpus

    def _learn_from(self, call: Call, reply: Reply) -> None:
        uses = reply.completion.metrics.modules
        if any(use.miss_reason in _BEHIND_ANOTHER_PREFIX for use in uses):
            try:
                self._learning = self.corpus.learn_prefix(call.shown_prompt()) or self._learning
            except (PromptCacheError, OSError) as error:  # the answer is there all the same
                failed: Future[int] = Future()
                failed.set_exception(error)
                self._learning = failed


_hosts: WeakValueDictionary[HostSettings, Host] = WeakValueDictionary()
_open_corpora: WeakValueDictionary[HostSettings, Corpus] = WeakValueDictionary()
"""What hosts have opened; a corpus may be used longer than the host that opened it."""
_registry_lock = threading.Lock()


def open_host(settings: HostSettings | PromptCache | Corpus) -> Host:
    """The host of some settings, shared by all who hold it: a model is loaded once a process.

    Args:
        settings: What to open; or an engine or a corpus that is open, which is lent.
    """
    if isinstance(settings, Corpus):
        return Host(_settings_of(settings.engine), corpus=settings)
    if isinstance(settings, PromptCache):
        return Host(_settings_of(settings), engine=settings)
    with _registry_lock:
        host = _hosts.get(settings)
        if host is None:
            host = _hosts[settings] = Host(settings)
        return host


def _settings_of(engine: PromptCache) -> HostSettings:
    return HostSettings(model=engine.loaded.name, config=engine.config)
