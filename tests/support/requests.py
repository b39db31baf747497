"""A small workbench: encode modules with the package, run plans, compare with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pc_rag.kv.key import EntryAddress, VisibilityContext
from pc_rag.layout.plan import Cached
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.detection.detect import runner_of
from pc_rag.model.encoder import EncodeJob, Encoder, context_segments
from pc_rag.types import Fingerprint, Span, StorageDtype, Visibility
from tests.support.reference import Module

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pc_rag.kv.entry import Entry
    from pc_rag.layout.plan import RequestPlan
    from pc_rag.model.runner import Runner


@dataclass
class Workbench:
    """One model, the entries it encoded, and how the reference must see them."""

    model: Any
    runner: Runner = field(init=False)
    entries: dict[str, Entry] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = runner_of(self.model)

    def encode(
        self, token_ids: tuple[int, ...], *, start: int, context: tuple[Entry, ...] = ()
    ) -> Entry:
        """Encode one module; its context are entries at their encoded spans."""
        ids = tuple(i for entry in context for i in entry.address.token_ids)
        positions = tuple(
            p for e in context for p in range(e.address.span.start, e.address.span.end)
        )
        address = EntryAddress(
            fingerprint=Fingerprint("test"),
            token_ids=token_ids,
            context=VisibilityContext.of(Visibility.PREFIX, ids, positions),
            start=start,
            dtype=StorageDtype(str(self.runner.dtype).removeprefix("torch.")),
        )
        job = EncodeJob(address, context_segments(context))
        ((_, entry),) = Encoder(self.runner).encode([job])
        self.entries[address.key] = entry
        self.modules[address.key] = Module(token_ids, start, ids, positions)
        return entry

    def logits(self, plan: RequestPlan, *, settle: bool = False) -> torch.Tensor:
        """Logits behind the plan's last token; with ``settle``, that token is decoded settled."""
        view = assemble(plan, self.entries, self.runner, num_new_tokens=8)
        token_ids, position_ids = fresh_tokens(plan)
        if not settle:
            return self.runner.prefill(view, token_ids, position_ids)
        self.runner.prefill(view, token_ids[:-1], position_ids[:-1])
        into = self.runner.pool.take(view.num_stored + view.tail.num_rows + 8)
        view.settle(into, self.runner.positions)
        return self.runner.decode(view, token_ids[-1], position_ids[-1])

    def decode(
        self, plan: RequestPlan, token_ids: Sequence[int], *, settle: bool
    ) -> list[torch.Tensor]:
        """Logits behind the plan, and behind each of the tokens that are decoded after it."""
        view = assemble(plan, self.entries, self.runner, num_new_tokens=len(token_ids))
        logits = [self.runner.prefill(view, *fresh_tokens(plan))]
        if settle:
            self.runner.settle(view, len(token_ids))
        for position_id, token_id in enumerate(token_ids, plan.end):
            logits.append(self.runner.decode(view, token_id, position_id))
        self.runner.pool.give_back(view.tail)
        return logits


def cached(entry: Entry, *, start: int, rows: Span | None = None) -> Cached:
    """The entry, or some of its rows, standing at ``start``."""
    rows = Span(0, entry.num_tokens) if rows is None else rows
    ids = entry.address.token_ids[rows.start : rows.end]
    return Cached(
        label="module",
        key=entry.address.key,
        token_ids=ids,
        span=Span(start, start + len(ids)),
        rows=rows,
        encoded_start=entry.address.start,
    )
