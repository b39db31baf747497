"""MPT: one fused projection, possibly clipped; ALiBi, which the pass adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pc_rag.model.attention_modules.base import (
    OwnAttention,
    merge_heads,
    running_pass,
    split_heads,
)

if TYPE_CHECKING:
    import torch


def forward(
    module: Any,  # noqa: ANN401 - transformers is untyped here
    hidden_states: torch.Tensor,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """``MptAttention.forward`` through the running pass.

    Args:
        module: The ``MptAttention``.
        hidden_states: ``[batch_size, num_tokens, hidden_size]``, normalised.
    """
    running = running_pass(module)
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    queries, keys, values = (split_heads(each, module.n_heads) for each in fused.chunk(3, dim=-1))
    scaling = module.softmax_scale
    out = running.attend(module.layer_idx, queries, keys, values, scaling=scaling)
    return module.out_proj(merge_heads(out)), None


MPT = OwnAttention(
    ("transformers.models.mpt.modeling_mpt.MptAttention",),
    forward,
    takes_positions=False,
    takes_mask=True,
)
