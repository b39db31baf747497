"""Stock transformers made to attend by position ID: for the reference, and for it alone.

A stock forward pass takes its causal order, its windows and its ALiBi distances from rows. Here the
functions that make masks and biases are replaced while a pass runs, by ones that make them from
position IDs and from any dense mask. Everything else of the model runs as it is.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    _Replacement = tuple[Any, str, Callable[..., Any]]

_INTERLEAVED = frozenset({"cohere", "cohere2", "deepseek_v2", "gptj"})
"""Model types whose rotated pairs are neighbouring channels, as their papers have it."""

_LEARNED = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "opt"})


@contextmanager
def attending(
    model: Any, queries_at: Sequence[int], keys_at: Sequence[int], mask: torch.Tensor
) -> Iterator[None]:
    """While this is open, the model attends by position ID.

    Args:
        model: Of transformers.
        queries_at: Position IDs of the tokens of the pass.
        keys_at: Position IDs of what its cache holds, and of the tokens behind it.
        mask: ``[num_queries, num_keys]``, true where a query sees a key, windows left aside.
    """
    distances = torch.tensor(list(queries_at))[:, None] - torch.tensor(list(keys_at))[None, :]
    blocked = torch.finfo(model.dtype).min

    def dense(*_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, blocked)[None, None]

    def windowed(*, config: Any, **_: Any) -> torch.Tensor:
        return dense().masked_fill(distances >= config.sliding_window, blocked)

    modeling = sys.modules[type(model).__module__]
    with ExitStack() as stack:
        for owner, name, function in (
            (modeling, "create_causal_mask", dense),
            (modeling, "create_sliding_window_causal_mask", windowed),
            *_old_masks(modeling, model, dense),
        ):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, function))
        for name, slopes in _slopes(modeling, model):
            biases = (-slopes[:, None, None] * distances).to(model.dtype)
            stack.enter_context(patch.object(modeling, name, lambda *_, _b=biases, **__: _b))
        for module in model.modules():
            if type(module).__name__ == "GPTNeoSelfAttention":
                stack.enter_context(patch.object(module, "bias", _local(module, mask, distances)))
        yield


def _old_masks(modeling: Any, model: Any, dense: Callable[..., Any]) -> Iterator[_Replacement]:
    """How some models made masks before transformers did it in one place for all (5.0)."""
    yield modeling, "_prepare_4d_causal_attention_mask", dense
    for module in model.modules():
        yield module, "_prepare_4d_causal_attention_mask_with_cache_position", dense
    converter = getattr(modeling, "AttentionMaskConverter", None)
    yield converter, "_ignore_causal_mask_sdpa", lambda *_, **__: False


def _slopes(modeling: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What the model's own functions lower a score by per row of distance, ``[num_heads]``."""
    num_heads = model.config.num_attention_heads
    if hasattr(modeling, "build_alibi_tensor"):
        two = torch.ones(1, 2, dtype=torch.long)
        biases = modeling.build_alibi_tensor(two, num_heads, torch.float32)[:, 0]
        yield "build_alibi_tensor", biases[:, 1] - biases[:, 0]
    if hasattr(modeling, "build_mpt_alibi_tensor"):
        biases = modeling.build_mpt_alibi_tensor(
            num_heads, 2, model.config.attn_config.alibi_bias_max
        )[:, 0]
        yield "build_mpt_alibi_tensor", biases[:, 1] - biases[:, 0]


def _local(module: Any, mask: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """The mask of one attention of GPT-Neo, which cuts the last rows out of a square."""
    num_queries, num_keys = mask.shape
    square = torch.ones(num_keys, num_keys, dtype=torch.bool)
    local = distances < module.config.window_size
    square[num_keys - num_queries :] = mask & local if module.attention_type == "local" else mask
    return square[None, None]


def frequencies(model: Any, layer: int) -> torch.Tensor | None:
    """Radians per position ID of a layer's rotated pairs, float64; ``None`` where none is."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    is_full = kinds is not None and kinds[layer] == "full_attention"
    no_rope = (
        config.model_type in ("mpt", "bloom")
        or (config.model_type == "falcon" and config.alibi)
        or (config.model_type == "smollm3" and not config.no_rope_layers[layer])
        or (config.model_type in ("cohere2", "exaone4") and is_full)
    )
    if no_rope:
        return None
    buffers = {name.rsplit(".", maxsplit=1)[-1]: value for name, value in model.named_buffers()}
    if kinds is not None and f"{kinds[layer]}_inv_freq" in buffers:
        return buffers[f"{kinds[layer]}_inv_freq"].double()
    if "inv_freq" in buffers:
        return buffers["inv_freq"].double()
    channels = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64)  # GPT-J: no buffer
    return 10000.0 ** (-channels / config.rotary_dim)


def has_learned_positions(model: Any) -> bool:
    """Whether positions are rows of a table, added to the embeddings."""
    return model.config.model_type in _LEARNED


def is_interleaved(model: Any) -> bool:
    """Whether rotated pairs are neighbouring channels where keys are stored."""
    return model.config.model_type in _INTERLEAVED


def has_latent_cache(model: Any, keys: torch.Tensor) -> bool:
    """Whether the cache of multi-head latent attention holds latents, and rotated channels apart.

    Old versions of transformers store expanded keys and values instead.
    """
    return keys.shape[-1] == getattr(model.config, "kv_lora_rank", None)
