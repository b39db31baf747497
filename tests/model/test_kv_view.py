"""Views: counting, room, and settling into one buffer."""

from __future__ import annotations

import pytest
import torch

from pc_rag.errors import GenerationError
from pc_rag.model.attention.kv_view import KVView, Segment, Tail
from pc_rag.model.positions import Rope, uniform
from pc_rag.types import Span

ROPE = Rope(torch.tensor([1.0, 0.2]))
POSITIONS = uniform(ROPE, 2)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tail(capacity, num_rows=0, seed=0):
    shape = (2, 1, 3, capacity, 4)
    return Tail(random(*shape, seed=seed), random(*shape, seed=seed + 1), num_rows)


def segment(num_tokens, start, shift=0, seed=50):
    shape = (2, 3, num_tokens, 4)
    span = Span(start, start + num_tokens)
    return Segment(random(*shape, seed=seed), random(*shape, seed=seed + 1), span, shift)


def test_segment_gives_views_of_its_layers():
    """Nothing is copied."""
    each = segment(5, 3)
    assert len(each.layer_keys) == len(each.layer_values) == 2
    for layer in range(2):
        assert each.layer_keys[layer].shape == (1, 3, 5, 4)
        assert each.layer_keys[layer].data_ptr() == each.keys[layer].data_ptr()
        assert each.layer_values[layer].data_ptr() == each.values[layer].data_ptr()


def test_reserve_refuses_when_the_buffer_is_full():
    """With the numbers."""
    full = tail(8, num_rows=6)
    full.reserve(2)
    with pytest.raises(GenerationError, match="holds 8 tokens; 6 are filled and 3 more"):
        full.reserve(3)


def test_counts_tell_stored_from_computed():
    """Settled copies are not computed tokens."""
    view = KVView((segment(5, 0), segment(4, 9)), tail(8, num_rows=3))
    assert (view.num_stored, view.num_computed) == (9, 3)
    view.settle(tail(20, seed=9), POSITIONS)
    assert (view.num_stored, view.num_computed) == (0, 3)
    view.tail.num_rows += 1
    assert view.num_computed == 4


def test_settled_view_holds_placed_keys_then_computed_rows():
    """Segments in order, moved keys rotated, values as they are, then the former tail."""
    segments = (segment(5, 0), segment(4, 9, shift=7, seed=60))
    former = tail(8, num_rows=3, seed=5)
    view = KVView(segments, former)
    into = tail(20, seed=9)
    assert view.settle(into, POSITIONS) is former
    assert view.tail is into
    assert view.segments == ()
    assert (into.num_rows, view.first_computed) == (12, 9)
    keys = [segments[0].keys, ROPE.place(segments[1].keys, 7), former.keys[:, 0, :, :3]]
    values = [*(s.values for s in segments), former.values[:, 0, :, :3]]
    assert torch.equal(into.keys[:, 0, :, :12], torch.cat(keys, dim=2))
    assert torch.equal(into.values[:, 0, :, :12], torch.cat(values, dim=2))


@pytest.mark.parametrize("is_settled", [False, True])
def test_computed_kv_is_the_same_before_and_after_settling(is_settled):
    """Computed tokens are found by their order of computation, wherever they lie."""
    view = KVView((segment(5, 0),), tail(8, num_rows=4, seed=5))
    expected = view.tail.keys[:, 0, :, 1:3].clone(), view.tail.values[:, 0, :, 1:3].clone()
    if is_settled:
        view.settle(tail(20, seed=9), POSITIONS)
    keys, values = view.computed_kv(1, 3)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_view_stays_as_it_was_when_it_cannot_settle():
    """A buffer that is too small changes nothing, and stored KV is never written."""
    segments = (segment(5, 0, shift=2),)
    before = segments[0].keys.clone()
    former = tail(8, num_rows=3)
    view = KVView(segments, former)
    with pytest.raises(GenerationError):
        view.settle(tail(7), POSITIONS)
    assert (view.segments, view.tail, view.first_computed) == (segments, former, 0)
    view.settle(tail(8), POSITIONS)
    assert torch.equal(segments[0].keys, before)
