"""Requests that run side by side: their prompts in a few passes, then token by token together."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.engine.answer import complete
from pc_rag.engine.entry_source import Served
from pc_rag.metrics import Phase
from pc_rag.model.batch.kv import SharedKV, assemble_sequence
from pc_rag.model.batch.runner import BatchRunner
from pc_rag.model.batch.tails import allocate_tails
from pc_rag.model.pass_clock import PassClock
from pc_rag.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pc_rag.engine.answer import AnswerBuilder
    from pc_rag.engine.completion import Completion
    from pc_rag.engine.entry_source import Acquired
    from pc_rag.engine.machinery import Machinery
    from pc_rag.engine.request import EntryRecipe, Request
    from pc_rag.layout.plan import Cached, RequestPlan
    from pc_rag.metrics import Stopwatch
    from pc_rag.model.batch.kv import BatchSequence
    from pc_rag.model.batch.tails import SequenceTail
    from pc_rag.types import ModuleKey

_PASS_TOKENS = 2048
"""Fresh tokens that one pass of prompts computes at most; a longer prompt has one of its own."""


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """KV that requests side by side held.

    Attributes:
        tail_bytes: Allocated for them: what they computed, and stored KV that was copied.
        shared_bytes: Stored KV that several of them read in place, each entry once.
    """

    tail_bytes: int = 0
    shared_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.tail_bytes + self.shared_bytes


@dataclass(slots=True, eq=False)
class Member:
    """One request of a batch.

    Attributes:
        request: What was asked.
        plan: What is run of it.
        answer: What it gives.
        served: Where its entries came from.
        sequence: Its KV while it runs.
        num_decode_steps: Forward passes behind the prompt's.
        completion: Its answer once it has ended.
    """

    request: Request
    plan: RequestPlan
    answer: AnswerBuilder
    served: dict[ModuleKey, Served] = field(default_factory=dict)
    sequence: BatchSequence | None = None
    num_decode_steps: int = 0
    completion: Completion | None = None


class BatchGroup:
    """Runs some requests side by side. For one thread, and one run.

    Args:
        machinery: The engine's parts.
        members: The requests.
        watch: Measured what came before, for all of them alike.
        share: Whether entries that several members see are read in place, once for all.

    Attributes:
        memory: What was held, known once it has run.
    """

    def __init__(
        self, machinery: Machinery, members: Sequence[Member], *, watch: Stopwatch, share: bool
    ) -> None:
        self.memory = BatchMemory()
        self._machinery = machinery
        self._members = members
        self._watch = deepcopy(watch)  # other groups go on from the same moment
        self._runner = BatchRunner(machinery.runner)
        self._shared_keys = _seen_by_several(members) if share else {}

    def run(self) -> None:
        """Run every member to its end; all that was leased is given back, also on an error."""
        recipes: dict[ModuleKey, EntryRecipe] = {}
        for member in self._members:
            recipes.update(member.request.recipes)
        source = self._machinery.source
        with source.acquire(self._shared_keys, recipes, watch=self._watch) as held:
            try:
                self._run_over(held)
            finally:
                for member in self._members:
                    member.sequence = None

    def _run_over(self, held: Acquired) -> None:
        with self._watch.measure(Phase.ASSEMBLE):
            shared = SharedKV(held.entries, self._machinery.runner.dtype)
            tails = deque(self._allocate())
        blocks = {id(tail.block): tail.block.num_bytes for tail in tails}
        self.memory = BatchMemory(sum(blocks.values()), shared.num_bytes)
        self._tell_served(held)
        for member in self._members:
            member.answer.watch = deepcopy(self._watch)
        for of_pass in _passes(self._members):  # a buffer goes once all of its sequences have ended
            self._prefill(of_pass, shared, [tails.popleft() for _ in of_pass])
        live = self._members
        while live := [member for member in live if member.completion is None]:
            self._decode(live)

    def _allocate(self) -> list[SequenceTail]:
        """Room for everything that a member does not share; its last token is never computed."""
        runner = self._machinery.runner
        capacities = [
            sum(len(part.token_ids) for part in member.plan.fresh)
            + sum(len(part.token_ids) for part in self._own_parts(member))
            + member.answer.budget
            - 1
            for member in self._members
        ]
        return allocate_tails(runner.shape, capacities, dtype=runner.dtype, device=runner.device)

    def _own_parts(self, member: Member) -> list[Cached]:
        """The stored KV that a member does not share."""
        return [part for part in member.plan.cached if part.key not in self._shared_keys]

    def _tell_served(self, held: Acquired) -> None:
        """Who encoded an entry for all is the first to read it; the others find it there."""
        is_on_cpu = self._machinery.runner.device.type == "cpu"
        here = Served(Tier.HOST if is_on_cpu else Tier.DEVICE)
        told = dict(held.served)
        for member in self._members:
            for part in member.plan.cached:
                if part.key in told and part.key not in member.served:
                    member.served[part.key] = told[part.key]
            told.update((key, here) for key in member.served if told[key].tier is None)

    def _prefill(
        self, members: Sequence[Member], shared: SharedKV, tails: Sequence[SequenceTail]
    ) -> None:
        """Compute some prompts in one pass, and the first token of each answer."""
        for member, tail in zip(members, tails, strict=True):
            member.sequence = self._assemble(member, shared, tail)
        clock = PassClock(self._machinery.runner.device)
        sequences = [member.sequence for member in members if member.sequence is not None]
        with _measure(members, Phase.PREFILL), clock.measure():
            logits = self._runner.prefill(sequences)
        self._take(members, logits)
        self._machinery.prefill_rate.record(
            sum(len(sequence.token_ids) for sequence in sequences),
            clock.seconds(),
            num_context_tokens=max(member.plan.num_cached_tokens for member in members),
        )

    def _assemble(self, member: Member, shared: SharedKV, tail: SequenceTail) -> BatchSequence:
        """Bring a member's stored KV; what it does not share is copied and given back at once."""
        machinery, watch = self._machinery, member.answer.watch
        keys = [part.key for part in self._own_parts(member)]
        with machinery.source.acquire(keys, member.request.recipes, watch=watch) as own:
            member.served.update(own.served)
            with watch.measure(Phase.ASSEMBLE):
                return assemble_sequence(member.plan, tail, shared, own.entries, machinery.runner)

    def _decode(self, members: Sequence[Member]) -> None:
        sequences = [member.sequence for member in members if member.sequence is not None]
        with _measure(members, Phase.DECODE):
            logits = self._runner.decode(
                sequences,
                [member.answer.token_ids[-1] for member in members],
                [member.plan.end + member.num_decode_steps for member in members],
            )
        for member in members:
            member.num_decode_steps += 1
        self._take(members, logits)

    def _take(self, members: Sequence[Member], logits: torch.Tensor) -> None:
        """Choose a token for each; who has ended leaves."""
        for member, behind in zip(members, logits, strict=True):
            _, is_last = member.answer.take(behind)
            if is_last:
                member.sequence = None
                member.completion = complete(
                    member.answer,
                    self._machinery,
                    member.request,
                    plan=member.plan,
                    served=member.served,
                    num_decode_steps=member.num_decode_steps,
                )


def _seen_by_several(members: Sequence[Member]) -> dict[ModuleKey, int]:
    """Entries that more than one member reads, in the order they are met, and by how many."""
    counts = Counter(
        key for member in members for key in dict.fromkeys(part.key for part in member.plan.cached)
    )
    return {key: count for key, count in counts.items() if count > 1}


def _passes(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Members, in order, whose fresh tokens go through the model together."""
    of_pass: list[Member] = []
    num_tokens = 0
    for member in members:
        num_fresh = sum(len(part.token_ids) for part in member.plan.fresh)
        if of_pass and num_tokens + num_fresh > _PASS_TOKENS:
            yield of_pass
            of_pass, num_tokens = [], 0
        of_pass.append(member)
        num_tokens += num_fresh
    if of_pass:
        yield of_pass


@contextmanager
def _measure(members: Sequence[Member], phase: Phase) -> Iterator[None]:
    """Charge the time inside to everyone whose tokens are computed."""
    with ExitStack() as stack:
        for member in members:
            stack.enter_context(member.answer.watch.measure(phase))
        yield
