"""Reading prompts with gaps, for ``benchmarks/gap_study.py``: below the planner, one pass each.

uncached   every token is computed in the cell; what stands before its first gap was computed by
           the cell without gaps, at the same position IDs, and is not computed again
module     chunks are entries that saw themselves only (the Prompt Cache paper)
prefix     chunks are entries that saw the prompt's beginning (this project's default)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from scoring import first_sentence

from pc_rag.kv.key import EntryAddress, VisibilityContext
from pc_rag.layout import Cached, Fresh, RequestPlan
from pc_rag.layout.plan import Reused
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.attention.attention_pass import AttentionPass
from pc_rag.model.attention.kv_view import KVView, Segment
from pc_rag.model.encoder import EncodeJob, Encoder, context_segments
from pc_rag.types import Placement, Span, StorageDtype, Visibility

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gap_prompts import Prompt

    from pc_rag.kv.entry import Entry
    from pc_rag.model.loading import LoadedModel
    from pc_rag.model.runner import Runner
    from pc_rag.types import ModuleKey


_MAX_BLANKS = 3
"""An answer that begins with so many tokens of white space is none."""


class Arm(StrEnum):
    """Where the context's KV comes from."""

    UNCACHED = "uncached"
    MODULE = "module"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A prompt that was read.

    Attributes:
        logits: ``[num_right_tokens, vocab_size]``, float32: behind the prompt, then behind all but
            the last token of the right answer.
        segments: The KV of every token of the prompt, by rising position ID.
    """

    logits: torch.Tensor
    segments: tuple[Segment, ...]


@dataclass(slots=True, eq=False)
class PromptReader:
    """Reads one prompt in all arms and cells.

    Args:
        loaded: The model.
        runner: Of the model.
        prompt: What is read.
    """

    loaded: LoadedModel
    runner: Runner
    prompt: Prompt
    _entries: dict[ModuleKey, Entry] = field(default_factory=dict)
    _gapless: tuple[Segment, ...] = ()

    def read(self, arm: Arm, spans: Sequence[Span]) -> Reading:
        """One forward pass over the fresh tokens of an arm and the right answer behind them.

        Args:
            arm: Where the context's KV comes from. The first call of ``UNCACHED`` must be without
                gaps; others start from what it computed.
            spans: Position IDs of the prompt's runs.
        """
        if arm is Arm.UNCACHED:
            plan, reused = self._uncached(spans)
        else:
            plan, reused = self._stored(Visibility(arm.value), spans), ()
        assert plan.token_ids == tuple(i for run in self.prompt.runs for i in run)
        view = assemble(
            plan,
            self._entries,
            self.runner,
            reused=reused,
            num_new_tokens=len(self.prompt.right),
        )
        token_ids, position_ids = fresh_tokens(plan)
        num_fresh = len(token_ids)
        known = self.prompt.right[:-1]
        logits = run(
            self.runner,
            view,
            [*token_ids, *known],
            [*position_ids, *range(plan.end, plan.end + len(known))],
            num_logits=len(self.prompt.right),
        )
        computed = _segments_of(view, plan.fresh, num_fresh)
        segments = tuple(sorted((*view.segments, *computed), key=lambda each: each.span))
        if arm is Arm.UNCACHED and not self._gapless:
            self._gapless = segments
        return Reading(logits, segments)

    def _uncached(self, spans: Sequence[Span]) -> tuple[RequestPlan, list[Segment]]:
        reused: list[Segment] = []
        for segment, span in zip(self._gapless[:-1], spans, strict=False):
            if segment.span != span:
                break
            reused.append(segment)
        parts = [
            (Reused if number < len(reused) else Fresh)(token_ids=ids, span=span)
            for number, (ids, span) in enumerate(zip(self.prompt.runs, spans, strict=True))
        ]
        return RequestPlan(tuple(parts)), reused

    def _stored(self, visibility: Visibility, spans: Sequence[Span]) -> RequestPlan:
        prefix = self._encoded(self.prompt.runs[0], 0)
        entries = [prefix]
        for token_ids, span in zip(self.prompt.runs[1:-1], spans[1:-1], strict=True):
            is_fixed = self.runner.positions.placement is Placement.FIXED
            start = span.start if is_fixed else spans[0].end
            context = prefix if visibility is Visibility.PREFIX else None
            entries.append(self._encoded(token_ids, start, context))
        parts: list[Cached | Fresh] = [
            Cached(
                label=f"run {number}",
                key=entry.address.key,
                token_ids=entry.address.token_ids,
                span=span,
                rows=Span(0, entry.num_tokens),
                encoded_start=entry.address.start,
            )
            for number, (entry, span) in enumerate(zip(entries, spans, strict=False))
        ]
        parts.append(Fresh(token_ids=self.prompt.runs[-1], span=spans[-1]))
        return RequestPlan(tuple(parts))

    def _encoded(
        self, token_ids: tuple[int, ...], start: int, context: Entry | None = None
    ) -> Entry:
        seen = VisibilityContext.module()
        if context is not None:
            address = context.address
            positions = range(address.span.start, address.span.end)
            seen = VisibilityContext.of(Visibility.PREFIX, address.token_ids, positions)
        address = EntryAddress(
            fingerprint=self.loaded.fingerprint,
            token_ids=token_ids,
            context=seen,
            start=start,
            dtype=StorageDtype(str(self.runner.dtype).removeprefix("torch.")),
        )
        if address.key not in self._entries:
            job = EncodeJob(address, context_segments([context] if context else []))
            ((_, entry),) = Encoder(self.runner).encode([job])
            self._entries[address.key] = entry
        return self._entries[address.key]


def run(
    runner: Runner,
    view: KVView,
    token_ids: Sequence[int],
    position_ids: Sequence[int],
    *,
    num_logits: int,
) -> torch.Tensor:
    """One forward pass; logits behind the last ``num_logits`` tokens, float32."""
    num_tokens = len(token_ids)
    view.tail.reserve(num_tokens)
    logits = runner.run_pass(
        AttentionPass(view, runner.positions, position_ids),
        torch.tensor([token_ids]),
        torch.tensor([position_ids]),
        logits_behind=torch.arange(num_tokens - num_logits, num_tokens),
    )
    view.tail.num_rows += num_tokens
    return logits[0].float()


def _segments_of(view: KVView, parts: Sequence[Fresh], num_tokens: int) -> list[Segment]:
    """The computed tokens of a prompt, one segment a part."""
    keys, values = view.computed_kv(0, num_tokens)
    segments = []
    row = 0
    for part in parts:
        rows = slice(row, row + len(part.span))
        segments.append(Segment(keys[:, :, rows], values[:, :, rows], part.span))
        row = rows.stop
    return segments


class Answerer:
    """Greedy answers. A draft that comes true is checked in one pass.

    Args:
        loaded: The model.
        runner: Of the model.
        max_tokens: Most tokens of an answer.
    """

    def __init__(self, loaded: LoadedModel, runner: Runner, *, max_tokens: int) -> None:
        self._runner = runner
        self._tokenizer = loaded.tokenizer
        self._ends = loaded.tokenizer.control_ids | loaded.tokenizer.eos_ids
        self._max_tokens = max_tokens

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of an answer."""
        return self._tokenizer.decode(token_ids)

    def answer(self, reading: Reading, draft: Sequence[int] = ()) -> list[int]:
        """Likeliest tokens one after the other, until the answer ends.

        Args:
            reading: The prompt that was read.
            draft: An answer to another placing of the prompt, which this one may well have too.
        """
        position = reading.segments[-1].span.end
        given = [int(reading.logits[0].argmax())]
        segments = reading.segments
        if len(draft) > 1 and draft[0] == given[0]:
            view = KVView(segments, self._runner.pool.take(len(draft)))
            positions = range(position, position + len(draft) - 1)
            logits = run(self._runner, view, draft[:-1], positions, num_logits=len(draft) - 1)
            for wanted, likeliest in zip(draft[1:], logits.argmax(dim=-1).tolist(), strict=True):
                given.append(likeliest)
                if likeliest != wanted:
                    break
            self._runner.pool.give_back(view.tail)
        if not self._is_over(given):
            self._go_on(KVView(segments, self._runner.pool.take(1)), given, position)
        return given

    def _go_on(self, view: KVView, given: list[int], position: int) -> None:
        self._runner.settle(view, self._max_tokens)
        if len(given) > 1:
            known = given[:-1]
            run(self._runner, view, known, range(position, position + len(known)), num_logits=1)
        while not self._is_over(given):
            logits = self._runner.decode(view, given[-1], position + len(given) - 1)
            given.append(int(logits.argmax()))
        self._runner.pool.give_back(view.tail)

    def _is_over(self, given: Sequence[int]) -> bool:
        if len(given) >= self._max_tokens or given[-1] in self._ends:
            return True
        text = self.text(given).lstrip()
        if not text:
            return len(given) >= _MAX_BLANKS
        return first_sentence(text) != text
