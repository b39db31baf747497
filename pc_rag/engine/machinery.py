"""What the requests and schemas of one engine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.engine.anchoring import anchored
from pc_rag.kv.key import EntryAddress
from pc_rag.types import Placement

if TYPE_CHECKING:
    from pc_rag.config import EngineConfig
    from pc_rag.engine.ending import Endings
    from pc_rag.engine.entry_source import EntrySource
    from pc_rag.engine.prefetch import Prefetcher
    from pc_rag.engine.request import Request
    from pc_rag.kv.key import VisibilityContext
    from pc_rag.kv.prefix_tree import PrefixTree
    from pc_rag.metrics import CacheStats, PrefillRate
    from pc_rag.model.answer_memory import AnswerMemory
    from pc_rag.model.grammar_compiler import GrammarCompiler
    from pc_rag.model.loading import LoadedModel
    from pc_rag.model.runner import Runner
    from pc_rag.model.template_encoder import TemplateEncoder
    from pc_rag.types import StorageDtype, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """The parts of one engine.

    Attributes:
        config: Capacities and policies.
        loaded: The model with its tokenizer.
        runner: Runs it.
        source: Gives entries.
        prefetcher: Brings entries near before they are asked for.
        text_encoder: Tokens of text and of the chat template's role markers.
        grammars: Compiles the grammars of requests.
        prefix_tree: The exact prefix cache; ``None`` where it is switched off.
        answers: What the model has generated, to be known again in a conversation.
        stats: Takes the metrics.
        endings: Ends the generations.
        prefill_rate: Learns how fast the model prefills.
        storage_dtype: Numeric type of entries.
        max_position: Position IDs that a request may use.
    """

    config: EngineConfig
    loaded: LoadedModel
    runner: Runner
    source: EntrySource
    prefetcher: Prefetcher
    text_encoder: TemplateEncoder
    grammars: GrammarCompiler
    prefix_tree: PrefixTree | None
    answers: AnswerMemory
    stats: CacheStats
    endings: Endings
    prefill_rate: PrefillRate
    storage_dtype: StorageDtype
    max_position: int

    @property
    def namespace(self) -> str:
        """Where this engine's runs lie in a prefix cache."""
        return f"{self.loaded.fingerprint}:{self.config.tenant}"

    @property
    def placement(self) -> Placement:
        """Where an entry of this model can stand."""
        return self.runner.positions.placement

    def placeable(self, request: Request) -> Request:
        """A request of which every entry can stand where the plan puts it; see ``anchored``."""
        if self.placement is not Placement.FIXED:
            return request
        return anchored(request, max_position=self.loaded.max_position)

    def address(
        self, token_ids: TokenIds, *, start: int, context: VisibilityContext
    ) -> EntryAddress:
        """The address of an entry of this model, dtype and tenant."""
        return EntryAddress(
            fingerprint=self.loaded.fingerprint,
            token_ids=token_ids,
            context=context,
            start=start,
            dtype=self.storage_dtype,
            tenant=self.config.tenant,
        )
