"""Who sees what of a piece of KV, and how much: windows, causal order, linear biases.

Everything goes by position ID. A key at ``s`` is seen from ``p`` where ``s <= p``, and with a
window where ``p - s < window``, too::

              s  0  1  2  3  4  5        window 3
    p = 4           x  x  x
    p = 6                    x  x        the keys that some query of a block sees are cut out,
                                         and a mask hides what the others of the block do not

A linear bias (ALiBi) is split: inside a piece it counts from the piece's last key ``e``, the rest
is one constant for each query, which leaves the piece's softmax alone and is added to its
log-sum-exp::

    slope * (p - s)  =  slope * (e - s)  +  slope * (p - e)

No mask is larger than some megabytes, however long the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from pc_rag.model.attention.kernels import attend_piece, seen_or_nothing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MASK_NUMBERS = 1 << 21
"""Most numbers of one mask, and of all masks that are kept for the next layer."""

_BLOCK_ROWS = 512
"""Most queries under one mask."""

_FADING_SPAN = 128
"""Most position IDs between the first and the last query of a block under linear biases: small
biases keep more digits of the scores that they are added to."""


class Sight(Protocol):
    """What queries see of one piece of KV, in every layer of a kind."""

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``attend_piece``; output 0 and log-sum-exp minus infinity where nothing is seen."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Queries of a band, and the keys that some of them see.

    Attributes:
        rows: The queries.
        keys: The keys.
        mask: First block that has the same mask; ``None`` where every query sees every key, alike.
        sees_nothing: ``[num_rows]``, queries that see none of the keys; ``None`` where all do.
    """

    rows: slice
    keys: slice
    mask: int | None
    sees_nothing: torch.Tensor | None


class Band:
    """Queries that see the keys of a piece by position ID, whatever the order of either.

    Args:
        at: ``[num_queries]``, position IDs of the queries, on the CPU.
        key_at: ``[num_keys]``, those of the keys, alike.
        window: Position IDs that a query sees back to, its own included; ``None`` for all.
        slopes: Of linear biases, ``[num_heads, num_queries or 1]``, float32.
        device: Of the model.
    """

    def __init__(
        self,
        at: torch.Tensor,
        key_at: torch.Tensor,
        *,
        window: int | None = None,
        slopes: torch.Tensor | None = None,
        device: torch.device,
    ) -> None:
        self._at, self._key_at = at, key_at
        self._at_there, self._key_at_there = at.to(device), key_at.to(device)
        self._window = window
        self._slopes = slopes
        self._device = device
        self._num_rows = len(at)
        widest = len(key_at) if window is None else min(len(key_at), window + _BLOCK_ROWS)
        num_heads = 1 if slopes is None else slopes.shape[0]
        fitting = _MASK_NUMBERS // (num_heads * max(widest, 1))
        self._blocks = list(self._cut(min(max(fitting, 1), _BLOCK_ROWS)))
        self._kept: dict[int, torch.Tensor] = {}
        self._num_kept = 0

    @property
    def is_blind(self) -> bool:
        """Whether no query sees any key."""
        return not self._blocks

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Sight``."""
        out, lse = None, None
        mask, mask_of = None, None
        for block in self._blocks:
            if block.mask != mask_of:
                mask = None if block.mask is None else self._mask(block.mask)
                mask_of = block.mask
            part = attend_piece(
                queries[:, :, block.rows],
                keys[:, :, block.keys],
                values[:, :, block.keys],
                scaling=scaling,
                mask=mask,
                softcap=softcap,
            )
            if block.sees_nothing is not None:
                part = seen_or_nothing(*part, block.sees_nothing)
            if part[1].shape[2] == self._num_rows:
                return part
            if out is None or lse is None:
                out, lse = _nothing(queries, values)
            out[:, :, block.rows], lse[:, :, block.rows] = part
        return _nothing(queries, values) if out is None or lse is None else (out, lse)

    def _cut(self, num_rows: int) -> Iterator[_Block]:
        number, first_alike, before = 0, 0, torch.empty(0)
        for start in range(0, self._num_rows, num_rows):
            rows = slice(start, min(start + num_rows, self._num_rows))
            at = self._at[rows]
            is_near = self._key_at <= at.max()
            if self._window is not None:
                is_near &= self._key_at > at.min() - self._window
            near = is_near.nonzero()
            if not len(near):
                continue
            keys = slice(int(near[0]), int(near[-1]) + 1)
            distance = self._at[rows, None] - self._key_at[keys]
            is_hidden = self._is_hidden(distance)
            # Along a prompt without gaps all blocks look alike: their masks are one.
            look = is_hidden if self._slopes is None else distance
            has_own_slopes = self._slopes is not None and self._slopes.shape[1] > 1
            if has_own_slopes or not torch.equal(look, before):
                first_alike, before = number, look
            sees_nothing = is_hidden.all(1)
            yield _Block(
                rows,
                keys,
                first_alike if self._slopes is not None or is_hidden.any() else None,
                sees_nothing.to(self._device) if sees_nothing.any() else None,
            )
            number += 1

    def _is_hidden(self, distance: torch.Tensor) -> torch.Tensor:
        is_hidden = distance < 0
        return is_hidden if self._window is None else is_hidden | (distance >= self._window)

    def _mask(self, number: int) -> torch.Tensor:
        if number in self._kept:
            return self._kept[number]
        rows, keys = self._blocks[number].rows, self._blocks[number].keys
        distance = self._at_there[rows, None] - self._key_at_there[keys]
        is_hidden = self._is_hidden(distance)
        if self._slopes is None:
            mask = torch.zeros(is_hidden.shape, device=self._device)[None, None]
        else:
            slopes = self._slopes[:, rows] if self._slopes.shape[1] > 1 else self._slopes
            mask = (distance.to(torch.float32) * -slopes[..., None])[None]
        mask.masked_fill_(is_hidden, float("-inf"))
        if self._num_kept + mask.numel() <= _MASK_NUMBERS:
            self._kept[number] = mask
            self._num_kept += mask.numel()
        return mask


class Fading:
    """Queries behind a piece of which they see everything, under linear biases.

    Args:
        at: ``[num_queries]``, position IDs of the queries, none before the piece's last key.
        key_at: ``[num_keys]``, those of the keys, rising.
        slopes: ``[num_heads]``, float32, on the model's device.
    """

    def __init__(self, at: torch.Tensor, key_at: torch.Tensor, slopes: torch.Tensor) -> None:
        self._bias = _biases(key_at[-1] - key_at, slopes)[None, :, None]
        self._lse = _biases(at - key_at[-1], slopes)

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Sight``."""
        out, lse = attend_piece(
            queries, keys, values, scaling=scaling, mask=self._bias, softcap=softcap
        )
        return out, lse + self._lse


class FadingCausal:
    """Fresh tokens that see those before them, and themselves, under linear biases.

    Args:
        position_ids: Of the tokens, rising.
        slopes: ``[num_heads]``, float32, on the model's device.
    """

    def __init__(self, position_ids: Sequence[int], slopes: torch.Tensor) -> None:
        self._at = torch.tensor(position_ids, device=slopes.device)
        self._slopes = slopes
        self._blocks: list[slice] = []
        start = 0
        for end in range(1, len(position_ids) + 1):
            is_last = end == len(position_ids)
            if is_last or position_ids[end] - position_ids[start] >= _FADING_SPAN:
                self._blocks.append(slice(start, end))
                start = end

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Sight``."""
        outs, lses = [], []
        for rows in self._blocks:
            at, block = self._at[rows], queries[:, :, rows]
            out, lse = attend_piece(
                block,
                keys[:, :, rows],
                values[:, :, rows],
                scaling=scaling,
                is_causal=True,
                mask=_biases(at[-1] - at, self._slopes)[None, :, None],
                softcap=softcap,
            )
            lse = lse + _biases(at - at[-1], self._slopes)
            if rows.start:
                before = slice(0, rows.start)
                sight = Fading(at, self._at[before], self._slopes)
                part = sight.attend(
                    block, keys[:, :, before], values[:, :, before],
                    scaling=scaling, softcap=softcap,
                )  # fmt: skip
                out, lse = _merged(out, lse, *part)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two pieces; every query sees the first."""
    weight = torch.sigmoid(other_lse - lse)[..., None]
    merged = torch.lerp(out.to(torch.float32), other.to(torch.float32), weight)
    return merged.to(out.dtype), torch.logaddexp(lse, other_lse)


def _biases(distance: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """``[num_heads, num_distances]``: what scores over these distances are raised by."""
    return distance.to(slopes.device, torch.float32) * -slopes[:, None]


def _nothing(queries: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries that see nothing get."""
    lead = queries.shape[:3]
    out = queries.new_zeros((*lead, values.shape[-1]))
    return out, queries.new_full(lead, float("-inf"), dtype=torch.float32)
