"""What one request cost: seconds by phase, tokens by kind, and what became of every module."""

from __future__ import annotations

import math
from collections.abc import Mapping  # noqa: TC003 - `typing.get_type_hints` resolves the fields
from dataclasses import dataclass, field
from typing import Self

from pc_rag.errors import PromptCacheError
from pc_rag.metrics.export import Plain, plain_fields, to_plain
from pc_rag.metrics.reading import Reader
from pc_rag.types import FinishReason, HitKind, MissReason, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUse:
    """What became of one module, or chunk, of a request.

    Attributes:
        label: Name of the module or id of the chunk.
        num_tokens: Tokens of it in the prompt.
        hit_kind: How it was served from the store; ``None`` on a miss.
        tier: The tier its bytes came from; ``None`` on a miss.
        miss_reason: Why it was not served, or not served better: a miss always has one, and a hit
            may (placed from behind another prefix, or only in part).
        num_encoded_tokens: Tokens read from an entry that this very request encoded after the
            miss; 0 on a hit, and on a miss that was computed as fresh tokens.

    Raises:
        PromptCacheError: A miss without reason or with a tier, or counts that contradict.
    """

    label: str
    num_tokens: int
    hit_kind: HitKind | None = None
    tier: Tier | None = None
    miss_reason: MissReason | None = None
    num_encoded_tokens: int = 0

    def __post_init__(self) -> None:
        where = f"module {self.label!r}"
        _check_counts(where, num_tokens=self.num_tokens, num_encoded_tokens=self.num_encoded_tokens)
        if self.num_encoded_tokens > self.num_tokens:
            raise PromptCacheError(
                f"{where}: {self.num_encoded_tokens} encoded tokens of {self.num_tokens}"
            )
        if self.is_hit:
            if self.num_encoded_tokens:
                raise PromptCacheError(
                    f"{where}: a hit encodes nothing, but {self.num_encoded_tokens} tokens were"
                )
        elif self.miss_reason is None or self.tier is not None:
            raise PromptCacheError(
                f"{where}: a miss needs a reason and has no tier; got reason {self.miss_reason} "
                f"and tier {self.tier}"
            )

    @property
    def is_hit(self) -> bool:
        """Whether an entry stored before this request served it."""
        return self.hit_kind is not None

    @classmethod
    def from_dict(cls, plain: object, *, where: str = "a module's use") -> Self:
        """The inverse of its dictionary in ``RequestMetrics.to_dict``; unknown keys are ignored.

        Args:
            plain: The dictionary.
            where: What it is a part of, for messages.

        Raises:
            PromptCacheError: A key is missing or malformed, which the message names; or the values
                contradict each other.
        """
        reader = Reader(plain, where)
        return cls(
            label=reader.text("label"),
            num_tokens=reader.whole("num_tokens"),
            hit_kind=reader.optional_kind("hit_kind", HitKind),
            tier=reader.optional_kind("tier", Tier),
            miss_reason=reader.optional_kind("miss_reason", MissReason),
            num_encoded_tokens=reader.whole("num_encoded_tokens"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """The numbers of one request.

    Every token of the prompt is counted once:

        prompt_tokens = num_cached_tokens + num_repaired_tokens + num_fresh_tokens

    so ``num_fresh_tokens`` leaves out the repaired ones, although they too are computed in the
    same forward pass. Of the cached tokens, some came from the exact prefix cache and some from
    entries that had to be encoded first; the rest were read from entries stored before:

        num_cached_tokens = num_reused_tokens + num_cache_creation_tokens + (stored before)

    Attributes:
        prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Tokens whose KV was read from an entry or reused by the exact prefix
            cache.
        num_reused_tokens: Those of them that the exact prefix cache held.
        num_repaired_tokens: Stored tokens that were recomputed.
        num_fresh_tokens: All others: the request's own text, the tails of chunks that were split,
            and stored text computed for lack of an entry or because reuse was off.
        num_generated_tokens: Tokens generated, the first included.
        ttft_seconds: From the call to the first token in the caller's hands; ``None`` when there
            was none.
        retrieve_seconds: Embedding the question and searching the corpus.
        plan_seconds: Text or PML to a plan.
        lookup_seconds: Asking the store which entries it holds.
        load_seconds: Bringing entries to the device, by the tier they came from.
        encode_seconds: Encoding, in this call, of what the store missed.
        assemble_seconds: Filling the request's buffer.
        prefill_seconds: The forward pass over fresh and repaired tokens.
        first_token_seconds: Sampling the first token and turning it into text.
        decode_seconds: Computing the tokens behind the first; the time that a consumer keeps a
            stream waiting is not in it.
        held_back_seconds: The part of ``decode_seconds`` that lies before the first text: a first
            token that was half a character, or might have begun a stop string.
        num_decode_steps: Forward passes in ``decode_seconds``, the one that gave the
            end-of-sequence token included; by default one fewer than tokens generated.
        modules: What became of every module, in prompt order.
        template: Label of the schema or corpus the prompt was made from.
        tenant: The engine's tenant.
        finish_reason: Why generation ended.
        prefill_tokens_per_second: How fast the engine's model was known to prefill when the
            request ended (``PrefillRate``); ``None`` where it was not known yet.

    Raises:
        PromptCacheError: Numbers are negative, not finite, or do not add up.
    """

    prompt_tokens: int
    num_cached_tokens: int
    num_fresh_tokens: int
    finish_reason: FinishReason
    num_reused_tokens: int = 0
    num_repaired_tokens: int = 0
    num_generated_tokens: int = 0
    ttft_seconds: float | None = None
    retrieve_seconds: float = 0.0
    plan_seconds: float = 0.0
    lookup_seconds: float = 0.0
    load_seconds: Mapping[Tier, float] = field(default_factory=dict, hash=False)
    encode_seconds: float = 0.0
    assemble_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    held_back_seconds: float = 0.0
    num_decode_steps: int | None = None
    modules: tuple[ModuleUse, ...] = ()
    template: str = ""
    tenant: str = ""
    prefill_tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "load_seconds", dict(self.load_seconds))
        where = f"metrics of a request of template {self.template!r}"
        _check_counts(
            where,
            prompt_tokens=self.prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_reused_tokens=self.num_reused_tokens,
            num_repaired_tokens=self.num_repaired_tokens,
            num_fresh_tokens=self.num_fresh_tokens,
            num_generated_tokens=self.num_generated_tokens,
        )
        _check_seconds(
            where,
            {
                "ttft": 0.0 if self.ttft_seconds is None else self.ttft_seconds,
                "decode": self.decode_seconds,
                **self._parts(),
            },
        )
        rate = self.prefill_tokens_per_second
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise PromptCacheError(
                f"{where}: prefill_tokens_per_second is {rate}; a rate is finite and above 0, and "
                "None where it is unknown"
            )
        parts = (self.num_cached_tokens, self.num_repaired_tokens, self.num_fresh_tokens)
        if self.prompt_tokens != sum(parts):
            raise PromptCacheError(
                f"{where}: prompt_tokens is {self.prompt_tokens}, but cached + repaired + fresh is "
                f"{' + '.join(map(str, parts))} = {sum(parts)}; count every token once"
            )
        inside = self.num_reused_tokens + self.num_cache_creation_tokens
        if inside > self.num_cached_tokens:
            raise PromptCacheError(
                f"{where}: {self.num_reused_tokens} reused and {self.num_cache_creation_tokens} "
                f"encoded tokens are more than the {self.num_cached_tokens} cached ones"
            )

    def _parts(self) -> dict[str, float]:
        """The parts of ``ttft_seconds`` by name, one for each tier that was loaded from."""
        return {
            "retrieve": self.retrieve_seconds,
            "plan": self.plan_seconds,
            "lookup": self.lookup_seconds,
            **{f"load from {tier}": seconds for tier, seconds in self.load_seconds.items()},
            "encode": self.encode_seconds,
            "assemble": self.assemble_seconds,
            "prefill": self.prefill_seconds,
            "first_token": self.first_token_seconds,
        }

    @property
    def is_cancelled(self) -> bool:
        """Whether the consumer closed the stream."""
        return self.finish_reason is FinishReason.CANCELLED

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of a forward pass behind the prompt's; ``None`` when there was none."""
        num_steps = self.num_decode_steps
        if num_steps is None:
            num_steps = self.num_generated_tokens - 1
        return self.decode_seconds / num_steps if num_steps > 0 else None

    @property
    def assembly_seconds(self) -> float:
        """Everything before the first token but retrieval, encoding, prefill and the token itself.

        What no phase measured is in it. Without a first token: the phases alone.
        """
        computing = self.encode_seconds + self.prefill_seconds + self.first_token_seconds
        computing += self.retrieve_seconds + self.held_back_seconds
        if self.ttft_seconds is None:
            return sum(self._parts().values()) - computing
        return max(self.ttft_seconds - computing, 0.0)

    @property
    def unattributed_seconds(self) -> float:
        """The part of TTFT that no phase measured; 0 without a first token."""
        if self.ttft_seconds is None:
            return 0.0
        measured = sum(self._parts().values()) + self.held_back_seconds
        return max(self.ttft_seconds - measured, 0.0)

    @property
    def num_cache_creation_tokens(self) -> int:
        """Cached tokens whose entries this request encoded first."""
        return sum(module.num_encoded_tokens for module in self.modules)

    @property
    def num_cache_read_tokens(self) -> int:
        """Cached tokens whose KV existed before this request."""
        return self.num_cached_tokens - self.num_cache_creation_tokens

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt's tokens whose KV existed before this request; 0 of no tokens."""
        return self.num_cache_read_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def module_hit_rate(self) -> float | None:
        """Share of the modules that were hits; ``None`` when there was nothing to hit."""
        if not self.modules:
            return None
        return sum(module.is_hit for module in self.modules) / len(self.modules)

    @property
    def saved_seconds(self) -> float | None:
        """Estimate of the time that stored KV saved; 0 where nothing was read.

        ``None`` where the prefill rate is unknown, as in a process that has neither ingested nor
        computed a whole prompt of some hundred tokens.

        What computing the cache-read tokens would have taken at ``prefill_tokens_per_second``, less
        what it took to look them up, load and assemble them; negative where that took longer. It is
        as good as the rate fits. One learned from passes about as long as what was read comes
        close to the difference between both arms (SmolLM2-135M on a CPU, 1,300 tokens read: medians
        of five requests 0 to 6 % off, single ones up to 29 %). One learned from shorter passes
        leaves out a part of attention, which is quadratic, and so is low for long contexts; and a
        machine that is busier or idler than when the rate was learned shifts the estimate as much.
        """
        if not self.num_cache_read_tokens:
            return 0.0
        if self.prefill_tokens_per_second is None:
            return None
        spent = self.lookup_seconds + sum(self.load_seconds.values()) + self.assemble_seconds
        return self.num_cache_read_tokens / self.prefill_tokens_per_second - spent

    @classmethod
    def from_dict(cls, plain: object) -> Self:
        """The inverse of ``to_dict``, also behind JSON; unknown keys are ignored.

        Keys of derived numbers are not read: they follow from the others.

        Raises:
            PromptCacheError: A key is missing or malformed, which the message names; or the values
                contradict each other.
        """
        reader = Reader(plain, "metrics of a request")
        return cls(
            prompt_tokens=reader.whole("prompt_tokens"),
            num_cached_tokens=reader.whole("num_cached_tokens"),
            num_fresh_tokens=reader.whole("num_fresh_tokens"),
            finish_reason=reader.kind("finish_reason", FinishReason),
            num_reused_tokens=reader.whole("num_reused_tokens"),
            num_repaired_tokens=reader.whole("num_repaired_tokens"),
            num_generated_tokens=reader.whole("num_generated_tokens"),
            ttft_seconds=reader.optional_number("ttft_seconds"),
            retrieve_seconds=reader.number("retrieve_seconds"),
            plan_seconds=reader.number("plan_seconds"),
            lookup_seconds=reader.number("lookup_seconds"),
            load_seconds=reader.numbers_by_kind("load_seconds", Tier),
            encode_seconds=reader.number("encode_seconds"),
            assemble_seconds=reader.number("assemble_seconds"),
            prefill_seconds=reader.number("prefill_seconds"),
            first_token_seconds=reader.number("first_token_seconds"),
            decode_seconds=reader.number("decode_seconds"),
            held_back_seconds=reader.number("held_back_seconds"),
            num_decode_steps=reader.optional_whole("num_decode_steps"),
            modules=tuple(
                ModuleUse.from_dict(each, where=f"metrics of a request: 'modules'[{index}]")
                for index, each in enumerate(reader.items("modules"))
            ),
            template=reader.text("template"),
            tenant=reader.text("tenant"),
            prefill_tokens_per_second=reader.late_number("prefill_tokens_per_second"),
        )

    def to_dict(self) -> dict[str, Plain]:
        """Every field and every derived number, as JSON can say them."""
        return plain_fields(self) | {name: to_plain(getattr(self, name)) for name in _DERIVED}


_DERIVED = (
    "is_cancelled",
    "tpot_seconds",
    "assembly_seconds",
    "unattributed_seconds",
    "num_cache_creation_tokens",
    "num_cache_read_tokens",
    "token_hit_rate",
    "module_hit_rate",
    "saved_seconds",
)


def _check_counts(where: str, **counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise PromptCacheError(f"{where}: {name} is {count}; it must be at least 0")


def _check_seconds(where: str, parts: Mapping[str, float]) -> None:
    for name, seconds in parts.items():
        if not (math.isfinite(seconds) and seconds >= 0):
            raise PromptCacheError(f"{where}: {name} took {seconds} s; a time is finite and >= 0")
