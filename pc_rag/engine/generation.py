"""One request from its plan to its last token."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch

from pc_rag.engine.answer import AnswerBuilder, complete
from pc_rag.engine.remember import remember
from pc_rag.errors import StoreError
from pc_rag.layout.plan import RequestPlan
from pc_rag.layout.reuse import plan_symbols, with_reused
from pc_rag.metrics import Phase
from pc_rag.model.answer_memory import PromptDigest
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.attention.kv_view import KVView, Segment
from pc_rag.model.pass_clock import PassClock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from pc_rag.engine.completion import Completion
    from pc_rag.engine.entry_source import Acquired
    from pc_rag.engine.machinery import Machinery
    from pc_rag.engine.request import Request
    from pc_rag.kv.prefix_match import PrefixMatch
    from pc_rag.kv.prefix_tree import PrefixTree
    from pc_rag.metrics import Stopwatch
    from pc_rag.model.sampling import GenerationConfig

_SETTLE_FROM_TOKENS = 4
"""Settling copies the context once; it pays from about this many further tokens on."""


class Generation:
    """Runs one request. ``run`` is a generator: nothing is locked while the consumer holds it.

    Args:
        machinery: The engine's parts.
        request: What to run.
        config: How to choose tokens and when to stop.
        watch: The request's clock, running since the call.
        reuse: Whether stored KV is read; without it the same tokens are all computed.

    Raises:
        LayoutError: The prompt leaves no room for a token.
        ConfigError: The grammar is refused.
    """

    def __init__(
        self,
        machinery: Machinery,
        request: Request,
        config: GenerationConfig,
        *,
        watch: Stopwatch,
        reuse: bool,
    ) -> None:
        self.completion: Completion | None = None
        self._on_completion: deque[Callable[[], None]] = deque()
        self._machinery = machinery
        self._request = request = machinery.placeable(request)
        self._watch = watch
        self._reuse = reuse
        self._plan = request.plan if reuse else request.plan.without_reuse()
        self._answer = AnswerBuilder(machinery, self._plan, config, watch=watch)
        self._acquired: Acquired | None = None
        self._match: PrefixMatch | None = None
        self._view: KVView | None = None
        self._num_decode_steps = 0
        self._prefill_clock = PassClock(machinery.runner.device)
        self._num_prefilled = 0
        self._is_cancelled = False

    def run(self) -> Generator[str]:
        """Generate; yields text that is never empty and never taken back."""
        has_failed = False
        try:
            logits, view = self._prefill()
            yield from self._decode(logits, view)
        except GeneratorExit:
            raise
        except BaseException:
            has_failed = True
            raise
        finally:
            self._end_when_safe(has_failed=has_failed)

    def cancel(self) -> None:
        """End before the next token; for any thread."""
        self._is_cancelled = True

    def cancel_unstarted(self) -> None:
        """Account for a request that nobody pulled."""
        if self.completion is None:
            self._end_when_safe(has_failed=False)

    def when_completed(self, callback: Callable[[], None]) -> None:
        """Call back once there is a completion: now, or from the thread that ends the request."""
        self._on_completion.append(callback)
        if self.completion is not None:
            self._call_back()

    def _call_back(self) -> None:
        with suppress(IndexError):  # two threads may be here, and each callback is one's
            while True:
                self._on_completion.popleft()()

    def end_others(self) -> None:
        """Do what was left of generations that the garbage collector ended."""
        self._machinery.endings.do_deferred()

    def _prefill(self) -> tuple[torch.Tensor, KVView]:
        """Bring everything to the model and compute the fresh tokens.

        Returns:
            Logits behind the prompt, and the view that later tokens go on with.
        """
        watch, machinery = self._watch, self._machinery
        self.end_others()  # frees leases and buffers
        reused: list[Segment] = []
        if self._reuse and machinery.prefix_tree is not None:
            with watch.measure(Phase.LOOKUP):
                reused = self._reuse_leading_run(machinery.prefix_tree)
        keys = [part.key for part in self._plan.cached]
        self._acquired = machinery.source.acquire(keys, self._request.recipes, watch=watch)
        with watch.measure(Phase.ASSEMBLE):
            num_new_tokens = 1 if self._will_settle else self._answer.budget
            view = assemble(
                self._plan,
                self._acquired.entries,
                machinery.runner,
                reused=reused,
                num_new_tokens=num_new_tokens,
            )
            self._view = view
            token_ids, position_ids = fresh_tokens(self._plan)
        with watch.measure(Phase.PREFILL), self._prefill_clock.measure():
            logits = machinery.runner.prefill(view, token_ids, position_ids)
        self._num_prefilled = len(token_ids)
        return logits, view

    def _reuse_leading_run(self, tree: PrefixTree) -> list[Segment]:
        symbols, positions = plan_symbols(self._plan)
        match = tree.match(
            symbols[:-1], positions=positions[:-1], namespace=self._machinery.namespace
        )
        self._match = match
        self._plan = with_reused(self._plan, match.num_symbols)
        return [Segment(run.keys, run.values, run.span) for run in match.runs]

    @property
    def _will_settle(self) -> bool:
        """Whether the rest is decoded from a contiguous buffer of its own."""
        has_stored = len(self._plan.fresh) < len(self._plan.parts)
        return has_stored and self._answer.budget > _SETTLE_FROM_TOKENS

    def _decode(self, logits: torch.Tensor, view: KVView) -> Iterator[str]:
        """Choose token after token until something ends the generation."""
        position = self._plan.end
        while True:
            text, is_last = self._answer.take(logits)
            if text and not self._is_cancelled:
                yield text
            if self._reuse and not self._num_decode_steps:  # the first token is out
                self._machinery.prefetcher.warm_siblings(self._request)
            if is_last or self._is_cancelled:
                return
            with self._watch.measure(Phase.DECODE):
                if self._will_settle and not self._num_decode_steps:
                    self._settle(view)
                logits = self._machinery.runner.decode(view, self._answer.token_ids[-1], position)
                self._num_decode_steps += 1
            position += 1

    def _settle(self, view: KVView) -> None:
        """Go on in one contiguous buffer, and give the stored entries back.

        The match of the prefix cache stays leased: what this request adds hangs on it.
        """
        self._machinery.runner.settle(view, self._answer.budget)
        self._release_entries()

    def _release_entries(self) -> None:
        if self._acquired is not None:
            self._acquired.release()

    def _release(self) -> None:
        self._release_entries()
        if self._match is not None:
            self._match.release()

    def _remember(self, view: KVView) -> None:
        """Hand what was computed to the exact prefix cache; an answer does not depend on it."""
        tree = self._machinery.prefix_tree
        if tree is None:
            return
        with suppress(StoreError, MemoryError, torch.OutOfMemoryError):
            remember(
                tree,
                self._plan,
                view,
                self._answer.token_ids,
                namespace=self._machinery.namespace,
            )

    def _remember_answer(self) -> None:
        """Have the answer's tokens known again where its text comes back in a conversation.

        Not those of an answer that a stop string cut: its text ends before its tokens do.
        """
        machinery = self._machinery
        text, token_ids = self._answer.text, tuple(self._answer.token_ids)
        tokenizer = machinery.loaded.tokenizer
        if machinery.prefix_tree is None:
            return  # nothing holds their KV
        if tokenizer.control_ids.isdisjoint(token_ids) and tokenizer.decode(token_ids) == text:
            prompt = PromptDigest(tokenizer, self._request.plan.token_ids)
            machinery.answers.remember(text, token_ids, behind=prompt)

    def _end_when_safe(self, *, has_failed: bool) -> None:
        self._machinery.endings.do(partial(self._end, has_failed=has_failed))

    def _end(self, *, has_failed: bool) -> None:
        """Give everything back and account for the request, exactly once."""
        machinery = self._machinery
        view, self._view = self._view, None
        served = dict(self._acquired.served) if self._acquired else {}
        try:
            if view is not None and self._reuse and not has_failed:
                self._remember(view)
        finally:
            self._release()
            if view is not None:
                machinery.runner.pool.give_back(view.tail)
        if has_failed:
            machinery.stats.record_failure(
                template=self._request.template, tenant=machinery.config.tenant
            )
            return
        machinery.prefill_rate.record(
            self._num_prefilled,
            self._prefill_clock.seconds(),
            num_context_tokens=len(self._plan.token_ids) - self._num_prefilled,
        )
        completion = complete(
            self._answer,
            machinery,
            self._request,
            plan=self._plan if view is not None else RequestPlan(()),
            served=served,
            num_decode_steps=self._num_decode_steps,
        )
        if self._reuse:
            self._remember_answer()
        self.completion = completion
        self._call_back()
