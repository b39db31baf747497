"""A model's entries can stand where its least free layer allows."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from pc_rag.errors import LayoutError
from pc_rag.model.positions import (
    Absent,
    Alibi,
    LayerAttention,
    Learned,
    ModelPositions,
    Rope,
)
from pc_rag.types import Placement

ROPE, ABSENT, LEARNED = Rope(torch.tensor([1.0, 0.2])), Absent(), Learned()
ALIBI = Alibi(torch.tensor([0.5, 0.25]))


@pytest.mark.parametrize(
    ("encodings", "placement"),
    [
        ((ABSENT, ALIBI), Placement.FREE),
        ((ROPE, ABSENT), Placement.ROTATE),
        ((LEARNED, ABSENT), Placement.FIXED),
        ((LEARNED, ROPE, ALIBI), Placement.FIXED),
    ],
)
def test_placement_is_that_of_the_least_free_layer_when_layers_differ(encodings, placement):
    """Whatever the order of the layers."""
    for order in permutations(encodings):
        assert ModelPositions(tuple(map(LayerAttention, order))).placement is placement


def test_keys_of_every_layer_are_refused_when_one_of_them_cannot_move():
    """Nothing is moved in part; where nothing moves, nothing is copied."""
    positions = ModelPositions((LayerAttention(ROPE), LayerAttention(LEARNED)))
    keys = torch.ones(2, 1, 3, 4)
    assert positions.place(keys, 0) is keys
    with pytest.raises(LayoutError, match="5 position IDs from where it was encoded"):
        positions.place(keys, 5)
