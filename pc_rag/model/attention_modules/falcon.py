"""Falcon: three layouts of one fused projection; RoPE, or ALiBi, which the pass adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pc_rag.model.attention_modules.base import OwnAttention, merge_heads, running_pass

if TYPE_CHECKING:
    from collections.abc import Iterable


def forward(
    module: Any,  # noqa: ANN401 - transformers is untyped here
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None = None,
    *_: object,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """``FalconAttention.forward`` through the running pass.

    Args:
        module: The ``FalconAttention``.
        hidden_states: ``[batch_size, num_tokens, hidden_size]``, normalised.
        alibi: Whether there is one says whether queries and keys are rotated.
        position_embeddings: Cosines and sines, each ``[1 or batch_size, num_tokens, head_dim]``.
    """
    running = running_pass(module)
    queries, keys, values = _split(module, module.query_key_value(hidden_states))
    if alibi is None and position_embeddings is not None:
        cosines, sines = (each.unsqueeze(1) for each in position_embeddings)
        queries, keys = (_rotate(each, cosines, sines) for each in (queries, keys))
    scaling = module.inv_norm_factor
    out = running.attend(module.layer_idx, queries, keys, values, scaling=scaling)
    return module.dense(merge_heads(out)), None


def _split(module: Any, fused: torch.Tensor) -> Iterable[torch.Tensor]:  # noqa: ANN401 - as above
    """Queries, keys and values, each ``[batch_size, num_(kv_)heads, num_tokens, head_dim]``.

    new decoder     q q q q k v  q q q q k v     a group of queries before the KV head they share
    multi-query     q q q q q q q q k v          one group
    multi-head      q k v  q k v  q k v          groups of one

    So all three are groups, and keys and values are not repeated, as transformers repeats them.
    """
    if module.new_decoder_architecture:
        num_groups = module.num_kv_heads
    else:
        num_groups = 1 if module.multi_query else module.num_heads
    group_size = module.num_heads // num_groups
    groups = fused.view(*fused.shape[:2], num_groups, group_size + 2, module.head_dim)
    parts = (groups[:, :, :, :-2], groups[:, :, :, -2:-1], groups[:, :, :, -1:])
    return (part.flatten(2, 3).transpose(1, 2) for part in parts)


def _rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat((-second, first), dim=-1) * sines


FALCON = OwnAttention(
    (
        "transformers.models.falcon.modeling_falcon.FalconAttention",
        "transformers.models.falcon.modeling_falcon.FalconFlashAttention2",
    ),
    forward,
)
