"""Passes of several sequences through every kind of layer, against one dense softmax each."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.errors import ModelError
from pc_rag.model.attention.kv_view import Segment
from pc_rag.model.batch.batch_pass import decode_pass, prefill_pass
from pc_rag.model.batch.kv import BatchSequence, SettledRows, SharedView, StoredPiece
from pc_rag.model.batch.own import in_place_order
from pc_rag.model.batch.pieces import Rotations
from pc_rag.model.batch.tails import allocate_tails
from pc_rag.model.buffer_pool import KVShape
from pc_rag.model.positions import Alibi, LayerAttention, Learned, ModelPositions
from pc_rag.types import Span
from tests.support.dense_attention import ROPE, dense, draw_kinds, slopes

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
SCALING = 0.4
KEY_DIM, NUM_LAYERS = 8, 3


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Truth:
    """What one sequence sees: its segments, then all that it computed, pass by pass."""

    segments: list[Segment]
    position_ids: list[int]
    computed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def expected(self, kind, layer, queries, at, **options):
        """Of one layer; ``computed`` has what that layer got, in float64."""
        keys = [kind.encoding.place(s.keys[layer], s.shift)[None] for s in self.segments]
        values = [s.values[layer][None] for s in self.segments]
        own_keys, own_values = (list(parts) for parts in zip(*self.computed, strict=True))
        key_at = [p for s in self.segments for p in range(s.span.start, s.span.end)]
        last = at[-1]
        later = range(self.position_ids[-1] + 1, last + 1)
        key_at = torch.tensor([*key_at, *self.position_ids, *later])
        return dense(
            queries.double(),
            torch.cat([*keys, *own_keys], dim=2).double(),
            torch.cat([*values, *own_values], dim=2).double(),
            torch.tensor(at)[:, None] - key_at,
            kind=kind, scaling=SCALING, **options,
        )  # fmt: skip


def draw_batch(data, positions, geometry):
    """Sequences that see shared pieces at different places, and settled rows of their own."""
    num_kv_heads, value_dim = geometry
    is_fixed = any(isinstance(kind.encoding, Learned) for kind in positions.kinds)
    sizes = data.draw(st.lists(st.integers(1, 8), max_size=3))
    kv = [
        [
            random(NUM_LAYERS, num_kv_heads, size, dim, seed=100 + 10 * n + dim)
            for dim in (KEY_DIM, value_dim)
        ]
        for n, size in enumerate(sizes)
    ]
    shared = [StoredPiece(k[:, None].unbind(0), v[:, None].unbind(0)) for k, v in kv]
    laid_out = []
    for _ in range(data.draw(st.integers(1, 4))):
        position, views, settled, fresh, segments = data.draw(st.integers(0, 30)), [], [], [], []
        for each in data.draw(st.permutations(range(len(kv)))):
            fresh += range(position, position + data.draw(st.integers(0, 2)))
            position = max([position, *(p + 1 for p in fresh)]) + data.draw(st.integers(0, 3))
            use = data.draw(st.sampled_from(["shared", "settled", "unseen"]))
            if use == "unseen":
                continue
            keys, values = kv[each]
            shift = 0 if is_fixed else data.draw(st.sampled_from([0, 3, -2]))
            segment = Segment(keys, values, Span(position, position + keys.shape[2]), shift)
            position = segment.span.end
            segments.append(segment)
            if use == "shared":
                views.append(SharedView(shared[each], segment.span.start, shift))
            else:
                settled.append(segment)
        fresh += range(position, position + data.draw(st.integers(1, 8)))
        laid_out.append((views, settled, fresh, segments))
    capacities = [sum(len(s.span) for s in own) + len(f) + 2 for _, own, f, _ in laid_out]
    shape = KVShape(NUM_LAYERS, num_kv_heads, KEY_DIM, value_dim)
    tails = allocate_tails(shape, capacities, dtype=torch.float32, device=torch.device("cpu"))
    sequences = []
    for tail, (views, own, fresh, _) in zip(tails, laid_out, strict=True):
        rows = tuple(SettledRows(s.span.start, tail.settle(s, positions)) for s in own)
        sequences.append(BatchSequence(tail, tuple(views), rows, [0] * len(fresh), fresh))
    return sequences, [
        [Truth(segments, fresh) for _ in range(NUM_LAYERS)] for *_, fresh, segments in laid_out
    ]


def states_of(geometry, num_heads, num_tokens, seed):
    num_kv_heads, value_dim = geometry
    dims = [(num_heads, KEY_DIM), (num_kv_heads, KEY_DIM), (num_kv_heads, value_dim)]
    return [random(1, heads, num_tokens, dim, seed=seed + n) for n, (heads, dim) in enumerate(dims)]


def check_pass(running, positions, truths, tokens, ats, *, num_heads, geometry, options, seed):
    """All layers of a pass: every sequence's part of the output against its own truth."""
    for layer, kind in enumerate(positions.layers):
        states = states_of(geometry, num_heads, tokens[-1].stop, seed + 10 * layer)
        out = running.attend(layer, *states, scaling=SCALING, **options)
        for truth, part, at in zip(truths, tokens, ats, strict=True):
            queries, keys, values = (state[:, :, part] for state in states)
            truth[layer].computed.append((keys, values))
            expected = truth[layer].expected(kind, layer, queries, at, **options)
            torch.testing.assert_close(out[:, :, part].double(), expected, **CLOSE)
    running.commit()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_kind_of_layer_equals_a_dense_softmax_of_each_sequence(data):
    """Prefill, then two steps: windows, biases, caps and sinks, at every sequence's own places."""
    num_kv_heads, group_size = data.draw(st.sampled_from([(1, 1), (2, 3), (1, 4), (3, 1)]))
    num_heads = num_kv_heads * group_size
    geometry = (num_kv_heads, data.draw(st.sampled_from([KEY_DIM, KEY_DIM, 5, 12])))
    positions = draw_kinds(data, num_heads)
    sequences, truths = draw_batch(data, positions, geometry)
    options = {
        "softcap": data.draw(st.sampled_from([None, None, 1.5])),
        "sinks": random(num_heads, seed=5) if data.draw(st.booleans()) else None,
    }
    rotations = Rotations(positions)
    counts = [len(sequence.token_ids) for sequence in sequences]
    tokens = [slice(sum(counts[:n]), sum(counts[: n + 1])) for n in range(len(counts))]
    ats = [sequence.position_ids for sequence in sequences]
    shared = {"num_heads": num_heads, "geometry": geometry, "options": options}
    running = prefill_pass(sequences, rotations)
    check_pass(running, positions, truths, tokens, ats, **shared, seed=1000)
    for step in (1, 2):
        order = in_place_order([sequence.tail for sequence in sequences])
        ordered = [sequences[n] for n in order]
        ats = [[sequence.position_ids[-1] + step] for sequence in ordered]
        running = decode_pass(ordered, [at for (at,) in ats], rotations, torch.float32)
        tokens = [slice(n, n + 1) for n in range(len(order))]
        in_order = [truths[n] for n in order]
        check_pass(running, positions, in_order, tokens, ats, **shared, seed=2000 + 100 * step)


def two_sequences(kind, starts, piece_size=4):
    """Two sequences of five fresh tokens that see one piece, each at its own place."""
    tails = allocate_tails(
        KVShape(1, 2, KEY_DIM, KEY_DIM), [8, 8], dtype=torch.float32, device=torch.device("cpu")
    )
    keys, values = (random(1, 1, 2, piece_size, KEY_DIM, seed=s) for s in (1, 2))
    piece = StoredPiece(keys.unbind(0), values.unbind(0))
    sequences = [
        BatchSequence(tail, (SharedView(piece, start, 0),), (), [0] * 5, list(range(20, 25)))
        for tail, start in zip(tails, starts, strict=True)
    ]
    return sequences, piece, Rotations(ModelPositions((kind,)))


def test_piece_behind_every_window_is_not_read():
    """It holds NaN, which a mask would let through; one that is in sight of some is read."""
    sequences, piece, rotations = two_sequences(LayerAttention(ROPE, 10), [0, 3])
    piece.layer_keys[0].fill_(float("nan"))
    states = states_of((2, KEY_DIM), 2, 10, 7)
    out = prefill_pass(sequences, rotations).attend(0, *states, scaling=SCALING)
    assert out.isfinite().all()
    sequences, piece, rotations = two_sequences(LayerAttention(ROPE, 10), [0, 9])
    piece.layer_keys[0].fill_(float("nan"))
    out = prefill_pass(sequences, rotations).attend(0, *states, scaling=SCALING)
    assert out[:, :, :5].isfinite().all()
    assert out[:, :, 5:7].isnan().all()


@pytest.mark.parametrize("kind", [LayerAttention(ROPE, 4), LayerAttention(Alibi(slopes(2)), 4)])
def test_rows_behind_every_window_are_not_read_in_decode(kind):
    """The block is cut to the rows that some sequence sees."""
    sequences, _, rotations = two_sequences(kind, [0, 0])
    running = prefill_pass(sequences, rotations)
    running.attend(0, *states_of((2, KEY_DIM), 2, 10, 7), scaling=SCALING)
    running.commit()
    sequences[0].tail.block.keys[:, :, :, :2] = float("nan")
    running = decode_pass(sequences, [25, 25], rotations, torch.float32)
    out = running.attend(0, *states_of((2, KEY_DIM), 2, 2, 9), scaling=SCALING)
    assert out.isfinite().all()


@pytest.mark.parametrize("heads", [(2, 4), (2, 1), (3, 2)])
def test_layer_with_other_heads_than_the_tails_is_refused(heads):
    """In the pass of the prompts and in that of later tokens, which store KV in other ways."""
    num_heads, num_kv_heads = heads
    sequences, _, rotations = two_sequences(LayerAttention(ROPE), [0, 0])
    for running, num_tokens in (
        (prefill_pass(sequences, rotations), 10),
        (decode_pass(sequences, [25, 25], rotations, torch.float32), 2),
    ):
        states = states_of((num_kv_heads, KEY_DIM), num_heads, num_tokens, 7)
        with pytest.raises(ModelError, match="KV heads"):
            running.attend(0, *states, scaling=SCALING)
