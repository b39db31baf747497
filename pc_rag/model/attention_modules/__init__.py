"""Attention code for architectures that transformers' attention interface does not reach."""

from pc_rag.model.attention_modules.base import OwnAttention, RunningPass, carry, running_pass
from pc_rag.model.attention_modules.swapping import (
    instance_attributes,
    own_attention_of,
    swapped_forwards,
)

__all__ = [
    "OwnAttention",
    "RunningPass",
    "carry",
    "instance_attributes",
    "own_attention_of",
    "running_pass",
    "swapped_forwards",
]
