"""A pass that attends by the book: one dense softmax, no stored KV, nothing clever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pc_rag.model.positions import Alibi

if TYPE_CHECKING:
    from pc_rag.model.positions import ModelPositions


class DensePass:
    """Fresh tokens that attend each other causally, all of them computed in this pass.

    Attributes:
        num_layers_served: Layers that attended so far.
        keys: For each layer, what it handed on.
        values: Alike.
    """

    def __init__(self, positions: ModelPositions) -> None:
        self._positions = positions
        self.num_layers_served = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``RunningPass.attend``."""
        self.num_layers_served += 1
        self.keys[layer], self.values[layer] = keys, values
        group_size = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group_size, 1) for each in (keys, values))
        scores = queries @ keys.transpose(-1, -2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        steps = torch.arange(queries.shape[2])
        distances = steps[:, None] - steps
        attention = self._positions.layers[layer]
        if isinstance(attention.encoding, Alibi):
            scores = scores - attention.encoding.slopes[:, None, None] * distances
        hidden = distances < 0
        if attention.window is not None:
            hidden |= distances >= attention.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1)[..., : queries.shape[2]]
        return weights @ values
