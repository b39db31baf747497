"""Prompts that are run together: all of them planned, then run in groups, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pc_rag.engine.answer import AnswerBuilder
from pc_rag.engine.batch_group import BatchGroup, BatchMemory, Member
from pc_rag.engine.request import Request
from pc_rag.errors import ConfigError, GenerationError, LayoutError, Problem, PromptError
from pc_rag.metrics import Phase
from pc_rag.model.sampling import GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from pc_rag.engine.completion import Completion
    from pc_rag.engine.machinery import Machinery
    from pc_rag.engine.prompts import PromptLike
    from pc_rag.metrics import Stopwatch

DEFAULT_BATCH_SIZE = 32
"""Requests side by side. Each more costs its tail's memory, and gains less: the model's weights,
which all of them share a read of, are by then a small part of what a step reads."""


class Batch:
    """Some prompts, planned and ready to run once. For one thread.

    Args:
        machinery: The engine's parts.
        prompts: What to run.
        config: Of all answers, or one for each.
        plan: From a prompt to its request.
        watch: Running since the call.
        reuse: Whether stored KV is read.
        share: Whether entries that several prompts read are held once, and read in place.
        max_batch_size: Most prompts side by side; more are run group by group.

    Attributes:
        memory: KV of the group that held most, known once the batch has run.

    Raises:
        PromptError: Prompts cannot be planned; every one is named by its index. Or they are no
            list.
        LayoutError: The same, where none of them fits the model's context.
        ConfigError: The same, where all of their grammars are refused; or there is not one
            configuration for each prompt, or ``max_batch_size`` is no whole number from 1.
    """

    def __init__(
        self,
        machinery: Machinery,
        prompts: Sequence[PromptLike | Request],
        config: GenerationConfig | Sequence[GenerationConfig] | None,
        *,
        plan: Callable[[PromptLike], Request],
        watch: Stopwatch,
        reuse: bool,
        share: bool,
        max_batch_size: int,
    ) -> None:
        if isinstance(prompts, str):
            raise PromptError("prompts are one text; give a list of prompts, or call generate")
        if not isinstance(prompts, Sequence):
            raise PromptError(f"prompts are a {type(prompts).__name__}; give a list of prompts")
        is_whole = isinstance(max_batch_size, int) and not isinstance(max_batch_size, bool)
        if not is_whole or max_batch_size < 1:
            raise ConfigError(
                f"max_batch_size must be a whole number of at least 1; got {max_batch_size!r}"
            )
        self.memory = BatchMemory()
        self._machinery = machinery
        self._watch = watch
        self._reuse = reuse
        self._share = share
        self._max_batch_size = max_batch_size
        self._is_pending = True
        self._members = self._plan_all(prompts, _configs(config, len(prompts)), plan)

    def _plan_all(
        self,
        prompts: Sequence[PromptLike | Request],
        configs: Sequence[GenerationConfig],
        plan: Callable[[PromptLike], Request],
    ) -> list[Member]:
        """Every prompt planned, or one error that names all that are refused."""
        members: list[Member] = []
        refused: list[tuple[int, PromptError | LayoutError | ConfigError]] = []
        for index, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
            try:
                with self._watch.measure(Phase.PLAN):
                    request = prompt if isinstance(prompt, Request) else plan(prompt)
                    request = self._machinery.placeable(request)
                    to_run = request.plan if self._reuse else request.plan.without_reuse()
                answer = AnswerBuilder(self._machinery, to_run, config, watch=self._watch)
            except (PromptError, LayoutError, ConfigError) as error:
                refused.append((index, error))
            else:
                members.append(Member(request, to_run, answer))
        if refused:
            raise _refusal(refused, len(prompts)) from refused[0][1]
        return members

    def run(self) -> list[Completion]:
        """Run all prompts to their ends.

        Everything that is leased or allocated is given back, also where an error or an interrupt
        ends the batch; the requests that had not ended by then are counted as failed.

        Returns:
            A completion for each prompt, in their order.

        Raises:
            GenerationError: The batch was run before.
        """
        if not self._is_pending:
            raise GenerationError("the batch was run before; make another one of its prompts")
        self._is_pending = False
        self._machinery.endings.do_deferred()  # frees leases and buffers
        try:
            for start in range(0, len(self._members), self._max_batch_size):
                self._run_group(self._members[start : start + self._max_batch_size])
        except BaseException:
            self._count_failures()
            raise
        return [member.completion for member in self._members if member.completion is not None]

    def _run_group(self, members: Sequence[Member]) -> None:
        group = BatchGroup(self._machinery, members, watch=self._watch, share=self._share)
        group.run()
        self.memory = max(self.memory, group.memory, key=lambda memory: memory.num_bytes)
        if self._reuse:
            for member in members:
                self._machinery.prefetcher.warm_siblings(member.request)

    def _count_failures(self) -> None:
        tenant = self._machinery.config.tenant
        for member in self._members:
            if member.completion is None:
                self._machinery.stats.record_failure(
                    template=member.request.template, tenant=tenant
                )


def _configs(
    config: GenerationConfig | Sequence[GenerationConfig] | None, num_prompts: int
) -> Sequence[GenerationConfig]:
    if config is None or isinstance(config, GenerationConfig):
        return [config or GenerationConfig()] * num_prompts
    if isinstance(config, str) or not isinstance(config, Sequence):
        raise ConfigError(
            f"config is a {type(config).__name__}; give a GenerationConfig, or a list of one for "
            "each prompt"
        )
    if len(config) != num_prompts:
        raise ConfigError(
            f"there are {num_prompts} prompts and {len(config)} configurations; give one for each, "
            "or one for all"
        )
    return config


def _refusal(
    refused: Sequence[tuple[int, PromptError | LayoutError | ConfigError]], num_prompts: int
) -> PromptError | LayoutError | ConfigError:
    """One error for all refused prompts; of their own kind where that is one kind."""
    messages = [f"prompt {index} of {num_prompts}: {error}" for index, error in refused]
    for kind in (LayoutError, ConfigError):
        if all(isinstance(error, kind) for _, error in refused):
            return kind("\n".join(messages))
    return PromptError(tuple(Problem(0, 0, message) for message in messages))
