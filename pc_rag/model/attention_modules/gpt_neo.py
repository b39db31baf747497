"""GPT-Neo: scores that are not scaled; windows in local layers, which the pass knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pc_rag.model.attention_modules.base import OwnAttention, attend_projected

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
    return attend_projected(module, hidden_states, layer=module.layer_id, scaling=1.0)


GPT_NEO = OwnAttention(
    (
        "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention",
        "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoFlashAttention2",
    ),
    forward,
)
