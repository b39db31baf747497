"""A forward pass that computes attention the slow way and keeps what each layer handed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """What one layer handed to attention.

    Attributes:
        keys: ``[num_kv_heads, num_tokens, key_dim]``, position-encoded.
        values: ``[num_kv_heads, num_tokens, value_dim]``.
        num_heads: Query heads.
        scaling: Factor on the scores.
        softcap: Bound that scores are squashed into; ``None`` where they are not.
        sinks: ``[num_heads]`` logits that join the softmax; ``None`` where there are none.
        window: Window that the call itself names; ``None`` where it names none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    num_heads: int
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    window: int | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``num_heads, num_kv_heads, key_dim, value_dim``."""
        return self.num_heads, self.keys.shape[0], self.keys.shape[-1], self.values.shape[-1]


class CallRecorder:
    """Stands where an ``AttentionPass`` stands; for one short text at consecutive position IDs.

    Args:
        windows: Of each layer; ``None`` where every layer sees all before it.
        slopes: Of ALiBi, ``[num_heads]``; ``None`` where scores are not biased.

    Attributes:
        calls: By layer.
        num_layers_served: As of an ``AttentionPass``.
    """

    def __init__(
        self, *, windows: Sequence[int | None] | None = None, slopes: torch.Tensor | None = None
    ) -> None:
        self._windows = windows
        self._slopes = slopes
        self._named_windows: dict[int, int | None] = {}
        self.calls: dict[int, LayerCall] = {}
        self.num_layers_served = 0

    def note_window(self, layer: int, window: int | None) -> None:
        """Take the window that a layer's call names, ahead of the call."""
        self._named_windows[layer] = window

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
        """Keep the call, and compute causal attention in float32.

        Args:
            layer: Index of the layer.
            queries: ``[1, num_heads, num_tokens, key_dim]``.
            keys: ``[1, num_kv_heads, num_tokens, key_dim]``.
            values: ``[1, num_kv_heads, num_tokens, value_dim]``.
            scaling: Factor on the scores.
            softcap: See ``LayerCall``.
            sinks: See ``LayerCall``.

        Returns:
            ``[1, num_heads, num_tokens, value_dim]`` in the dtype of ``queries``.
        """
        self.num_layers_served += 1
        self.calls[layer] = LayerCall(
            keys=keys[0].clone(),
            values=values[0].clone(),
            num_heads=queries.shape[1],
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
            window=self._named_windows.get(layer),
        )
        num_repeats = queries.shape[1] // keys.shape[1]
        repeated_keys = keys.float().repeat_interleave(num_repeats, dim=1)
        repeated_values = values.float().repeat_interleave(num_repeats, dim=1)
        scores = queries.float() @ repeated_keys.mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        row = torch.arange(queries.shape[2], device=queries.device)
        distance = row[:, None] - row
        if self._slopes is not None:
            scores = scores - self._slopes[:, None, None].to(scores.device) * distance
        window = self._windows[layer] if self._windows else None
        is_hidden = (distance < 0) | (distance >= window) if window else distance < 0
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        return (weights @ repeated_values).to(queries.dtype)
