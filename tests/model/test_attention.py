"""Attention piece by piece: both kernels, merging, and who sees what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pc_rag.model.attention.attention_pass import AttentionPass
from pc_rag.model.attention.kernels import attend_by_blocks, attend_piece
from pc_rag.model.attention.kv_view import KVView, Segment, Tail
from pc_rag.model.positions import Rope, RopeStyle, uniform
from pc_rag.types import Span

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
HEAD_DIM, NUM_KV_HEADS, NUM_HEADS = 8, 2, 6
ROPE = Rope(torch.tensor([1.0, 0.3, 0.1, 0.01]))
POSITIONS = uniform(ROPE, 2)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_queries", [1, 7, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_kernel_equals_the_flash_kernel(is_causal, num_queries, dtype):
    """Two ways to the same output and log-sum-exp, also over several blocks of queries."""
    num_keys = num_queries if is_causal else 45
    queries = random(2, 3, num_queries, HEAD_DIM, seed=1, dtype=dtype)
    keys = random(2, 3, num_keys, HEAD_DIM, seed=2, dtype=dtype)
    values = random(2, 3, num_keys, HEAD_DIM, seed=3, dtype=dtype)
    options = {"scaling": 0.4, "is_causal": is_causal}
    ours, our_lse = attend_by_blocks(queries, keys, values, **options)
    theirs, their_lse = attend_piece(queries, keys, values, **options)
    tolerance = CLOSE if dtype is torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(ours, theirs, **tolerance)
    torch.testing.assert_close(our_lse, their_lse, **tolerance)
    assert our_lse.dtype == their_lse.dtype == torch.float32
    expected = functional.scaled_dot_product_attention(
        queries.double(), keys.double(), values.double(), is_causal=is_causal, scale=0.4
    )
    torch.testing.assert_close(ours.double(), expected, **tolerance)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("value_dim", [3, 12])
@pytest.mark.parametrize("is_causal", [False, True])
def test_value_heads_of_another_size_make_no_difference(num_queries, value_dim, is_causal):
    """The flash kernel needs equal sizes: values are padded, or another kernel is taken."""
    queries, keys = random(1, 2, num_queries, HEAD_DIM, seed=1), random(1, 2, 5, HEAD_DIM, seed=2)
    values = random(1, 2, 5, value_dim, seed=3)
    options = {"scaling": 0.3, "is_causal": is_causal}
    out, lse = attend_piece(queries, keys, values, **options)
    expected = functional.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, is_causal=is_causal
    )
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(lse, attend_piece(queries, keys, keys, **options)[1], **CLOSE)


@pytest.mark.parametrize("block_scores", [1, 200, 1 << 20])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_small_blocks_of_scores_make_no_difference(block_scores, is_causal, softcap, monkeypatch):
    """A query at a time or all at once, with a mask of all queries, capped or not."""
    monkeypatch.setattr("pc_rag.model.attention.kernels._BLOCK_SCORES", block_scores)
    queries, keys, values = (random(2, 3, 20, HEAD_DIM, seed=seed) for seed in (1, 2, 3))
    mask = random(1, 3, 20, 20, seed=4)
    options = {"is_causal": is_causal, "mask": mask, "softcap": softcap}
    out, lse = attend_by_blocks(queries, keys, values, scaling=0.4, **options)
    scores = queries.double() @ keys.double().transpose(-1, -2) * 0.4
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ values.double(), **CLOSE)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), **CLOSE)


def dense(queries, keys, values, mask, scaling):
    """Grouped attention under a mask, every key and value head repeated."""
    group = queries.shape[1] // keys.shape[1]
    return functional.scaled_dot_product_attention(
        queries,
        keys.repeat_interleave(group, 1),
        values.repeat_interleave(group, 1),
        attn_mask=mask,
        scale=scaling,
    )


def segment(num_tokens, start, *, shift=0, seed=0):
    shape = (1, NUM_KV_HEADS, num_tokens, HEAD_DIM)
    span = Span(start, start + num_tokens)
    return Segment(random(*shape, seed=seed), random(*shape, seed=seed + 1), span, shift)


def empty_tail(capacity, batch_size=1):
    shape = (1, batch_size, NUM_KV_HEADS, capacity, HEAD_DIM)
    return Tail(torch.full(shape, float("nan")), torch.full(shape, float("nan")))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pieces_merge_to_one_masked_attention(data):
    """Any segments, moved or not, with fresh tokens before, between and behind them."""
    segments, position_ids, position = [], [], 0
    for number in range(data.draw(st.integers(0, 4))):
        num_fresh = data.draw(st.integers(0, 3))
        position_ids += range(position, position + num_fresh)
        position += num_fresh + data.draw(st.integers(0, 2))
        size = data.draw(st.integers(0, 5))
        shift = data.draw(st.sampled_from([0, 0, 3, -2, 40]))
        segments.append(segment(size, position, shift=shift, seed=10 * number))
        position += size
    num_fresh = data.draw(st.integers(1, 4))
    position_ids += range(position, position + num_fresh)
    num_tokens = len(position_ids)
    queries = random(1, NUM_HEADS, num_tokens, HEAD_DIM, seed=91)
    keys = random(1, NUM_KV_HEADS, num_tokens, HEAD_DIM, seed=92)
    values = random(1, NUM_KV_HEADS, num_tokens, HEAD_DIM, seed=93)
    tail = empty_tail(num_tokens)
    running = AttentionPass(KVView(tuple(segments), tail), POSITIONS, position_ids)
    out = running.attend(0, queries, keys, values, scaling=0.4)
    all_keys = torch.cat([*(ROPE.place(s.keys, s.shift) for s in segments), keys], dim=2)
    all_values = torch.cat([*(s.values for s in segments), values], dim=2)
    key_positions = [p for s in segments for p in range(s.span.start, s.span.end)] + position_ids
    mask = torch.tensor(position_ids)[:, None] >= torch.tensor(key_positions)[None]
    torch.testing.assert_close(out, dense(queries, all_keys, all_values, mask, 0.4), **CLOSE)
    torch.testing.assert_close(tail.keys[0, :, :, :num_tokens], keys, atol=0, rtol=0)
    torch.testing.assert_close(tail.values[0, :, :, :num_tokens], values, atol=0, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("has_segment", [True, False])
def test_later_tokens_see_what_the_tail_holds(num_tokens, has_segment):
    """Rows computed before are seen by every later token, those behind the front are not read."""
    stored = (segment(5, 0, shift=2, seed=7),) if has_segment else ()
    tail = empty_tail(20)
    view = KVView(stored, tail)
    first, later = range(5, 8), range(8, 8 + num_tokens)
    total = 3 + num_tokens
    queries = random(1, NUM_HEADS, total, HEAD_DIM, seed=1)
    keys = random(1, NUM_KV_HEADS, total, HEAD_DIM, seed=2)
    values = random(1, NUM_KV_HEADS, total, HEAD_DIM, seed=3)
    AttentionPass(view, POSITIONS, first).attend(
        0, queries[:, :, :3], keys[:, :, :3], values[:, :, :3], scaling=0.4
    )
    tail.num_rows = 3
    out = AttentionPass(view, POSITIONS, later).attend(
        0, queries[:, :, 3:], keys[:, :, 3:], values[:, :, 3:], scaling=0.4
    )
    all_keys = torch.cat([*(ROPE.place(s.keys, s.shift) for s in stored), keys], dim=2)
    all_values = torch.cat([*(s.values for s in stored), values], dim=2)
    position_ids = [*(range(5) if stored else ()), *first, *later]
    mask = torch.tensor(list(later))[:, None] >= torch.tensor(position_ids)[None]
    expected = dense(queries[:, :, 3:], all_keys, all_values, mask, 0.4)
    torch.testing.assert_close(out, expected, **CLOSE)


def test_batch_shares_the_segments_it_attends():
    """Stored KV of one sequence is seen by every sequence of a batch, without copies."""
    stored = segment(5, 0, seed=7)
    queries = random(3, NUM_HEADS, 4, HEAD_DIM, seed=1)
    keys, values = (random(3, NUM_KV_HEADS, 4, HEAD_DIM, seed=s) for s in (2, 3))
    view = KVView((stored,), empty_tail(4, batch_size=3))
    out = AttentionPass(view, POSITIONS, range(5, 9)).attend(0, queries, keys, values, scaling=0.4)
    for row in range(3):
        alone = KVView((stored,), empty_tail(4))
        one = slice(row, row + 1)
        expected = AttentionPass(alone, POSITIONS, range(5, 9)).attend(
            0, queries[one], keys[one], values[one], scaling=0.4
        )
        torch.testing.assert_close(out[one], expected, **CLOSE)


def test_stored_kv_is_not_written_by_a_pass():
    """Segments are read in place and stay bit for bit."""
    stored = segment(5, 3, shift=3, seed=7)
    before = stored.keys.clone(), stored.values.clone()
    states = [random(1, heads, 4, HEAD_DIM, seed=1) for heads in (NUM_HEADS, 2, 2)]
    view = KVView((stored,), empty_tail(4))
    AttentionPass(view, POSITIONS, range(8, 12)).attend(0, *states, scaling=0.4)
    assert torch.equal(stored.keys, before[0])
    assert torch.equal(stored.values, before[1])


def test_output_has_the_dtype_of_the_queries_when_it_is_bfloat16():
    """Merging is done in float32 and rounded once."""
    dtype = torch.bfloat16
    stored = [segment(6, 0, seed=3), segment(5, 6, shift=4, seed=5)]
    states = [random(1, heads, 4, HEAD_DIM, seed=9 + heads) for heads in (NUM_HEADS, 2)]
    states.append(random(1, 2, 4, HEAD_DIM, seed=8))
    exact = AttentionPass(KVView(tuple(stored), empty_tail(4)), POSITIONS, range(11, 15)).attend(
        0, *states, scaling=0.4
    )
    low = [Segment(s.keys.to(dtype), s.values.to(dtype), s.span, s.shift) for s in stored]
    tail = empty_tail(4)
    view = KVView(tuple(low), Tail(tail.keys.to(dtype), tail.values.to(dtype)))
    out = AttentionPass(view, POSITIONS, range(11, 15)).attend(
        0, *(s.to(dtype) for s in states), scaling=0.4
    )
    assert out.dtype is dtype
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)


def test_interleaved_rotation_is_used_for_moved_segments():
    """The pass turns queries by the rope it was given, whatever its style."""
    rope = Rope(ROPE.inv_freq, RopeStyle.INTERLEAVED)
    moved = segment(5, 9, shift=9, seed=7)
    placed = Segment(rope.place(moved.keys, 9), moved.values, moved.span)
    states = [random(1, heads, 2, HEAD_DIM, seed=heads) for heads in (NUM_HEADS, 2, 2)]
    outs = [
        AttentionPass(KVView((each,), empty_tail(2)), uniform(rope, 2), range(14, 16)).attend(
            0, *states, scaling=0.4
        )
        for each in (moved, placed)
    ]
    torch.testing.assert_close(*outs, **CLOSE)
