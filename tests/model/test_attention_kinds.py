"""Attention of every kind of layer against one dense softmax in float64: the slow truth."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.errors import ModelError
from pc_rag.model.attention import sights
from pc_rag.model.attention.attention_pass import AttentionPass
from pc_rag.model.attention.kv_view import KVView, Segment, Tail
from pc_rag.model.positions import (
    Absent,
    Alibi,
    LayerAttention,
    Learned,
    ModelPositions,
    Rope,
    uniform,
)
from pc_rag.types import Span
from tests.support.dense_attention import dense, draw_kinds, slopes

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
KEY_DIM = 8
ROPE = Rope(torch.tensor([1.0, 0.3, 0.1, 0.01]))
SCALING = 0.4


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """Stored KV and fresh tokens of one request, of a model whose layers may differ.

    Attributes:
        position_ids: Of the fresh tokens, pass by pass.
        states: Queries, keys and values of all fresh tokens, one triple per layer.
    """

    positions: ModelPositions
    segments: tuple[Segment, ...]
    position_ids: list[list[int]]
    states: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def tail(self):
        """An empty buffer; what is not written shows as NaN."""
        batch_size, num_kv_heads, num_tokens, _ = self.states[0][1].shape
        lead = (len(self.states), batch_size, num_kv_heads, num_tokens + 3)
        dims = (self.states[0][1].shape[-1], self.states[0][2].shape[-1])
        return Tail(*(torch.full((*lead, dim), float("nan")) for dim in dims))

    def run(self, view, *, number):
        """One pass over all layers; its outputs."""
        first = sum(map(len, self.position_ids[:number]))
        ids = self.position_ids[number]
        tokens = slice(first, first + len(ids))
        running = AttentionPass(view, self.positions, ids)
        outs = [
            running.attend(
                layer,
                *(state[:, :, tokens] for state in states),
                scaling=SCALING,
                softcap=self.softcap,
                sinks=self.sinks,
            )
            for layer, states in enumerate(self.states)
        ]
        view.tail.num_rows += len(ids)
        return outs

    def expected(self, layer, *, number):
        """The same by one dense softmax over everything, in float64."""
        first = sum(map(len, self.position_ids[:number]))
        ids = self.position_ids[number]
        last = first + len(ids)
        queries, keys, values = (state.double() for state in self.states[layer])
        encoding = self.positions.layers[layer].encoding
        batch_size = len(queries)
        placed = [encoding.place(s.keys[layer], s.shift) for s in self.segments]
        stored = [
            torch.cat([*parts, *[own.new_empty((own.shape[1], 0, own.shape[3]))]], dim=1).double()
            for parts, own in ((placed, keys), ([s.values[layer] for s in self.segments], values))
        ]
        all_keys, all_values = (
            torch.cat([part.expand(batch_size, -1, -1, -1), own[:, :, :last]], dim=2)
            for part, own in zip(stored, (keys, values), strict=True)
        )
        at = torch.tensor(ids)
        key_at = torch.tensor(
            [p for s in self.segments for p in range(s.span.start, s.span.end)]
            + [p for pass_ids in self.position_ids[: number + 1] for p in pass_ids]
        )
        return dense(
            queries[:, :, first:last], all_keys, all_values, at[:, None] - key_at,
            kind=self.positions.layers[layer], scaling=SCALING,
            softcap=self.softcap, sinks=self.sinks,
        )  # fmt: skip


def draw_case(data, *, batch_size=1, num_later=2):
    """Segments with gaps, fresh tokens before, between and behind them, then single tokens."""
    num_kv_heads, group_size = data.draw(st.sampled_from([(1, 1), (2, 3), (1, 4), (3, 1)]))
    num_heads = num_kv_heads * group_size
    value_dim = data.draw(st.sampled_from([KEY_DIM, KEY_DIM, 5, 12]))
    positions = draw_kinds(data, num_heads)
    is_fixed = any(isinstance(kind.encoding, Learned) for kind in positions.kinds)
    segments, first_pass = [], []
    position = data.draw(st.integers(0, 3))
    for number in range(data.draw(st.integers(0, 4))):
        first_pass += range(position, position + data.draw(st.integers(0, 3)))
        position = max([position, *(p + 1 for p in first_pass)]) + data.draw(st.integers(0, 4))
        size = data.draw(st.integers(0, 9))
        lead = (3, num_kv_heads, size)
        keys = random(*lead, KEY_DIM, seed=10 * number)
        values = random(*lead, value_dim, seed=10 * number + 1)
        shift = 0 if is_fixed else data.draw(st.sampled_from([0, 0, 3, -2, 40]))
        segments.append(Segment(keys, values, Span(position, position + size), shift))
        position += size
    first_pass += range(position, position + data.draw(st.integers(1, 12)))
    passes, position = [first_pass], first_pass[-1] + 1
    if data.draw(st.booleans()):
        position += data.draw(st.integers(0, 3))
        passes.append(list(range(position, position + data.draw(st.integers(2, 4)))))
        position = passes[-1][-1] + 1
    passes += [[position + number] for number in range(num_later)]
    total = sum(map(len, passes))
    states = [
        tuple(
            random(batch_size, heads, total, dim, seed=100 + 10 * layer + kind)
            for kind, (heads, dim) in enumerate(
                [(num_heads, KEY_DIM), (num_kv_heads, KEY_DIM), (num_kv_heads, value_dim)]
            )
        )
        for layer in range(3)
    ]
    softcap = data.draw(st.sampled_from([None, None, 1.5]))
    sinks = random(num_heads, seed=5) if data.draw(st.booleans()) else None
    return Case(positions, tuple(segments), passes, states, softcap, sinks)


def check(case, view, *, number):
    for layer, out in enumerate(case.run(view, number=number)):
        expected = case.expected(layer, number=number)
        torch.testing.assert_close(out.double(), expected, **CLOSE)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_kind_of_layer_equals_a_dense_softmax(data):
    """Prompt, more tokens, single tokens; settled after any of the passes, or never."""
    case = draw_case(data)
    view = KVView(case.segments, case.tail())
    settled_after = data.draw(st.integers(0, len(case.position_ids)))
    for number in range(len(case.position_ids)):
        check(case, view, number=number)
        if number == settled_after:
            lead = [*view.tail.keys.shape]
            lead[3] += view.num_stored
            into = Tail(
                torch.full(lead, float("nan")),
                torch.full([*lead[:-1], view.tail.values.shape[-1]], float("nan")),
            )
            view.settle(into, case.positions)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), numbers=st.sampled_from([1, 20, 200]))
def test_masks_are_cut_into_blocks_and_made_anew_without_a_difference(data, numbers):
    """Blocks of one query and more, kept for the next layer or not."""
    case = draw_case(data, num_later=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sights, "_MASK_NUMBERS", numbers)
        patch.setattr(sights, "_FADING_SPAN", 3)
        view = KVView(case.segments, case.tail())
        for number in range(len(case.position_ids)):
            check(case, view, number=number)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_batch_of_texts_behind_one_context_equals_a_dense_softmax(data):
    """What encoding does: several sequences, one context, every kind of layer."""
    case = draw_case(data, batch_size=3, num_later=0)
    view = KVView(case.segments, case.tail())
    for number in range(len(case.position_ids)):
        check(case, view, number=number)


def long_case(kind, num_tokens, *, num_heads=2, start=0, segments=()):
    states = tuple(random(1, num_heads, num_tokens, KEY_DIM, seed=s) for s in (1, 2, 3))
    ids = [list(range(start, start + num_tokens))]
    return Case(ModelPositions((kind,)), tuple(segments), ids, [states])


@pytest.mark.parametrize(
    "kind",
    [
        LayerAttention(ROPE, 100),
        LayerAttention(ROPE, 700),
        LayerAttention(Alibi(slopes(2))),
        LayerAttention(Alibi(slopes(2) / 100)),
        LayerAttention(Alibi(slopes(2) / 100), 300),
    ],
    ids=["window-100", "window-700", "steep", "flat", "flat-window"],
)
def test_long_prompts_equal_a_dense_softmax(kind):
    """More queries than one block holds, far position IDs, a long moved segment before them."""
    keys, values = random(1, 2, 900, KEY_DIM, seed=7), random(1, 2, 900, KEY_DIM, seed=8)
    shift = 2000 if isinstance(kind.encoding, Rope) else 123_456
    stored = Segment(keys, values, Span(shift, shift + 900), shift)
    case = long_case(kind, 1200, start=shift + 900, segments=[stored])
    check(case, KVView(case.segments, case.tail()), number=0)


@pytest.mark.parametrize("window", [128, 1000])
def test_masks_stay_small_when_the_prompt_is_long(window, monkeypatch):
    """No mask of all queries by all keys is ever built."""
    sizes = []
    kernel = sights.attend_piece

    def spy(queries, keys, values, *, mask=None, **options):
        sizes.append(0 if mask is None else mask.numel())
        return kernel(queries, keys, values, mask=mask, **options)

    monkeypatch.setattr(sights, "attend_piece", spy)
    case = long_case(LayerAttention(Absent(), window), 5000)
    case.run(KVView((), case.tail()), number=0)
    assert 0 < max(sizes) <= 1 << 20


@pytest.mark.parametrize(
    "kind",
    [LayerAttention(ROPE, 100), LayerAttention(Alibi(slopes(2)), 100)],
    ids=["rope", "alibi"],
)
def test_one_mask_serves_all_blocks_of_a_long_prompt(kind, monkeypatch):
    """Its own first block looks otherwise, and so may its last; between them all look alike."""
    made = []
    make = sights.Band._mask

    def spy(band, number):
        made.append(number)
        return make(band, number)

    monkeypatch.setattr(sights.Band, "_mask", spy)
    monkeypatch.setattr(sights, "_MASK_NUMBERS", 30_000)
    case = long_case(kind, 3000)
    check(case, KVView((), case.tail()), number=0)
    assert 2 <= len(made) <= 6


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("has_segment", [True, False])
@pytest.mark.parametrize("heads", [(2, 4), (4, 1), (3, 3), (5, 2)])
def test_layer_with_other_heads_than_its_kv_is_refused(heads, num_tokens, has_segment):
    """Some of these would be stored as if they were right, some end the process in a kernel."""
    num_heads, num_kv_heads = heads
    kept = 4 if num_kv_heads == 4 else 2
    part = random(1, kept, 4, KEY_DIM)
    view = KVView(
        (Segment(part, part, Span(0, 4)),) * has_segment,
        Tail(*[random(1, 1, kept, 9, KEY_DIM)] * 2),
    )
    running = AttentionPass(view, uniform(ROPE, 1), range(4, 4 + num_tokens))
    states = [random(1, n, num_tokens, KEY_DIM) for n in (num_heads, num_kv_heads, num_kv_heads)]
    with pytest.raises(ModelError, match=f"layer 0 .* {num_heads} query heads and {num_kv_heads}"):
        running.attend(0, *states, scaling=SCALING)


def test_segments_behind_the_window_are_not_read():
    """They hold NaN, which a mask would let through."""
    kind = LayerAttention(ROPE, 6)
    far = torch.full((1, 2, 4, KEY_DIM), float("nan"))
    near = random(1, 2, 4, KEY_DIM, seed=3)
    stored = [Segment(far, far, Span(0, 4)), Segment(near, near, Span(6, 10))]
    case = long_case(kind, 3, start=10, segments=stored)
    (out,) = case.run(KVView(case.segments, case.tail()), number=0)
    assert out.isfinite().all()


def test_rows_behind_the_window_are_not_read_in_decode():
    """The settled buffer is cut to the window."""
    case = long_case(LayerAttention(ROPE, 4), 20)
    case.position_ids = [list(range(19)), [19]]
    view = KVView((), case.tail())
    case.run(view, number=0)
    view.tail.keys[:, :, :, :16] = view.tail.values[:, :, :, :16] = float("nan")
    (out,) = case.run(view, number=1)
    torch.testing.assert_close(out.double(), case.expected(0, number=1), **CLOSE)


@pytest.mark.parametrize("encoding", [ROPE, Absent()])
def test_window_that_hides_nothing_costs_no_mask(encoding, monkeypatch):
    """Requests that fit into the window take the way of full attention."""

    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr("pc_rag.model.attention.layer_sights.Band", refuse)
    near = random(1, 2, 4, KEY_DIM, seed=3)
    stored = Segment(near, near, Span(100, 104), shift=100)
    case = long_case(LayerAttention(encoding, 10), 6, start=104, segments=[stored])
    check(case, KVView(case.segments, case.tail()), number=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("encoding", [ROPE, Alibi(slopes(6))], ids=["rope", "alibi"])
def test_bfloat16_is_close_to_the_truth_for_windows_biases_caps_and_sinks(encoding, softcap):
    """Scores, biases and merging are float32; only states and outputs are rounded."""
    keys, values = (random(1, 2, 30, KEY_DIM, seed=s).bfloat16().float() for s in (7, 8))
    states = [tuple(random(1, h, 41, KEY_DIM, seed=h).bfloat16().float() for h in (6, 2, 2))]
    positions = ModelPositions((LayerAttention(encoding, 25),))
    ids, sinks = [list(range(30, 70)), [70]], random(6, seed=9)
    truth = Case(positions, (Segment(keys, values, Span(0, 30)),), ids, states, softcap, sinks)
    low = Segment(keys.bfloat16(), values.bfloat16(), Span(0, 30))
    case = Case(
        positions, (low,), ids, [tuple(s.bfloat16() for s in states[0])], softcap, sinks.bfloat16()
    )
    tail = case.tail()
    view = KVView((low,), Tail(tail.keys.bfloat16(), tail.values.bfloat16()))
    for number in (0, 1):
        (out,) = case.run(view, number=number)
        assert out.dtype is torch.bfloat16
        expected = truth.expected(0, number=number)
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
