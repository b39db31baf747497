"""Tails of a batch: blocks of like lengths, what they hold, and settling into them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.model.attention.kv_view import Segment
from pc_rag.model.batch.own import in_place_order
from pc_rag.model.batch.tails import allocate_tails
from pc_rag.model.buffer_pool import KVShape
from pc_rag.model.positions import Rope, uniform
from pc_rag.types import Span

SHAPE = KVShape(2, 3, 4, 6)
OPTIONS = {"dtype": torch.float32, "device": torch.device("cpu")}
ROPE = Rope(torch.tensor([1.0, 0.2]))
POSITIONS = uniform(ROPE, 2)


@given(st.lists(st.integers(1, 300), max_size=12))
def test_every_sequence_has_room_and_little_padding_when_lengths_differ(capacities):
    """No two share a slot, and a block is at most an eighth longer than what it holds."""
    tails = allocate_tails(SHAPE, capacities, **OPTIONS)
    assert len({(id(tail.block), tail.slot) for tail in tails}) == len(capacities)
    for tail, needed in zip(tails, capacities, strict=True):
        capacity = tail.block.keys.shape[3]
        assert needed <= capacity
        assert needed >= 0.875 * capacity
    blocks = {id(tail.block): tail.block for tail in tails}.values()
    assert sum(block.keys.shape[1] for block in blocks) == len(capacities)


def test_bytes_are_those_of_the_tokens_when_lengths_are_equal():
    """Nothing is rounded up."""
    tails = allocate_tails(SHAPE, [33, 33, 33], **OPTIONS)
    assert len({id(tail.block) for tail in tails}) == 1
    assert tails[0].block.num_bytes == 3 * 33 * SHAPE.bytes_per_token(torch.float32)


def test_neighbouring_slots_follow_each_other_in_place_order():
    """Block by block, slot by slot, whatever order the sequences are in."""
    tails = allocate_tails(SHAPE, [10, 100, 10, 100, 10], **OPTIONS)
    places = [(id(tails[n].block), tails[n].slot) for n in in_place_order(tails)]
    assert places == sorted(places)


def test_settled_rows_are_placed_keys_and_values_behind_each_other():
    """Copied once, rotated on the way; the stored tensors stay as they are."""
    shape = KVShape(2, 3, 4, 4)
    tail = allocate_tails(shape, [9, 9], **OPTIONS)[1]
    segments = []
    for seed, (size, start, shift) in enumerate([(4, 0, 0), (3, 8, 5)]):
        generator = torch.Generator().manual_seed(seed)
        keys, values = (torch.randn(2, 3, size, 4, generator=generator) for _ in range(2))
        segments.append(Segment(keys, values, Span(start, start + size), shift))
    before = [segment.keys.clone() for segment in segments]
    assert [tail.settle(segment, POSITIONS) for segment in segments] == [slice(0, 4), slice(4, 7)]
    assert tail.num_rows == 7
    keys = [segments[0].keys, ROPE.place(segments[1].keys, 5)]
    for layer in range(2):
        found_keys, found_values = tail.layer_kv(layer, slice(0, 7))
        assert torch.equal(found_keys[0], torch.cat([each[layer] for each in keys], dim=1))
        assert torch.equal(found_values[0], torch.cat([s.values[layer] for s in segments], dim=1))
    assert all(map(torch.equal, before, [segment.keys for segment in segments]))
