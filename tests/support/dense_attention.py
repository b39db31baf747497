"""Attention by definition, for every kind of layer: one dense softmax in float64."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pc_rag.model.positions import Absent, Alibi, LayerAttention, Learned, ModelPositions, Rope

ROPE = Rope(torch.tensor([1.0, 0.3, 0.1, 0.01]))
"""Of heads of eight channels, as is the other."""
OTHER_ROPE = Rope(torch.tensor([0.5, 0.02]), first_channel=4)


def slopes(num_heads):
    """Linear biases as steep as those of real models, and some less so."""
    return 0.9 ** torch.arange(1.0, num_heads + 1)


def dense(queries, keys, values, distance, *, kind, scaling, softcap=None, sinks=None):
    """Attention by definition: all scores, bias and mask by distance, one softmax."""
    num_heads = queries.shape[1]
    keys, values = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (keys, values))
    scores = queries @ keys.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(kind.encoding, Alibi):
        scores = scores - kind.encoding.slopes.double()[:, None, None] * distance
    is_hidden = distance < 0
    if kind.window is not None:
        is_hidden = is_hidden | (distance >= kind.window)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., : keys.shape[2]] @ values


def draw_kinds(data, num_heads):
    """Three layers of one, two or three kinds."""
    kinds = []
    for _ in range(data.draw(st.integers(1, 3))):
        encoding = data.draw(
            st.sampled_from([ROPE, OTHER_ROPE, Absent(), Learned(), Alibi(slopes(num_heads))])
        )
        window = data.draw(st.sampled_from([None, 1, 2, 3, 6, 15, 1000]))
        kinds.append(LayerAttention(encoding, window))
    return ModelPositions(tuple(data.draw(st.sampled_from(kinds)) for _ in range(3)))
