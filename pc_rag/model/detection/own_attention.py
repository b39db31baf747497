"""What the model computes by itself, with its own attention: the truth that others are held to."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pc_rag.model.hf_attention import model_lock
from pc_rag.model.positions.frozen_rope import held

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.model.positions.frozen_rope import FrozenRope


def own_logits(
    model: Any,  # noqa: ANN401 - transformers is untyped here
    token_ids: torch.Tensor,
    *,
    num_last: int,
    frozen: FrozenRope | None,
    window: int | None = None,
) -> torch.Tensor:
    """Logits of a text by the model's configured attention, at position IDs from 0 on.

    Args:
        model: In evaluation mode.
        token_ids: ``[1, num_tokens]``, on any device.
        num_last: Tokens at the end whose logits are wanted.
        frozen: Frequencies to hold.
        window: The size that sliding windows are lowered to meanwhile; ``None`` leaves them.

    Returns:
        ``[1, num_last, vocab_size]`` in the model's dtype.
    """
    token_ids = token_ids.to(model.device)
    arguments: dict[str, Any] = {}
    if getattr(model.config, "alibi", False):
        # Falcon's code multiplies slopes and places of the mask in bfloat16, which depends on where
        # a text stands. A mask in float32 gives the biases that its slopes define.
        arguments["attention_mask"] = torch.ones_like(token_ids, dtype=torch.float32)
    with torch.inference_mode(), model_lock(model), held(frozen), _lowered(model, window):
        logits: torch.Tensor = model(
            input_ids=token_ids, use_cache=False, return_dict=True, **arguments
        ).logits
    return logits[:, -num_last:]


def can_lower(model: Any) -> bool:  # noqa: ANN401 - as above
    """Whether the model's sliding windows are all where ``own_logits`` can lower them."""
    return bool(getattr(model.config, "sliding_window", None))


@contextmanager
def _lowered(model: Any, window: int | None) -> Iterator[None]:  # noqa: ANN401 - as above
    """Let the model's sliding windows be smaller meanwhile: its masks and kernels read these."""
    former = getattr(model.config, "sliding_window", None)
    if window is None or not former:
        yield
        return
    holders = [
        holder
        for holder in (model.config, *model.modules())
        if getattr(holder, "sliding_window", None) == former
    ]
    for holder in holders:
        holder.sliding_window = window
    try:
        yield
    finally:
        for holder in holders:
            holder.sliding_window = former
