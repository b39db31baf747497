"""How the next token is chosen: transformers' logits processors and a generator of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pc_rag.errors import ConfigError
from pc_rag.model.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Callable

    from pc_rag.model.grammar_compiler import GrammarMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What a caller may set for one generation.

    Attributes:
        max_new_tokens: Most tokens to generate.
        temperature: 0 is greedy; larger is more random.
        top_k: Sample among the k likeliest tokens only.
        top_p: Sample among the likeliest tokens whose probabilities sum to this.
        min_p: Drop tokens less likely than this fraction of the likeliest one.
        repetition_penalty: Above 1 makes tokens of the prompt and the answer less likely.
        seed: The same seed gives the same tokens; ``None`` draws one.
        stop: Strings that end the answer; they are not part of it.
        grammar: What the answer may look like; needs the extra ``structured``. An answer that
            ``max_new_tokens`` or a stop string ends early is a beginning of such a text only.

    Raises:
        ConfigError: A value out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ConfigError(f"stop must be a tuple of strings; got the string {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        _check("max_new_tokens", self.max_new_tokens, "an integer of at least 1", _is_count)
        _check(
            "temperature", self.temperature, "a number of at least 0", lambda v: 0 <= v < _INFINITY
        )
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            "a number above 0",
            lambda v: 0 < v < _INFINITY,
        )
        if self.top_k is not None:
            _check("top_k", self.top_k, "an integer of at least 1, or None", _is_count)
        if self.top_p is not None:
            _check("top_p", self.top_p, "a number in (0, 1], or None", lambda v: 0 < v <= 1)
        if self.min_p is not None:
            _check("min_p", self.min_p, "a number in [0, 1], or None", lambda v: 0 <= v <= 1)
        if self.seed is not None:
            _check("seed", self.seed, "an integer in [0, 2**63), or None", _is_seed)
        if any(not isinstance(stop, str) or not stop for stop in self.stop):
            raise ConfigError(f"stop strings must be non-empty strings; got {self.stop!r}")
        if not isinstance(self.grammar, Grammar | None):
            raise ConfigError(
                f"grammar must be a Grammar, for example Grammar.json(schema), or None; got "
                f"{type(self.grammar).__name__} {self.grammar!r}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


_INFINITY = float("inf")
_SEED_END = 2**63


def _is_count(value: float) -> bool:
    return isinstance(value, int) and value >= 1


def _is_seed(value: float) -> bool:
    return isinstance(value, int) and 0 <= value < _SEED_END


def _check(name: str, value: float, allowed: str, is_valid: Callable[[float], bool]) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not is_valid(value):
        raise ConfigError(f"{name} must be {allowed}; got {value!r}")


class Sampler:
    """Chooses tokens for one generation; keeps its own random state, apart from torch's global one.

    Processors come in transformers' order (penalty, temperature, top-k, top-p, min-p), so that
    greedy tokens equal ``generate(do_sample=False)`` and seeded ones equal ``generate`` after
    ``torch.manual_seed`` on the same kind of device. What a grammar forbids is masked before all
    of them, so that top-k, top-p and min-p choose among what it allows.

    Args:
        config: What the caller set.
        device: Where the logits lie; random numbers are drawn there.
        matcher: Follows the answer through the configuration's grammar; at its start, and owned.
    """

    def __init__(
        self,
        config: GenerationConfig,
        device: torch.device,
        *,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self._matcher = matcher
        self._is_greedy = config.is_greedy
        self._processors = _build_processors(config)
        self._needs_history = config.repetition_penalty != 1.0
        self._generator: torch.Generator | None = None
        if not self._is_greedy:
            self._generator = torch.Generator(device=device)
            if config.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(config.seed)

    @property
    def needs_history(self) -> bool:
        """Whether ``sample`` reads ``token_ids``; if not, an empty tensor will do."""
        return self._needs_history

    @property
    def is_finished(self) -> bool:
        """Whether a grammar's answer is complete, and only its end could follow."""
        return self._matcher is not None and self._matcher.is_finished

    def sample(self, logits: torch.Tensor, token_ids: torch.Tensor) -> int:
        """Choose the next token.

        Args:
            logits: ``[vocab_size]``, any float dtype. Not modified.
            token_ids: ``[num_tokens]``, int64, on the same device: the prompt and all tokens since.

        Returns:
            A token id.

        Raises:
            GenerationError: The grammar cannot go on with the model's vocabulary.
        """
        scores = logits.detach().to(torch.float32)[None]
        if self._matcher is None:
            return self._choose(scores, token_ids)
        token_id = self._choose(self._matcher.mask(scores), token_ids)
        self._matcher.advance(token_id)
        return token_id

    def _choose(self, scores: torch.Tensor, token_ids: torch.Tensor) -> int:
        scores = self._processors(token_ids[None], scores)
        if self._is_greedy:
            return int(scores.argmax(dim=-1))
        probabilities = torch.softmax(scores, dim=-1)
        chosen = torch.multinomial(probabilities, num_samples=1, generator=self._generator)
        return int(chosen)


def _build_processors(config: GenerationConfig) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if config.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
    if config.is_greedy:
        return processors
    if config.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(config.temperature)))
    if config.top_k is not None:
        processors.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        processors.append(TopPLogitsWarper(float(config.top_p)))
    if config.min_p is not None:
        processors.append(MinPLogitsWarper(float(config.min_p)))
    return processors
