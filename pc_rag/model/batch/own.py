"""What the tokens of a batch's pass see of their own sequences: fresh tokens, and tails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from pc_rag.model.attention.kernels import attend_piece, repeat_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.attention.kernels import Scoring
    from pc_rag.model.attention.layer_sights import LayerSights
    from pc_rag.model.attention.sights import Sight
    from pc_rag.model.batch.tails import SequenceTail, TailBlock


class OwnKV(Protocol):
    """What every token of a pass sees of its own sequence, itself included.

    Attributes:
        num_kv_heads: Of the tails.
    """

    num_kv_heads: int

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
        sights: LayerSights,
    ) -> None:
        """Store a layer's fresh KV, and attend.

        Args:
            layer: Index of the layer.
            queries: ``[1, num_heads, num_tokens, head_dim]``.
            keys: ``[1, num_kv_heads, num_tokens, head_dim]``.
            values: ``[1, num_kv_heads, num_tokens, value_dim]``.
            out: ``[num_tokens, num_kv_heads, group_size, value_dim]``; filled.
            lse: ``[num_tokens, num_kv_heads, group_size]``; filled.
            scoring: Of the layer; its sinks are left to the merge.
            sights: Of the layer: one object for all layers that are alike.
        """

    def commit(self) -> None:
        """Count the rows that the pass has filled."""


class PromptTokens:
    """Fresh tokens of several prompts: each sees those of its own prompt up to itself.

    Args:
        tails: Of the prompts; they take the position IDs at once.
        tokens: Which tokens of the pass are theirs.
        position_ids: Of all tokens of the pass.
    """

    def __init__(
        self,
        tails: Sequence[SequenceTail],
        tokens: Sequence[slice],
        position_ids: Sequence[int],
    ) -> None:
        self._prompts = list(zip(tails, tokens, strict=True))
        self.num_kv_heads = tails[0].block.keys.shape[2]
        self._position_ids = position_ids
        self._sights: dict[LayerSights, list[Sight | None]] = {}
        for tail, of_prompt in self._prompts:
            rows = slice(tail.num_rows, tail.num_rows + of_prompt.stop - of_prompt.start)
            tail.position_ids[rows] = torch.tensor(position_ids[of_prompt])

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
        sights: LayerSights,
    ) -> None:
        """See ``OwnKV``."""
        num_heads, split = queries.shape[1], lse.shape[1:]
        repeated = repeat_heads(keys, num_heads), repeat_heads(values, num_heads)
        scaling, softcap = scoring.scaling, scoring.softcap
        if sights not in self._sights:
            self._sights[sights] = [
                sights.own(self._position_ids[tokens]) for _, tokens in self._prompts
            ]
        for (tail, tokens), sight in zip(self._prompts, self._sights[sights], strict=True):
            rows = slice(tail.num_rows, tail.num_rows + tokens.stop - tokens.start)
            tail_keys, tail_values = tail.layer_kv(layer, rows)
            tail_keys.copy_(keys[:, :, tokens])
            tail_values.copy_(values[:, :, tokens])
            states = (queries[:, :, tokens], *(each[:, :, tokens] for each in repeated))
            part, part_lse = (
                attend_piece(*states, scaling=scaling, softcap=softcap, is_causal=True)
                if sight is None
                else sight.attend(*states, scaling=scaling, softcap=softcap)
            )
            out[tokens] = torch.unflatten(part[0].transpose(0, 1), 1, split)
            lse[tokens] = torch.unflatten(part_lse[0].transpose(0, 1), 1, split)

    def commit(self) -> None:
        """See ``OwnKV``."""
        for tail, tokens in self._prompts:
            tail.num_rows += tokens.stop - tokens.start


class NextTokens:
    """One token of every sequence, which sees the sequence's whole tail.

    Sequences whose slots are neighbours are attended by one call; a mask hides the rows that
    shorter ones do not have, or that stand behind a window.

    Args:
        tails: Of the sequences, by block and slot: see ``in_place_order``. They take the position
            IDs at once.
        position_ids: Of the tokens.
        dtype: Of the queries.
    """

    def __init__(
        self, tails: Sequence[SequenceTail], position_ids: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._tails = tails
        self.num_kv_heads = tails[0].block.keys.shape[2]
        self._runs: list[_Run] = []
        first = 0
        for last in range(1, len(tails) + 1):
            if last == len(tails) or not _are_neighbours(tails[last - 1], tails[last]):
                own = slice(first, last)
                self._runs.append(_Run(tails[own], position_ids[own], first, dtype))
                first = last

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        scoring: Scoring,
        sights: LayerSights,
    ) -> None:
        """See ``OwnKV``."""
        stacked = torch.unflatten(queries[0].transpose(0, 1), 1, lse.shape[1:])
        for run in self._runs:
            fresh = keys[0, :, run.tokens], values[0, :, run.tokens]
            out[run.tokens], lse[run.tokens] = run.attend(
                layer, stacked[run.tokens], *fresh, scoring=scoring, sights=sights
            )

    def commit(self) -> None:
        """See ``OwnKV``."""
        for tail in self._tails:
            tail.num_rows += 1


class _Run:
    """Sequences in neighbouring slots of one block, each with one token."""

    def __init__(
        self,
        tails: Sequence[SequenceTail],
        position_ids: Sequence[int],
        first: int,
        dtype: torch.dtype,
    ) -> None:
        block: TailBlock = tails[0].block
        device = block.keys.device
        self.tokens = slice(first, first + len(tails))
        self._slots = slice(tails[0].slot, tails[0].slot + len(tails))
        self._last_rows = torch.tensor([tail.num_rows for tail in tails])
        self._fresh_rows = self._last_rows.to(device)
        self._fresh_slots = torch.arange(self._slots.start, self._slots.stop, device=device)
        self._block = block
        self._at = torch.tensor(position_ids)
        for tail, position_id in zip(tails, position_ids, strict=True):
            tail.position_ids[tail.num_rows] = position_id
        lengths = [tail.num_rows + 1 for tail in tails]
        self._rows = slice(0, max(lengths))
        self._mask: torch.Tensor | None = None
        if min(lengths) < max(lengths):
            is_hidden = torch.arange(max(lengths), device=device) > self._fresh_rows[:, None]
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
            self._mask = mask.masked_fill_(is_hidden, float("-inf"))[:, None, None]
        self._seen: dict[LayerSights, tuple[slice, torch.Tensor | None]] = {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scoring: Scoring,
        sights: LayerSights,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the tails; keys and values are ``[num_kv_heads, num_tokens, head_dim]``."""
        all_keys, all_values = self._block.keys[layer], self._block.values[layer]
        all_keys[self._fresh_slots, :, self._fresh_rows] = keys.transpose(0, 1)
        all_values[self._fresh_slots, :, self._fresh_rows] = values.transpose(0, 1)
        if sights not in self._seen:
            self._seen[sights] = self._look(sights)
        rows, mask = self._seen[sights]
        return attend_piece(
            queries,
            all_keys[self._slots, :, rows],
            all_values[self._slots, :, rows],
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            mask=mask,
        )

    def _look(self, sights: LayerSights) -> tuple[slice, torch.Tensor | None]:
        """The rows that some sequence sees, and what each does not see of them."""
        if sights.are_plain:
            return self._rows, self._mask
        distance = self._at[:, None] - self._block.position_ids[self._slots, self._rows]
        is_hidden = torch.arange(self._rows.stop) > self._last_rows[:, None]
        if sights.window is not None:
            is_hidden |= distance >= sights.window
        first = int((~is_hidden).any(0).nonzero()[0])
        rows = slice(first, self._rows.stop)
        distance, is_hidden = (each[:, None, None, rows] for each in (distance, is_hidden))
        device = self._block.keys.device
        if sights.slopes is None:
            mask = torch.zeros(is_hidden.shape, device=device)
        else:
            slopes = sights.slopes.reshape(-1, sights.group_size, 1)
            mask = distance.to(device, torch.float32) * -slopes
        return rows, mask.masked_fill_(is_hidden.to(device), float("-inf"))


def in_place_order(tails: Sequence[SequenceTail]) -> list[int]:
    """Indices of tails such that neighbouring slots of a block follow each other."""
    return sorted(range(len(tails)), key=lambda n: (id(tails[n].block), tails[n].slot))


def _are_neighbours(one: SequenceTail, other: SequenceTail) -> bool:
    return one.block is other.block and other.slot == one.slot + 1
