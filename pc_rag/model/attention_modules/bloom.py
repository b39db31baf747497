"""BLOOM: queries, keys and values interleaved by head; ALiBi, which the pass adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import functional

from pc_rag.model.attention_modules.base import OwnAttention, merge_heads, running_pass

if TYPE_CHECKING:
    import torch


def forward(
    module: Any,  # noqa: ANN401 - transformers is untyped here
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """``BloomAttention.forward`` through the running pass.

    Args:
        module: The ``BloomAttention``.
        hidden_states: ``[batch_size, num_tokens, hidden_size]``, normalised.
        residual: Alike; added to the result.
    """
    running = running_pass(module)
    fused = module.query_key_value(hidden_states)
    by_head = fused.view(*fused.shape[:2], module.num_heads, 3, module.head_dim)
    queries, keys, values = by_head.transpose(1, 2).unbind(3)
    scaling = module.inv_norm_factor
    merged = merge_heads(running.attend(module.layer_idx, queries, keys, values, scaling=scaling))
    if module.pretraining_tp > 1 and module.slow_but_exact:
        # transformers sums the product slice by slice there, and leaves the bias out
        out = functional.linear(merged, module.dense.weight)
    else:
        out = module.dense(merged)
    return residual + out, None


BLOOM = OwnAttention(
    ("transformers.models.bloom.modeling_bloom.BloomAttention",), forward, takes_positions=False
)
