"""The slopes of ALiBi as the architectures that use it form them, each a little differently."""

from __future__ import annotations

import math

import torch


def bloom_slopes(num_heads: int) -> torch.Tensor:
    """Slopes of BLOOM: a geometric series, and between its members those of heads that remain.

    The construction of the ALiBi paper (arXiv 2108.12409, section 3) for any number of heads.

    Args:
        num_heads: Query heads.

    Returns:
        ``[num_heads]``, float32, per position ID, behind the scaling of scores.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = _series(whole)
    if whole < num_heads:
        slopes = torch.cat((slopes, _series(2 * whole)[::2][: num_heads - whole]))
    return slopes


def falcon_slopes(num_heads: int, head_dim: int) -> torch.Tensor:
    """Slopes of Falcon: BLOOM's, rounded to bfloat16, added before scores are scaled.

    Args:
        num_heads: Query heads.
        head_dim: Channels of a head.

    Returns:
        As ``bloom_slopes``; the scaling, by which Falcon divides scores and biases, is in them.
    """
    return bloom_slopes(num_heads).bfloat16().float() / math.sqrt(head_dim)


def mpt_slopes(num_heads: int, bias_max: float = 8) -> torch.Tensor:
    """Slopes of MPT: one series over the next power of two; of it the even ones first.

    Args:
        num_heads: Query heads.
        bias_max: Binary logarithm of the smallest slope's inverse.

    Returns:
        As ``bloom_slopes``.
    """
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = _series(whole, bias_max)
    if whole > num_heads:
        slopes = torch.cat((slopes[1::2], slopes[::2]))[:num_heads]
    return slopes


def _series(num_slopes: int, bias_max: float = 8) -> torch.Tensor:
    exponents = torch.arange(1, num_slopes + 1, dtype=torch.float64) * (bias_max / num_slopes)
    return torch.pow(2.0, -exponents).float()
