"""The facade: one model, one store, and the prompts that are run on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from pc_rag.config import AUTO, EngineConfig
from pc_rag.engine.batch import DEFAULT_BATCH_SIZE, Batch
from pc_rag.engine.ending import Endings
from pc_rag.engine.entry_source import EntrySource
from pc_rag.engine.generation import Generation
from pc_rag.engine.machinery import Machinery
from pc_rag.engine.prefetch import Prefetcher
from pc_rag.engine.prompts import PromptPlanner
from pc_rag.engine.request import Request
from pc_rag.engine.schemas import SchemaRegistry
from pc_rag.engine.stream import CompletionStream
from pc_rag.errors import ConfigError
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.prefix_tree import PrefixTree
from pc_rag.kv.tiered_store import TieredStore
from pc_rag.metrics import CacheStats, Phase, PrefillRate, Stopwatch
from pc_rag.model.answer_memory import AnswerMemory
from pc_rag.model.chat import ChatFormat
from pc_rag.model.detection.detect import runner_of
from pc_rag.model.grammar_compiler import GrammarCompiler
from pc_rag.model.loading import as_loaded
from pc_rag.model.sampling import GenerationConfig
from pc_rag.model.template_encoder import TemplateEncoder
from pc_rag.types import StorageDtype

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from pc_rag.engine.completion import Completion
    from pc_rag.engine.prompts import PromptLike
    from pc_rag.kv.base import KVStore
    from pc_rag.kv.key import EntryAddress, VisibilityContext
    from pc_rag.layout.schema_layout import SchemaLayout
    from pc_rag.model.loading import LoadedModel
    from pc_rag.pml import Schema
    from pc_rag.types import TokenIds


class PromptCache:
    """Generates text from prompts whose parts were computed before.

    Thread-safe: requests of several threads interleave, and each gives the text it would give
    alone. A context manager; ``close`` releases the store that it opened.

    Args:
        loaded: The model.
        store: Where entries are kept. Lent: closing the engine leaves it open.
        config: Everything else; see ``EngineConfig``.

    Attributes:
        loaded: The model with its tokenizer and fingerprint.
        config: As given.
        store: As given.
        runner: Runs the model.
        source: Gives entries, encoding what the store lacks.
        chat_format: Renders conversations by the model's own template.
    """

    def __init__(
        self, loaded: LoadedModel, store: KVStore, config: EngineConfig | None = None
    ) -> None:
        self.loaded = loaded
        self.config = config = config or EngineConfig()
        self.store = store
        self._owns_store = False
        self.runner = runner = runner_of(loaded.model, loaded.detection)
        rate, limit = PrefillRate(), loaded.max_position
        self.source = EntrySource(
            store, runner, rate=rate, keeps_siblings=config.keep_siblings, max_position=limit
        )
        storage_dtype = _storage_dtype(config, loaded.dtype)
        answers = AnswerMemory()
        self.chat_format = ChatFormat(loaded.tokenizer, answers=answers)
        self.prefix_tree = PrefixTree(config.prefix_cache_bytes)
        self.max_position = min(limit, config.context_limit or limit)
        self._machinery = Machinery(
            config=config,
            loaded=loaded,
            runner=self.runner,
            source=self.source,
            prefetcher=Prefetcher(
                store,
                bytes_per_token=self.runner.shape.bytes_per_token(getattr(torch, storage_dtype)),
                warms_siblings=config.prefetch_siblings,
            ),
            text_encoder=TemplateEncoder(loaded.tokenizer),
            grammars=GrammarCompiler(loaded.tokenizer),
            prefix_tree=self.prefix_tree if config.prefix_cache_bytes else None,
            answers=answers,
            stats=CacheStats(),
            endings=Endings(),
            prefill_rate=rate,
            storage_dtype=storage_dtype,
            max_position=self.max_position,
        )
        self._schemas = SchemaRegistry(self._machinery)
        self._prompts = PromptPlanner(loaded.tokenizer, self.chat_format, self._schemas)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | LoadedModel = "smollm2",
        *,
        store: str | Path | KVStore | None = None,
        config: EngineConfig | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "auto",
        chat_template: str | None = None,
        max_position: int | None = None,
    ) -> Self:
        """Load a model and open a store.

        Args:
            model: Hub name, local folder, ``.gguf`` file, ``"smollm2"``, or a loaded model.
            store: Folder for entries that outlive the process; a store of your own; or ``None``
                to keep entries in memory only.
            config: Capacities and policies.
            dtype: Compute dtype; ``"auto"`` is bfloat16 on CUDA and float32 on CPU.
            device: Where the model runs; ``"auto"`` takes CUDA where it is there.
            chat_template: Jinja source that takes the place of the model's own chat template.
            max_position: Position IDs that requests may use; see ``load_model``.

        Raises:
            ModelError: The model cannot be loaded or is not supported.
            ConfigError: A chat template that is not Jinja, too many position IDs, or either of
                them for a model that is loaded.
            StoreError: The store cannot be opened.
        """
        config = config or EngineConfig()
        loaded = as_loaded(
            model, dtype=dtype, device=device, chat_template=chat_template,
            max_position=max_position,
        )  # fmt: skip
        is_lent = not (store is None or isinstance(store, (str, Path)))
        if store is None:
            store = MemoryTier(config.memory_bytes)
        elif isinstance(store, (str, Path)):
            store = TieredStore(
                [MemoryTier(config.memory_bytes), DiskTier(Path(store), config.disk_bytes)]
            )
        engine = cls(loaded, store, config)
        engine._owns_store = not is_lent
        return engine

    def add_schema(
        self, schema: Schema | Path | str, *, src_root: Path | str | None = None
    ) -> SchemaLayout:
        """Take in a schema: lay it out and encode every module that is not stored yet.

        Args:
            schema: A parsed schema, a file of PML, or PML itself.
            src_root: Folder below which ``src`` attributes name files; without one they are
                refused. Of no use to a parsed schema, whose files have been read.

        Returns:
            Where its modules lie. A later schema of the same name takes its place.

        Raises:
            PMLError: The document is not a valid schema, or a text of a parameter has more tokens
                than it reserves; all problems at once.
            LayoutError: The schema reserves more position IDs than the model has.
            ModelError: A parameter needs the token of a space, and the tokenizer drops spaces.
            StoreFull: The store has no room for its modules.
        """
        self._machinery.endings.do_deferred()  # what they lease has to stay in the store
        return self._schemas.add(schema, src_root=src_root)

    def prefetch(self, schema: str, paths: Collection[str] | None = None) -> Future[int]:
        """Announce the use of a schema: bring its entries into the nearest tier, in the background.

        For stores of several tiers. One thread works, an entry at a time, and computes nothing:
        what no tier holds is passed over. It ends where the nearest tier holds no more of them at
        once. Equal calls are done as one while they wait; each has a future of its own. Of more
        than 32 that wait the oldest are cancelled, and so are all when the engine is closed or the
        process ends. Entries brought near count as hits of the store, and as just used.

        Args:
            schema: Name of a schema that was added.
            paths: Modules by dotted path, such as ``"budget.small"``. Brought near are all that
                they hold and what they attend, in the order of the schema. ``None`` for all
                modules.

        Returns:
            Resolves to the number of entries that came from a lower tier, or to the error that
            ended it.

        Raises:
            PromptError: No schema of that name was added, or it has no such modules.
            StoreError: The engine is closed, or the process ends.
        """
        return self._machinery.prefetcher.prefetch(self._schemas.addresses(schema, paths))

    def generate(
        self,
        prompt: PromptLike | Request,
        config: GenerationConfig | None = None,
        *,
        reuse: bool | None = None,
        template: str | None = None,
    ) -> Completion:
        """Run a prompt to its end; see ``stream``."""
        stream = self.stream(prompt, config, reuse=reuse, template=template)
        with stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: PromptLike | Request,
        config: GenerationConfig | None = None,
        *,
        reuse: bool | None = None,
        template: str | None = None,
    ) -> CompletionStream:
        """Run a prompt, giving text as it comes.

        Args:
            prompt: Plain text, a conversation, a parsed PML prompt of a schema that was added, or
                a request that was planned elsewhere. Cache points of a conversation are passed
                over here: only a ``Corpus`` knows when what it keeps for them expires.
            config: How to choose tokens and when to stop; greedy by default.
            reuse: ``False`` runs the uncached arm: the same tokens at the same positions, all of
                them computed. ``None`` does as the engine's configuration says.
            template: Label in the metrics; by default the schema's name, ``"chat"``, ``"text"``, or
                what the request says.

        Raises:
            PromptError: The prompt is empty or does not fit its schema.
            LayoutError: The prompt does not fit the model's context.
            ConfigError: The grammar is refused.
            MissingDependencyError: There is a grammar, and llguidance is not installed.
        """
        watch = self.start_watch()
        with watch.measure(Phase.PLAN):
            request = prompt if isinstance(prompt, Request) else self.plan(prompt)
        return self.run(request, config, watch=watch, reuse=reuse, template=template)

    def run(
        self,
        request: Request,
        config: GenerationConfig | None = None,
        *,
        watch: Stopwatch,
        reuse: bool | None = None,
        template: str | None = None,
    ) -> CompletionStream:
        """Run a planned request on a clock that its planner started; see ``stream``."""
        self._machinery.endings.do_deferred()
        if template is not None:
            request = replace(request, template=template)
        generation = Generation(
            self._machinery,
            request,
            config or GenerationConfig(),
            watch=watch,
            reuse=self.config.reuse if reuse is None else reuse,
        )
        return CompletionStream(generation)

    def generate_batch(
        self,
        prompts: Sequence[PromptLike | Request],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        reuse: bool | None = None,
        share: bool = True,
        max_batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> list[Completion]:
        """Run several prompts side by side; each gets the answer that ``generate`` would give it.

        The model's weights are read once per token of all of them, and a module that several of
        them import once for all: it is kept in memory once, too, and never copied. The exact
        prefix cache is neither read nor fed.

        Args:
            prompts: As for ``stream``, each. Put those that share modules next to each other.
            config: How to choose tokens and when to stop: for all, or one for each prompt.
            reuse: As for ``stream``.
            share: ``False`` copies modules for every prompt.
            max_batch_size: Most prompts side by side; more are run group by group.

        Returns:
            A completion for each prompt, in their order.

        Raises:
            PromptError: Prompts are refused, before anything is computed; each is named by its
                index.
            LayoutError: The same, where none of those fits the model's context.
            ConfigError: The same, where all of their grammars are refused; or there is not one
                configuration for each prompt, or ``max_batch_size`` is below 1.
            MissingDependencyError: There is a grammar, and llguidance is not installed.
        """
        return self.prepare_batch(
            prompts, config, reuse=reuse, share=share, max_batch_size=max_batch_size
        ).run()

    def prepare_batch(
        self,
        prompts: Sequence[PromptLike | Request],
        config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        reuse: bool | None = None,
        share: bool = True,
        max_batch_size: int = DEFAULT_BATCH_SIZE,
    ) -> Batch:
        """Plan what ``generate_batch`` runs, and compute nothing yet; it tells its memory, too."""
        return Batch(
            self._machinery,
            prompts,
            config,
            plan=self.plan,
            watch=self.start_watch(),
            reuse=self.config.reuse if reuse is None else reuse,
            share=share,
            max_batch_size=max_batch_size,
        )

    def plan(self, prompt: PromptLike) -> Request:
        """Decide what of a prompt is cached and what is computed; computes nothing itself.

        Raises:
            PromptError: The prompt is empty, names no schema that was added, or does not fit it.
            LayoutError: It does not fit the model's context.
        """
        return self._prompts.plan(prompt)

    def start_watch(self) -> Stopwatch:
        """A clock for a request that starts now."""
        synchronize = None
        if self.config.synchronize_timings and self.runner.device.type == "cuda":
            synchronize = torch.cuda.synchronize
        return Stopwatch(synchronize=synchronize)

    def address(
        self, token_ids: TokenIds, *, start: int, context: VisibilityContext
    ) -> EntryAddress:
        """The address of an entry of this engine's model, dtype and tenant."""
        return self._machinery.address(token_ids, start=start, context=context)

    @property
    def stats(self) -> CacheStats:
        """Metrics of all requests; streams that nobody holds any more are counted as cancelled."""
        self._machinery.endings.do_deferred()
        return self._machinery.stats

    @property
    def storage_dtype(self) -> StorageDtype:
        """Numeric type of this engine's entries."""
        return self._machinery.storage_dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV as stored: 2 · layers · kv_heads · head_dim · bytes a number."""
        return self.runner.shape.bytes_per_token(getattr(torch, self.storage_dtype))

    def close(self) -> None:
        """End what is prefetched, and release the store, if this engine opened it. Idempotent."""
        self._machinery.prefetcher.close()
        self._machinery.endings.do_deferred()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _storage_dtype(config: EngineConfig, compute: torch.dtype) -> StorageDtype:
    if config.storage_dtype == AUTO:
        name = str(compute).removeprefix("torch.")
        if name not in set(StorageDtype):
            raise ConfigError(
                f"entries cannot be stored as {name}; load the model in one of "
                f"{', '.join(StorageDtype)}, or set storage_dtype to one of them"
            )
        return StorageDtype(name)
    return StorageDtype(config.storage_dtype)
