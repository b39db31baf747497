"""XGLM: separate projections; its model adds positions, sinusoids, to the embeddings."""

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
    """``XGLMAttention.forward`` through the running pass.

    Args:
        module: The ``XGLMAttention``.
        hidden_states: ``[batch_size, num_tokens, hidden_size]``, normalised.
    """
    running = running_pass(module)
    queries, keys, values = (
        split_heads(project(hidden_states), module.num_heads)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    scaling = module.scaling
    out = running.attend(module.layer_idx, queries, keys, values, scaling=scaling)
    return module.out_proj(merge_heads(out)), None


XGLM = OwnAttention(("transformers.models.xglm.modeling_xglm.XGLMAttention",), forward)
