"""Which rotations a model could use: candidates from the tensors that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pc_rag.model.positions import Rope, RopeStyle
from pc_rag.model.positions.frozen_rope import held

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.model.positions.frozen_rope import FrozenRope

_CIRCLE_TOLERANCE = 1e-2
"""How far sine and cosine of a table may lie from the unit circle; half precision is coarse."""


def rotations(model: Any, head_dim: int, frozen: FrozenRope | None) -> list[Rope]:  # noqa: ANN401 - transformers is untyped
    """Every rotation of keys that the model's frequencies allow.

    Pairs of either style; from the first channel of a head, or of its last ones; forward, as nearly
    all models turn, or backward.

    Args:
        model: The model; its buffers are read.
        head_dim: Channels of a key.
        frozen: Its frequencies, where they would change.
    """
    with held(frozen):
        frequencies = _frequencies(model)
    return [
        Rope(direction * inv_freq, style, first_channel)
        for inv_freq in frequencies
        if 2 * inv_freq.shape[0] <= head_dim
        for first_channel in sorted({0, head_dim - 2 * inv_freq.shape[0]})
        for direction in (1, -1)
        for style in RopeStyle
    ]


def _frequencies(model: Any) -> list[torch.Tensor]:  # noqa: ANN401 - as above
    """Distinct ``[rotary_dim / 2]`` radians per position ID, float32."""
    distinct: list[torch.Tensor] = []
    for inv_freq in _proposals(model):
        is_known = any(
            known.shape == inv_freq.shape and torch.equal(known, inv_freq) for known in distinct
        )
        if not is_known and inv_freq.numel() and bool(inv_freq.isfinite().all()):
            distinct.append(inv_freq)
    return distinct


def _proposals(model: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - as above
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point():
            continue
        if buffer.ndim == 1 and name.endswith("inv_freq"):
            yield buffer.detach().to(torch.float32, copy=True)
        elif _is_sine_table(buffer):
            yield _frequencies_of_table(buffer)


def _is_sine_table(table: torch.Tensor) -> bool:
    """Whether each row holds the sines of some angles and then their cosines, from angle zero."""
    if table.ndim != 2 or table.shape[0] <= 1 or table.shape[1] % 2:  # noqa: PLR2004 - rows and channels
        return False
    rows = table[:2].detach().float()
    sines, cosines = rows.chunk(2, dim=-1)
    off_circle = (sines.square() + cosines.square() - 1).abs().max()
    return bool(off_circle < _CIRCLE_TOLERANCE) and bool(
        (sines[0].abs().max() < _CIRCLE_TOLERANCE) and (sines[1].abs().max() > 0)
    )


def _frequencies_of_table(table: torch.Tensor) -> torch.Tensor:
    """Radians per position ID of a table of sines and cosines.

    The angle of position 1 gives them to the table's rounding. At twice the position the same
    rounding counts half, and what is known so far tells how often the angle went round.
    """
    sines, cosines = table.detach().to(torch.float64).chunk(2, dim=-1)
    angles = torch.atan2(sines, cosines)
    inv_freq = angles[1]
    position = 2
    while position < table.shape[0]:
        turns = ((inv_freq * position - angles[position]) / (2 * torch.pi)).round()
        inv_freq = (angles[position] + 2 * torch.pi * turns) / position
        position *= 2
    return inv_freq.to(torch.float32)
