"""Encoding modules: computing the entries that requests will read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from pc_rag.errors import StoreError
from pc_rag.kv.entry import Entry
from pc_rag.model.attention.kv_view import KVView, Segment
from pc_rag.model.pass_clock import PassClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pc_rag.kv.key import EntryAddress
    from pc_rag.metrics import PrefillRate
    from pc_rag.model.runner import Runner

_BATCH_TOKENS = 2048
"""Tokens of one forward pass, padding included: enough to keep the matrix units busy."""

_MAX_PADDING = 0.1
"""Largest share of a batch that may be padding."""


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One entry to compute.

    Attributes:
        address: The entry's address; its context must be what ``context`` holds.
        context: Stored KV that the module attends: nothing under visibility ``module``, the
            always-included text before it under ``prefix``. Jobs that share the very same tuple
            can share a forward pass.
    """

    address: EntryAddress
    context: tuple[Segment, ...] = ()


class Encoder:
    """Computes entries with one model, batched by length.

    Args:
        runner: The model.
        rate: Learns from every batch how fast the model prefills.
    """

    def __init__(self, runner: Runner, *, rate: PrefillRate | None = None) -> None:
        self._runner = runner
        self._rate = rate

    def encode(self, jobs: Sequence[EncodeJob]) -> Iterator[tuple[int, Entry]]:
        """Compute the jobs' entries.

        Jobs of like length behind the same context are computed together; causal attention keeps
        the padding behind a shorter text out of its sight.

        Args:
            jobs: What to compute, in any order.

        Yields:
            Index of the job and its entry, batch by batch, as soon as a batch is done. The entry's
            tensors are its own, contiguous, on the model's device.

        Raises:
            StoreError: A job has no tokens.
        """
        for job in jobs:
            if not job.address.token_ids:
                raise StoreError("an entry needs at least one token; an empty text has no KV")
        order = sorted(
            range(len(jobs)),
            key=lambda i: (id(jobs[i].context), jobs[i].address.start, _length(jobs[i])),
        )
        for _, same in groupby(order, key=lambda i: (id(jobs[i].context), jobs[i].address.start)):
            indexes = list(same)
            context = self._as_computed(jobs[indexes[0]].context)
            for batch in _batches(jobs, indexes):
                yield from self._encode_batch(jobs, batch, context)

    def _as_computed(self, context: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """The context in the compute dtype; it may have been stored in another one."""
        dtype = self._runner.dtype
        return tuple(
            segment
            if segment.keys.dtype == segment.values.dtype == dtype
            else Segment(
                segment.keys.to(dtype), segment.values.to(dtype), segment.span, segment.shift
            )
            for segment in context
        )

    def _encode_batch(
        self, jobs: Sequence[EncodeJob], batch: list[int], context: tuple[Segment, ...]
    ) -> Iterator[tuple[int, Entry]]:
        longest = _length(jobs[batch[-1]])
        token_ids = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, index in enumerate(batch):
            ids = jobs[index].address.token_ids
            token_ids[row, : len(ids)] = torch.tensor(ids)
        start = jobs[batch[0]].address.start
        tail = self._runner.pool.take(longest, batch_size=len(batch))
        try:
            view = KVView(context, tail)
            clock = PassClock(self._runner.device)
            with clock.measure():
                self._runner.compute(view, token_ids, range(start, start + longest))
            for row, index in enumerate(batch):
                address = jobs[index].address
                rows = slice(0, len(address.token_ids))
                dtype = getattr(torch, address.dtype.value)
                keys = tail.keys[:, row, :, rows].to(dtype, copy=True)
                values = tail.values[:, row, :, rows].to(dtype, copy=True)
                yield index, Entry(address, keys.contiguous(), values.contiguous())
            if self._rate is not None:  # behind the entries: who stored them waited for the pass
                num_tokens = sum(_length(jobs[index]) for index in batch)
                num_context_tokens = sum(len(segment.span) for segment in context)
                self._rate.record(
                    num_tokens, clock.seconds(), num_context_tokens=num_context_tokens
                )
        finally:
            self._runner.pool.give_back(tail)


def _length(job: EncodeJob) -> int:
    return len(job.address.token_ids)


def _batches(jobs: Sequence[EncodeJob], order: list[int]) -> Iterator[list[int]]:
    """Cut jobs, sorted by length, into batches of bounded tokens and bounded padding."""
    batch: list[int] = []
    num_tokens = 0
    for index in order:
        length = _length(jobs[index])
        padded = length * (len(batch) + 1)
        padding = 1 - (num_tokens + length) / padded
        if batch and (padded > _BATCH_TOKENS or padding > _MAX_PADDING):
            yield batch
            batch, num_tokens = [], 0
        batch.append(index)
        num_tokens += length
    if batch:
        yield batch


def context_segments(entries: Sequence[Entry]) -> tuple[Segment, ...]:
    """Entries as a context, standing where they were encoded."""
    return tuple(Segment(entry.keys, entry.values, entry.address.span) for entry in entries)
