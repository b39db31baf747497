"""Passes of several sequences: who sees what, shared pieces, tails of different lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pc_rag.model.attention.kernels import attend_by_blocks, attend_piece
from pc_rag.model.attention.kv_view import Segment
from pc_rag.model.batch.batch_pass import decode_pass, prefill_pass
from pc_rag.model.batch.kv import BatchSequence, SettledRows, SharedView, StoredPiece
from pc_rag.model.batch.own import in_place_order
from pc_rag.model.batch.pieces import Rotations
from pc_rag.model.batch.tails import allocate_tails
from pc_rag.model.buffer_pool import KVShape
from pc_rag.model.positions import Rope, uniform
from pc_rag.types import Span

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
HEAD_DIM, NUM_KV_HEADS, NUM_HEADS = 8, 2, 6
ROPE = Rope(torch.tensor([1.0, 0.3, 0.1, 0.01]))
POSITIONS = uniform(ROPE, 2)
SHAPE = KVShape(1, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)
CPU = torch.device("cpu")
NOTHING = float("-inf")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(num_tokens, seed):
    shape = (NUM_KV_HEADS, num_tokens, HEAD_DIM)
    return random(1, *shape, seed=seed), random(1, *shape, seed=seed + 1)


def dense(queries, keys, values, mask):
    """Grouped attention of one sequence under a mask, in float64."""
    group = queries.shape[1] // keys.shape[1]
    return functional.scaled_dot_product_attention(
        queries.double(),
        keys.double().repeat_interleave(group, 1),
        values.double().repeat_interleave(group, 1),
        attn_mask=mask,
        scale=0.4,
    ).float()


# -- kernels under a mask ---------------------------------------------------------------------


def masked_states(dtype):
    """Three sequences that see 5, none and 2 of five keys."""
    queries = random(3, 2, 4, HEAD_DIM, seed=1, dtype=dtype)
    keys, values = (random(3, 2, 5, HEAD_DIM, seed=seed, dtype=dtype) for seed in (2, 3))
    mask = torch.full((3, 1, 1, 5), NOTHING, dtype=dtype)
    mask[0] = 0
    mask[2, ..., :2] = 0
    return queries, keys, values, mask


@pytest.mark.parametrize("kernel", [attend_piece, attend_by_blocks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_kernels_equal_attention_over_what_is_seen(kernel, dtype):
    """Both kernels: output and log-sum-exp of a sequence are those over its own keys."""
    queries, keys, values, mask = masked_states(dtype)
    out, lse = kernel(queries, keys, values, scaling=0.4, mask=mask)
    tolerance = CLOSE if dtype is torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for row, num_keys in ((0, 5), (2, 2)):
        one = slice(row, row + 1)
        alone, alone_lse = attend_piece(
            queries[one], keys[one, :, :num_keys], values[one, :, :num_keys], scaling=0.4
        )
        torch.testing.assert_close(out[one], alone, **tolerance)
        torch.testing.assert_close(lse[one], alone_lse, **tolerance)
    assert lse.dtype is torch.float32


# -- prompts side by side ---------------------------------------------------------------------


def draw_sequences(data):
    """Sequences that see shared pieces and settled rows, with fresh tokens anywhere between.

    Returns:
        The sequences, and for each what it sees: position-encoded keys, values, position IDs.
    """
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=4))
    pieces = [stored(size, 100 + 10 * number) for number, size in enumerate(sizes)]
    shared = [StoredPiece((keys,), (values,)) for keys, values in pieces]
    laid_out = []
    for number in range(data.draw(st.integers(1, 4))):
        seen = data.draw(st.permutations(range(len(pieces))))
        seen = seen[: data.draw(st.integers(0, len(pieces)))]
        position, views, rows, fresh, sees = 0, [], [], [], []
        for each in seen:
            num_fresh = data.draw(st.integers(0, 2))
            fresh += range(position, position + num_fresh)
            position += num_fresh + data.draw(st.integers(0, 2))
            keys, values = pieces[each]
            shift = data.draw(st.sampled_from([0, 3, -2]))
            end = position + keys.shape[2]
            segment = Segment(keys, values, Span(position, end), shift)
            if data.draw(st.booleans()):
                views.append(SharedView(shared[each], position, shift))
            else:
                rows.append(segment)
            sees.append((ROPE.place(keys, shift), values, range(position, end)))
            position = end
        fresh += range(position, position + data.draw(st.integers(1, 3)))
        laid_out.append((number, views, rows, fresh, sees))
    capacities = [sum(len(s.span) for s in rows) + len(f) + 2 for _, _, rows, f, _ in laid_out]
    tails = allocate_tails(SHAPE, capacities, dtype=torch.float32, device=CPU)
    sequences = []
    for tail, (_, views, rows, fresh, _) in zip(tails, laid_out, strict=True):
        settled = tuple(SettledRows(s.span.start, tail.settle(s, POSITIONS)) for s in rows)
        ids = [0] * len(fresh)
        sequences.append(BatchSequence(tail, tuple(views), settled, ids, fresh))
    return sequences, [sees for *_, sees in laid_out]


def expected_of(sequence, sees, states, position_ids):
    """What one sequence's queries give over its stored KV and all it has computed."""
    queries, keys, values = states
    all_keys = torch.cat([*(keys for keys, _, _ in sees), keys], dim=2)
    all_values = torch.cat([*(values for _, values, _ in sees), values], dim=2)
    computed = [*sequence.position_ids, *range(sequence.position_ids[-1] + 1, position_ids[-1] + 1)]
    at = torch.tensor([*(p for _, _, span in sees for p in span), *computed])
    mask = torch.tensor(position_ids)[:, None] >= at[None]
    return dense(queries, all_keys, all_values, mask)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_passes_equal_masked_attention_of_every_sequence_alone(data):
    """Prefill, then two decode steps: shared, moved, settled, seen by some or by nobody."""
    sequences, sees = draw_sequences(data)
    rotations = Rotations(POSITIONS)
    counts = [len(sequence.token_ids) for sequence in sequences]
    states = [random(1, heads, sum(counts), HEAD_DIM, seed=heads) for heads in (NUM_HEADS, 2, 2)]
    states[2] = states[2] + 1
    running = prefill_pass(sequences, rotations)
    out = running.attend(0, *states, scaling=0.4)
    running.commit()
    computed = []
    for sequence, seen, *own, part in zip(
        sequences, sees, *(s.split(counts, dim=2) for s in states), out.split(counts, dim=2),
        strict=True,
    ):  # fmt: skip
        expected = expected_of(sequence, seen, own, sequence.position_ids)
        torch.testing.assert_close(part, expected, **CLOSE)
        computed.append(own[1:])
    for step in (1, 2):
        order = in_place_order([sequence.tail for sequence in sequences])
        one = [
            random(1, heads, len(sequences), HEAD_DIM, seed=heads + 10 * step)
            for heads in (NUM_HEADS, 2, 2)
        ]
        running = decode_pass(
            [sequences[n] for n in order],
            [sequences[n].position_ids[-1] + step for n in order],
            rotations,
            torch.float32,
        )
        out = running.attend(0, *one, scaling=0.4)
        running.commit()
        for place, number in enumerate(order):
            token = slice(place, place + 1)
            computed[number] = [
                torch.cat([before, new[:, :, token]], dim=2)
                for before, new in zip(computed[number], one[1:], strict=True)
            ]
            sequence = sequences[number]
            at = [sequence.position_ids[-1] + step]
            states = [one[0][:, :, token], *computed[number]]
            expected = expected_of(sequence, sees[number], states, at)
            torch.testing.assert_close(out[:, :, token], expected, **CLOSE)


def two_sequences(capacities=(6, 6), num_tokens=2):
    tails = allocate_tails(SHAPE, capacities, dtype=torch.float32, device=CPU)
    ids, positions = [0] * num_tokens, list(range(5, 5 + num_tokens))
    keys, values = stored(5, 40)
    piece = StoredPiece((keys,), (values,))
    return [
        BatchSequence(tail, (SharedView(piece, 0, 0),), (), ids, positions) for tail in tails
    ], piece


def test_shared_piece_is_attended_once_by_all_who_see_it(monkeypatch):
    """One call reads it, in place, for the stacked queries of every sequence."""
    sequences, piece = two_sequences()
    seen = []

    def spy(queries, keys, values, **options):
        seen.append((keys.data_ptr(), queries.shape[2]))
        return attend_piece(queries, keys, values, **options)

    monkeypatch.setattr("pc_rag.model.batch.pieces.attend_piece", spy)
    states = [random(1, heads, 4, HEAD_DIM, seed=heads) for heads in (NUM_HEADS, 2, 2)]
    before = piece.layer_keys[0].clone(), piece.layer_values[0].clone()
    prefill_pass(sequences, Rotations(POSITIONS)).attend(0, *states, scaling=0.4)
    assert seen == [(piece.layer_keys[0].data_ptr(), 4 * NUM_HEADS // NUM_KV_HEADS)]
    assert torch.equal(piece.layer_keys[0], before[0])
    assert torch.equal(piece.layer_values[0], before[1])


def test_rows_are_counted_when_a_pass_is_committed_only():
    """A pass that failed can be tried again."""
    sequences, _ = two_sequences()
    states = [random(1, heads, 4, HEAD_DIM, seed=heads) for heads in (NUM_HEADS, 2, 2)]
    running = prefill_pass(sequences, Rotations(POSITIONS))
    running.attend(0, *states, scaling=0.4)
    assert [sequence.tail.num_rows for sequence in sequences] == [0, 0]
    running.commit()
    assert [sequence.tail.num_rows for sequence in sequences] == [2, 2]


@pytest.mark.parametrize("capacities", [(6, 6), (6, 60)])
def test_output_has_the_dtype_of_the_queries_when_it_is_bfloat16(capacities):
    """Merging is done in float32 and rounded once."""
    dtype = torch.bfloat16
    sequences, piece = two_sequences(capacities)
    states = [random(1, heads, 4, HEAD_DIM, seed=heads) for heads in (NUM_HEADS, 2, 2)]
    exact = prefill_pass(sequences, Rotations(POSITIONS)).attend(0, *states, scaling=0.4)
    low = StoredPiece((piece.layer_keys[0].to(dtype),), (piece.layer_values[0].to(dtype),))
    tails = allocate_tails(SHAPE, capacities, dtype=dtype, device=CPU)
    narrow = [
        BatchSequence(tail, (SharedView(low, 0, 0),), (), s.token_ids, s.position_ids)
        for tail, s in zip(tails, sequences, strict=True)
    ]
    out = prefill_pass(narrow, Rotations(POSITIONS)).attend(
        0, *(s.to(dtype) for s in states), scaling=0.4
    )
    assert out.dtype is dtype
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)
