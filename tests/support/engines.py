"""Engines over tiny models, requests over chunks, and stores that count or fail."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pc_rag.engine import EntryRecipe, PromptCache, Request
from pc_rag.errors import StoreFull, StoreIOError
from pc_rag.kv.key import VisibilityContext
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.layout.corpus_plan import EntryPiece, TextPiece, plan_chunks
from pc_rag.layout.plan import Cached, Fresh, RequestPlan
from pc_rag.layout.repair import apply_repair, parse_repair
from pc_rag.model.loading import wrap_model
from pc_rag.types import PositionPolicy, Span, Visibility
from tests.support.reference import Module, assembled_logits
from tests.support.tiny_models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch

    from pc_rag.config import EngineConfig
    from pc_rag.kv.base import KVStore, Lease, LookupResult, StoreStats
    from pc_rag.kv.entry import Entry
    from pc_rag.kv.key import EntryAddress
    from pc_rag.layout.corpus_plan import Piece
    from pc_rag.types import MissReason, ModuleKey

PREFIX = "Answer from these texts.\n"
CHUNKS = {
    "a": "The cat sat on the mat and looked at the moon.",
    "b": "Rain fell on the hills all night.",
    "c": "Nobody had opened the old green door for years, it was said.",
}
QUESTION = "\nWho sat?"
PREFIX_LABEL = "prefix"


def tiny_engine(
    family: str = "llama",
    *,
    seed: int = 0,
    store: KVStore | Path | None = None,
    config: EngineConfig | None = None,
    only_ascii: bool = False,
    **options: Any,
) -> PromptCache:
    """An engine over a tiny random model.

    Args:
        family: As for ``tiny_model``.
        seed: Of the weights.
        store: As for ``PromptCache.from_pretrained``.
        config: Likewise.
        only_ascii: The model generates printable ASCII only, so that its answers are plain text.
        options: Of ``tiny_model``.
    """
    model, tokenizer = tiny_model(family, seed=seed, **({"num_hidden_layers": 2} | options))
    if only_ascii:
        speak_ascii(model)
    return PromptCache.from_pretrained(wrap_model(model, tokenizer), store=store, config=config)


def speak_ascii(model: Any) -> None:
    """Give every token but printable ASCII a logit of 0, which the best of the others exceeds."""
    head = model.get_output_embeddings().weight.data
    head[:0x20] = 0
    head[0x7F:] = 0


def chunk_request(
    engine: PromptCache,
    labels: Sequence[str],
    *,
    question: str = QUESTION,
    prefix: str = PREFIX,
    separator: str = "\n",
    repair: str = "none",
    policy: PositionPolicy = PositionPolicy.PACKED,
    slot_tokens: int | None = None,
    template: str = "chunks",
) -> Request:
    """A prompt of the prefix, the named chunks with a separator behind each, and the question."""
    encode = engine.loaded.tokenizer.encode_text
    recipes: dict[ModuleKey, EntryRecipe] = {}
    pieces: list[Piece] = []
    context, keys = VisibilityContext.module(), ()
    prefix_ids = encode(prefix)
    if prefix_ids:
        address = engine.address(prefix_ids, start=0, context=context)
        recipes[address.key] = EntryRecipe(address)
        pieces.append(_piece(PREFIX_LABEL, address, is_prefix=True))
        context = VisibilityContext.of(Visibility.PREFIX, prefix_ids, range(len(prefix_ids)))
        keys = (address.key,)
    for label in labels:
        address = engine.address(encode(CHUNKS[label]), start=len(prefix_ids), context=context)
        recipes[address.key] = EntryRecipe(address, keys)
        pieces += [_piece(label, address), TextPiece(encode(separator))]
    pieces.append(TextPiece(encode(question)))
    plan = plan_chunks(pieces, policy=policy, slot_tokens=slot_tokens)
    plan = apply_repair(
        plan, parse_repair(repair), lambda part: isinstance(part, Cached) and part.label in CHUNKS
    )
    return Request(plan=plan, recipes=recipes, template=template)


def _piece(label: str, address: EntryAddress, *, is_prefix: bool = False) -> EntryPiece:
    return EntryPiece(
        label=label,
        key=address.key,
        token_ids=address.token_ids,
        encoded_start=address.start,
        context_is_prefix=True,
        is_prefix=is_prefix,
    )


@contextmanager
def scripted(
    engine: PromptCache, answer: str | Sequence[int], *, fail_at: int = -1
) -> Iterator[None]:
    """Let the model choose the ids of ``answer`` one after the other, then end the sequence.

    Args:
        engine: Whose model; one generation at a time.
        answer: Text, of which every byte is a token, or ids.
        fail_at: The forward pass with logits that raises ``ZeroDivisionError``, counted from 0.
    """
    ids = [*(answer.encode() if isinstance(answer, str) else answer), 259]
    num_calls = 0

    def speak(_module: Any, _args: Any, output: Any) -> Any:
        nonlocal num_calls
        if num_calls == fail_at:
            message = "the model failed"
            raise ZeroDivisionError(message)
        output.logits.zero_()[..., ids[num_calls]] = 1.0
        num_calls += 1
        return output

    handle = engine.loaded.model.register_forward_hook(speak)
    try:
        yield
    finally:
        handle.remove()


def reference_ids(engine: PromptCache, request: Request, num_tokens: int) -> tuple[int, ...]:
    """Greedy tokens behind a request up to the end of its text, by the slow reference."""
    modules = {
        key: Module(
            recipe.address.token_ids,
            recipe.address.start,
            tuple(i for k in recipe.context for i in request.recipes[k].address.token_ids),
            tuple(i for k in recipe.context for i in _positions(request.recipes[k])),
        )
        for key, recipe in request.recipes.items()
    }
    parts, generated = request.plan.parts, []
    for _ in range(num_tokens):
        plan = RequestPlan(parts)
        logits = assembled_logits(engine.loaded.model, plan, modules)
        token_id = int(logits.argmax())
        if token_id in engine.loaded.tokenizer.eos_ids:
            break
        generated.append(token_id)
        next_part = Fresh(token_ids=(token_id,), span=Span(plan.end, plan.end + 1))
        parts = (*parts, next_part)
    return tuple(generated)


def _positions(recipe: EntryRecipe) -> range:
    span = recipe.address.span
    return range(span.start, span.end)


def ingest(engine: PromptCache, request: Request) -> None:
    """Encode and store every entry of a request."""
    for _ in engine.source.encode(list(request.recipes), request.recipes):
        pass


def stored_bytes(engine: PromptCache, request: Request) -> dict[str, tuple[torch.Tensor, ...]]:
    """Copies of the stored keys and values of a request's entries."""
    found = {}
    for key, recipe in request.recipes.items():
        with engine.store.lease(recipe.address, engine.runner.device) as lease:
            found[key] = (lease.entry.keys.clone(), lease.entry.values.clone())
    return found


def misses(metrics: Any) -> dict[str, MissReason | None]:
    """By label: why each module was missed; ``None`` of a hit without a remark."""
    return {use.label: use.miss_reason for use in metrics.modules}


@dataclass
class SpyStore:
    """A memory store that counts what is asked of it, knows open leases, and fails on request.

    Attributes:
        calls: How often each method was called.
        num_leased: Leases that were not given back.
        broken: Methods that raise ``StoreIOError``.
        is_full: Whether ``put`` raises ``StoreFull``.
        errors: Errors that ``lease`` raises, by key.
    """

    inner: KVStore = field(default_factory=lambda: MemoryTier(1 << 30))
    calls: Counter[str] = field(default_factory=Counter)
    num_leased: int = 0
    broken: set[str] = field(default_factory=set)
    is_full: bool = False
    errors: dict[str, Exception] = field(default_factory=dict)

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.broken:
            message = f"the medium failed at {name}"
            raise StoreIOError(message)

    @property
    def generation(self) -> str:
        return self.inner.generation

    def is_stored(self, address: EntryAddress) -> bool:
        self._count("lookup")
        return self.inner.is_stored(address)

    def starts(self, address: EntryAddress) -> tuple[int, ...]:
        return self.inner.starts(address)

    def lookup(self, address: EntryAddress) -> LookupResult:
        self._count("lookup")
        return self.inner.lookup(address)

    def lease(self, address: EntryAddress, device: torch.device) -> Lease:
        self._count("lease")
        if address.key in self.errors:
            raise self.errors[address.key]
        lease = self.inner.lease(address, device)
        self.num_leased += 1
        give_back = lease.release
        is_open = True

        def release() -> None:
            nonlocal is_open
            self.num_leased -= is_open
            is_open = False
            give_back()

        return _SpiedLease(lease, release)

    def put(self, entry: Entry, *, pinned: bool = False) -> None:
        self._count("put")
        if self.is_full:
            message = "no room"
            raise StoreFull(message)
        self.inner.put(entry, pinned=pinned)

    def pin(self, key: ModuleKey, *, pinned: bool = True) -> bool:
        return self.inner.pin(key, pinned=pinned)

    def touch(self, key: ModuleKey) -> None:
        self.inner.touch(key)

    def remove(self, key: ModuleKey) -> bool:
        return self.inner.remove(key)

    def stats(self) -> tuple[StoreStats, ...]:
        return self.inner.stats()

    def check_integrity(self) -> Any:
        return self.inner.check_integrity()

    def close(self) -> None:
        self.inner.close()


class _SpiedLease:
    """A lease that tells when it is given back."""

    def __init__(self, lease: Lease, release: Any) -> None:
        self.entry = lease.entry
        self.tier = lease.tier
        self.load_seconds = lease.load_seconds
        self.release = release

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
