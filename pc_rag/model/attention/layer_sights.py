"""Makes what tokens see in the layers of one kind, from the position IDs of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pc_rag.model.attention.sights import Band, Fading, FadingCausal
from pc_rag.model.positions import Alibi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.attention.sights import Sight
    from pc_rag.model.positions import LayerAttention


@dataclass(frozen=True, slots=True, eq=False)
class LayerSights:
    """The layers of one kind in one pass.

    Attributes:
        window: Position IDs that a token sees back to; ``None`` where no window hides anything.
        slopes: ``[num_heads]``, of linear biases, float32, on the model's device.
        group_size: Query heads of a KV head. Queries of stored KV are stacked by it, token by
            token.
        device: Of the model.
    """

    window: int | None
    slopes: torch.Tensor | None
    group_size: int
    device: torch.device

    @classmethod
    def of(
        cls, kind: LayerAttention, *, reach: int, group_size: int, device: torch.device
    ) -> LayerSights:
        """Those of a kind.

        Args:
            kind: Of the layers.
            reach: Most position IDs that any token of the pass is behind any key, its own place
                included: a window of as many hides nothing.
            group_size: See the class.
            device: Of the model.
        """
        window = kind.window if kind.window is not None and kind.window < reach else None
        slopes = kind.encoding.slopes.to(device) if isinstance(kind.encoding, Alibi) else None
        return cls(window, slopes, group_size, device)

    @property
    def are_plain(self) -> bool:
        """Whether the causal order is all there is."""
        return self.window is None and self.slopes is None

    def band(self, at: torch.Tensor, key_at: torch.Tensor) -> Band:
        """Of tokens, stacked, over keys wherever those stand.

        Args:
            at: ``[num_tokens]``, position IDs, on the CPU.
            key_at: ``[num_keys]``, alike.
        """
        slopes = self.slopes
        if slopes is not None:  # the heads of a group take turns from row to row
            slopes = slopes.reshape(-1, self.group_size).repeat(1, len(at))
        stacked = at.repeat_interleave(self.group_size)
        return Band(stacked, key_at, window=self.window, slopes=slopes, device=self.device)

    def behind(self, at: torch.Tensor, key_at: torch.Tensor) -> Sight | None:
        """Of tokens, stacked, over keys that all stand before all of them; see ``band``.

        Returns:
            ``None`` where all see everything.
        """
        if self.are_plain:
            return None
        if self.slopes is None or self.window is not None or self.group_size > 1:
            return self.band(at, key_at)
        return Fading(at, key_at, self.slopes)

    def own(self, position_ids: Sequence[int]) -> Sight | None:
        """Of fresh tokens among themselves, their heads apart.

        Args:
            position_ids: Rising.

        Returns:
            ``None`` for plain causal order.
        """
        is_cut = self.window is not None and position_ids[-1] - position_ids[0] >= self.window
        if self.slopes is None and not is_cut:
            return None
        if self.slopes is not None and not is_cut:
            return FadingCausal(position_ids, self.slopes)
        at = torch.tensor(position_ids)
        slopes = None if self.slopes is None else self.slopes[:, None]
        return Band(at, at, window=self.window, slopes=slopes, device=self.device)
