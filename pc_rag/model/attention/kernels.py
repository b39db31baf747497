"""Attention over one piece of KV by a kernel that also gives the log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from pc_rag.errors import ModelError

_BLOCK_ROWS = 512
"""Most queries per block where scores are materialised."""

_BLOCK_SCORES = 1 << 25
"""Most scores of a block of more than one query, so that memory stays bounded."""

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - the public function drops the log-sum-exp


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How a layer makes weights of products of queries and keys.

    Attributes:
        scaling: Factor on the scores.
        softcap: Where given, scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[num_heads]``: logits that every query weighs against its scores, with no value
            behind them.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attend_piece(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one piece of KV, with the log-sum-exp that merging needs.

    Args:
        queries: ``[batch_size, num_heads, num_queries, head_dim]``.
        keys: ``[batch_size or 1, num_heads, num_keys, head_dim]``; any strides.
        values: ``[batch_size or 1, num_heads, num_keys, value_dim]``.
        scaling: Factor on the scores.
        is_causal: Whether query ``i`` sees keys up to ``i`` only.
        mask: Added to the scores, ``[batch_size or 1, num_heads or 1, num_queries or 1, num_keys]``
            in float32 or the dtype of ``queries``: minus infinity where a query does not see a key.
            Keys and values must be finite there, too. A query that sees nothing at all comes out
            as the kernel likes; see ``seen_or_nothing``.
        softcap: Where given, scores are ``softcap * tanh(score / softcap)`` before the mask.

    Returns:
        Output ``[batch_size, num_heads, num_queries, value_dim]`` and log-sum-exp
        ``[batch_size, num_heads, num_queries]`` in float32.
    """
    if keys.shape[0] != queries.shape[0]:
        keys = keys.expand(queries.shape[0], -1, -1, -1)
        values = values.expand(queries.shape[0], -1, -1, -1)
    if softcap is None and queries.device.type == "cpu":
        key_dim, value_dim = keys.shape[-1], values.shape[-1]
        if key_dim == value_dim:
            out, lse = _flash_on_cpu(
                queries, keys, values, 0.0, is_causal, attn_mask=mask, scale=scaling
            )
            return out, lse
        if value_dim < key_dim and queries.shape[2] > 1:
            # Copying the values costs less than materialised scores do, but for a lone query.
            padded = functional.pad(values, (0, key_dim - value_dim))
            out, lse = _flash_on_cpu(
                queries, keys, padded, 0.0, is_causal, attn_mask=mask, scale=scaling
            )
            return out[..., :value_dim], lse
    return attend_by_blocks(
        queries, keys, values, scaling=scaling, is_causal=is_causal, mask=mask, softcap=softcap
    )


def attend_by_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend_piece`` for every device: scores are materialised, a block of queries at a time."""
    dtype = queries.dtype
    if queries.device.type == "cpu":  # whose matrix products are slow in less than 32 bits
        queries, keys, values = (x.to(torch.float32) for x in (queries, keys, values))
    batch_size, num_heads, num_queries, _ = queries.shape
    num_keys = keys.shape[2]
    fitting = _BLOCK_SCORES // max(batch_size * num_heads * num_keys, 1)
    num_rows = max(1, min(_BLOCK_ROWS, fitting))
    outs, lses = [], []
    for start in range(0, num_queries, num_rows):
        rows = slice(start, min(start + num_rows, num_queries))
        seen = slice(0, min(rows.stop, num_keys) if is_causal else num_keys)
        scores = (queries[:, :, rows] @ keys[:, :, seen].transpose(-1, -2)).to(torch.float32)
        scores *= scaling
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if is_causal:
            row = torch.arange(rows.start, rows.stop, device=queries.device)
            column = torch.arange(seen.stop, device=queries.device)
            scores.masked_fill_(column > row[:, None], float("-inf"))
        if mask is not None:
            scores += mask[:, :, rows if mask.shape[2] > 1 else slice(None), seen]
        lse = scores.logsumexp(dim=-1)
        weights = scores.sub_(lse[..., None]).exp_().to(values.dtype)
        outs.append((weights @ values[:, :, seen]).to(dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def seen_or_nothing(
    out: torch.Tensor, lse: torch.Tensor, sees_nothing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output 0 and log-sum-exp minus infinity for queries that see no key at all.

    Kernels disagree about them, or give NaN.

    Args:
        out: ``[batch_size, num_heads, num_queries, value_dim]``.
        lse: ``[batch_size, num_heads, num_queries]``.
        sees_nothing: Which queries, of a shape that broadcasts to that of ``lse``.
    """
    return out.masked_fill(sees_nothing[..., None], 0), lse.masked_fill(sees_nothing, float("-inf"))


def weigh_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The output where every query also weighs a logit that no value belongs to.

    Args:
        out: ``[..., value_dim]``, of all that the query sees.
        lse: ``[...]``, its log-sum-exp.
        sinks: The logits, of a shape that broadcasts to that of ``lse``.
    """
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype)


def check_heads(layer: int, queries: torch.Tensor, keys: torch.Tensor, num_kv_heads: int) -> None:
    """Check that a layer's heads are those that its KV is kept for.

    Kernels divide by the number of heads that share a KV head, and one head too few would be
    stored as if it were all.

    Args:
        layer: Index of the layer.
        queries: ``[batch_size, num_heads, num_tokens, head_dim]``.
        keys: ``[batch_size, num_kv_heads, num_tokens, head_dim]``.
        num_kv_heads: That are kept.

    Raises:
        ModelError: They are others, or query heads cannot be shared out among them.
    """
    num_heads = queries.shape[1]
    if keys.shape[1] == num_kv_heads and num_heads >= num_kv_heads and not num_heads % num_kv_heads:
        return
    raise ModelError(
        f"layer {layer} attends with {num_heads} query heads and {keys.shape[1]} KV heads; its "
        f"KV is kept for {num_kv_heads} heads, of which each serves as many query heads. All "
        "layers of a model need the same KV heads: use another model"
    )


def repeat_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[batch, num_kv_heads, ...]`` repeated to ``num_heads`` heads."""
    group_size = num_heads // states.shape[1]
    return states if group_size == 1 else states.repeat_interleave(group_size, dim=1)
