"""GPT-Neo: scores that are not scaled; windows in local layers, which the pass knows."""

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
    """``GPTNeoSelfAttention.forward`` through the running pass.

    Args:
        module: The ``GPTNeoSelfAttention``.
        hidden_states: ``[batch_size, num_tokens, hidden_size]``, normalised.
    """
    running = running_pass(module)
    queries, keys, values = (
        split_heads(project(hidden_states), module.num_heads)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    out = running.attend(module.layer_id, queries, keys, values, scaling=1.0)
    return module.out_proj(merge_heads(out)), None


GPT_NEO = OwnAttention(
    (
        "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention",
        "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoFlashAttention2",
    ),
    forward,
)
