"""From logits to an answer: the next token, its text, and when to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pc_rag.engine.accounting import request_metrics
from pc_rag.engine.completion import Completion
from pc_rag.errors import ConfigError, LayoutError
from pc_rag.metrics import Phase
from pc_rag.model.detokenize import Detokenizer
from pc_rag.model.sampling import GenerationConfig, Sampler
from pc_rag.model.stop import StopMatcher
from pc_rag.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pc_rag.engine.entry_source import Served
    from pc_rag.engine.machinery import Machinery
    from pc_rag.engine.request import Request
    from pc_rag.layout.plan import RequestPlan
    from pc_rag.metrics import Stopwatch
    from pc_rag.types import ModuleKey


class AnswerBuilder:
    """Builds the answer to one request, token by token.

    Args:
        machinery: The engine's parts.
        plan: The prompt.
        config: How to choose tokens and when to stop.
        watch: The request's clock.

    Attributes:
        budget: Most tokens it may have.
        token_ids: Those it has, without the end-of-sequence token.
        finish_reason: Why it ended; ``CANCELLED`` before it has.
        watch: The request's clock.

    Raises:
        LayoutError: The prompt leaves no room for a token.
        ConfigError: The grammar is refused, or ``config`` is something else.
    """

    def __init__(
        self,
        machinery: Machinery,
        plan: RequestPlan,
        config: GenerationConfig,
        *,
        watch: Stopwatch,
    ) -> None:
        if not isinstance(config, GenerationConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; give a GenerationConfig, such as "
                "GenerationConfig(max_new_tokens=32)"
            )
        self.watch = watch
        self.budget = min(config.max_new_tokens, machinery.max_position - plan.end)
        if self.budget < 1:
            raise LayoutError(
                f"context overflow: the prompt ends at position ID {plan.end} of "
                f"{machinery.max_position}; no token can be generated. Retrieve fewer chunks or "
                "shorten the prompt"
            )
        self._sampler = self._make_sampler(machinery, config)
        self._stops = StopMatcher(config.stop)
        self._detokenizer = Detokenizer(machinery.loaded.tokenizer)
        self._eos_ids = machinery.loaded.tokenizer.eos_ids
        self._history = list(plan.token_ids) if self._sampler.needs_history else []
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason = FinishReason.CANCELLED

    def _make_sampler(self, machinery: Machinery, config: GenerationConfig) -> Sampler:
        device = machinery.runner.device
        if config.grammar is None:
            return Sampler(config, device)
        with self.watch.measure(Phase.PLAN):
            matcher = machinery.grammars.start(config.grammar)
        return Sampler(config, device, matcher=matcher)

    @property
    def text(self) -> str:
        """What was released so far; cut before a stop string."""
        return "".join(self._text)

    def take(self, logits: torch.Tensor) -> tuple[str, bool]:
        """Choose the next token.

        Args:
            logits: Behind the prompt and the tokens so far, ``[vocab_size]``. Not modified.

        Returns:
            The text that it releases, perhaps none, and whether it is the last.
        """
        with self.watch.measure(Phase.DECODE if self.token_ids else Phase.FIRST_TOKEN):
            text, is_last = self._choose(logits)
        if text:
            self._text.append(text)
            self.watch.mark_first_token()
        return text, is_last

    def _choose(self, logits: torch.Tensor) -> tuple[str, bool]:
        history = torch.tensor(self._history, dtype=torch.long, device=logits.device)
        token_id = self._sampler.sample(logits, history)
        if token_id in self._eos_ids:
            self.finish_reason = FinishReason.STOP
            return self._flush(), True
        self.token_ids.append(token_id)
        if self._sampler.needs_history:
            self._history.append(token_id)
        text = self._stops.feed(self._detokenizer.push(token_id))
        if self._stops.is_stopped:
            self.finish_reason = FinishReason.STOP
            return text, True
        is_complete = self._sampler.is_finished
        if is_complete or len(self.token_ids) >= self.budget:
            text += self._flush()
            is_stopped = is_complete or self._stops.is_stopped
            self.finish_reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
            return text, True
        return text, False

    def _flush(self) -> str:
        """Text still held back, at the end."""
        text = self._stops.feed(self._detokenizer.flush())
        return text if self._stops.is_stopped else text + self._stops.flush()


def complete(
    answer: AnswerBuilder,
    machinery: Machinery,
    request: Request,
    *,
    plan: RequestPlan,
    served: Mapping[ModuleKey, Served],
    num_decode_steps: int,
) -> Completion:
    """Account for a request that ended; to be called once.

    Args:
        answer: What it gave.
        machinery: The engine's parts, whose statistics count it.
        request: What was asked.
        plan: What was run of it.
        served: Where the entries came from.
        num_decode_steps: Forward passes behind the prompt's.
    """
    if answer.token_ids:
        answer.watch.mark_first_token()
    metrics = request_metrics(
        plan,
        served,
        remarks=request.remarks,
        watch=answer.watch,
        finish_reason=answer.finish_reason,
        num_generated_tokens=len(answer.token_ids),
        num_decode_steps=num_decode_steps,
        template=request.template,
        tenant=machinery.config.tenant,
        prefill_tokens_per_second=machinery.prefill_rate.tokens_per_second,
    )
    machinery.stats.record(metrics)
    return Completion(
        text=answer.text,
        token_ids=tuple(answer.token_ids),
        finish_reason=answer.finish_reason,
        metrics=metrics,
    )
