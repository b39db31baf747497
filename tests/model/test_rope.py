"""Rotation against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pc_rag.model.positions import Absent, LayerAttention, ModelPositions, Rope, RopeStyle

INV_FREQ = torch.tensor([1.0, 0.25, 0.06, 0.004])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def turned(keys, shift, style, inv_freq=INV_FREQ):
    """Pairs of channels as complex numbers, times ``exp(i shift inv_freq)``, in float64."""
    half = inv_freq.shape[0]
    rotary, rest = keys[..., : 2 * half].double(), keys[..., 2 * half :]
    if style is RopeStyle.HALVES:
        pairs = torch.complex(rotary[..., :half].contiguous(), rotary[..., half:].contiguous())
    else:
        pairs = torch.view_as_complex(rotary.unflatten(-1, (half, 2)).contiguous())
    pairs = pairs * torch.polar(torch.ones(half).double(), inv_freq.double() * shift)
    if style is RopeStyle.HALVES:
        out = torch.cat((pairs.real, pairs.imag), dim=-1)
    else:
        out = torch.view_as_real(pairs).flatten(-2)
    return torch.cat((out, rest.double()), dim=-1)


@pytest.mark.parametrize("style", list(RopeStyle))
@pytest.mark.parametrize("head_dim", [8, 14])
@pytest.mark.parametrize("shift", [1, -3, 517, 100_000])
def test_place_equals_complex_multiplication(style, head_dim, shift):
    """Both styles, full and partial rotary; far shifts lose no precision."""
    keys = random(2, 3, 5, head_dim)
    before = keys.clone()
    placed = Rope(INV_FREQ, style).place(keys, shift)
    torch.testing.assert_close(placed.double(), turned(keys, shift, style), atol=2e-6, rtol=2e-6)
    assert torch.equal(placed[..., 8:], keys[..., 8:])
    assert torch.equal(keys, before)
    assert not torch.allclose(placed[..., :8], keys[..., :8])


def test_styles_differ():
    """Which channels pair up is not a detail."""
    keys = random(1, 8)
    halves, interleaved = (Rope(INV_FREQ, style).place(keys, 5) for style in RopeStyle)
    assert not torch.allclose(halves, interleaved)


def test_no_shift_is_no_copy():
    """An entry where it was encoded is handed on as it is."""
    keys = random(3, 8)
    assert Rope(INV_FREQ).place(keys, 0) is keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", list(RopeStyle))
def test_rotation_stays_in_the_dtype_of_the_states(dtype, style):
    """Computed in float32 and rounded once: half an ulp from the rotation of the rounded keys."""
    keys = random(4, 6, 14).to(dtype)
    placed = Rope(INV_FREQ, style).place(keys, 91)
    assert placed.dtype is dtype
    expected = turned(keys, 91, style).to(torch.float32).to(dtype)
    torch.testing.assert_close(placed, expected, atol=1e-6, rtol=torch.finfo(dtype).eps)


@settings(max_examples=50, deadline=None)
@given(first=st.integers(-2000, 2000), second=st.integers(-2000, 2000))
def test_shifts_add_up_and_keep_dot_products(first, second):
    """Turning the query back by a shift equals moving the key forth by it."""
    rope = Rope(INV_FREQ)
    keys, query = random(5, 8, seed=1), random(1, 8, seed=2)
    twice = rope.place(rope.place(keys, first), second)
    torch.testing.assert_close(twice, rope.place(keys, first + second), atol=1e-5, rtol=1e-5)
    moved = query @ rope.place(keys, first).T
    torch.testing.assert_close(rope.place(query, -first) @ keys.T, moved, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("style", list(RopeStyle))
def test_several_rotations_at_once_equal_one_by_one(style):
    """Matrices side by side move states to several places in one product."""
    rope = Rope(INV_FREQ, style)
    states = random(2, 4, 14)
    matrices = rope.matrices([3, -7, 40], 14)
    assert matrices.shape == (3, 14, 14)
    out = states @ matrices.transpose(0, 1).reshape(14, -1)
    for moved, shift in zip(out.split(14, dim=-1), (3, -7, 40), strict=True):
        torch.testing.assert_close(moved, rope.place(states, shift))


def test_layers_are_placed_each_by_its_own_encoding(monkeypatch):
    """Also where layers of one encoding have other windows; one product for each encoding."""
    near, far = Rope(INV_FREQ), Rope(INV_FREQ / 10)
    layers = (
        LayerAttention(near), LayerAttention(far), LayerAttention(Absent()), LayerAttention(near, 7)
    )  # fmt: skip
    keys = random(4, 2, 5, 8)
    before = keys.clone()
    expected = [
        layer.encoding.place(of_layer, 9) for layer, of_layer in zip(layers, keys, strict=True)
    ]
    products = []
    place = Rope.place
    monkeypatch.setattr(
        Rope, "place", lambda rope, *states: products.append(rope) or place(rope, *states)
    )
    placed = ModelPositions(layers).place(keys, 9)
    torch.testing.assert_close(placed, torch.stack(expected))
    assert products == [near, far]
    assert torch.equal(keys, before)
