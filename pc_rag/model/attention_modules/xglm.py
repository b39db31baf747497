"""XGLM: separate projections; its model adds positions, sinusoids, to the embeddings."""

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
    """``XGLMAttention.forward`` through the running pass.

    Args:
        module: The ``XGLMAttention``.
        hidden_states: ``[batch_size, num_tokens, hidden_size]``, normalised.
    """
    return attend_projected(module, hidden_states, layer=module.layer_idx, scaling=module.scaling)


XGLM = OwnAttention(("transformers.models.xglm.modeling_xglm.XGLMAttention",), forward)
