"""What queries see of one piece, without the rest of a pass."""

from __future__ import annotations

import pytest
import torch

from pc_rag.model.attention import kernels
from pc_rag.model.attention.kernels import attend_piece
from pc_rag.model.attention.sights import Band, Fading, FadingCausal

CPU = torch.device("cpu")
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def states(num_queries, num_keys, *, num_heads=2):
    return [random(1, num_heads, n, 8, seed=n) for n in (num_queries, num_keys, num_keys)]


def use_blocks(monkeypatch):
    """Let the CPU go the way of other devices."""
    monkeypatch.setattr(
        kernels,
        "_flash_on_cpu",
        lambda q, k, v, _p, causal, *, attn_mask, scale: kernels.attend_by_blocks(
            q, k, v, scaling=scale, is_causal=causal, mask=attn_mask
        ),
    )


@pytest.mark.parametrize("kernel", ["flash", "blocks"])
def test_query_that_sees_nothing_of_a_piece_adds_nothing(kernel, monkeypatch):
    """Output 0 and log-sum-exp minus infinity, never NaN, beside queries that see some."""
    if kernel == "blocks":
        use_blocks(monkeypatch)
    queries, keys, values = states(3, 5)
    band = Band(torch.tensor([2, 30, 9]), torch.arange(1, 6), window=6, device=CPU)
    out, lse = band.attend(queries, keys, values, scaling=0.4)
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert torch.equal(lse[:, :, 1], torch.full_like(lse[:, :, 1], float("-inf")))
    for row, seen in ((0, slice(0, 2)), (2, slice(3, 5))):
        one = slice(row, row + 1)
        alone = attend_piece(queries[:, :, one], keys[:, :, seen], values[:, :, seen], scaling=0.4)
        torch.testing.assert_close(out[:, :, one], alone[0], **CLOSE)
        torch.testing.assert_close(lse[:, :, one], alone[1], **CLOSE)


def test_band_is_blind_when_no_key_is_seen():
    """Nothing is read, and nothing is found."""
    queries, keys, values = states(2, 4)
    keys.fill_(float("nan"))
    band = Band(torch.tensor([50, 51]), torch.arange(4), window=10, device=CPU)
    assert band.is_blind
    out, lse = band.attend(queries, keys, values, scaling=0.4)
    assert not out.any()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("moved_by", [0, 1, 100_000])
def test_moving_a_piece_under_linear_biases_adds_a_constant_alone(moved_by):
    """Output bit for bit the same; the log-sum-exp falls by slope times distance."""
    queries, keys, values = states(2, 4)
    slopes = torch.tensor([0.5, 0.125])
    near, far = (
        Fading(torch.tensor([4, 5]) + d, torch.arange(4), slopes).attend(
            queries, keys, values, scaling=0.4
        )
        for d in (0, moved_by)
    )
    assert torch.equal(near[0], far[0])
    torch.testing.assert_close(far[1], near[1] - slopes[:, None] * moved_by)


@pytest.mark.parametrize("kernel", ["flash", "blocks"])
@pytest.mark.parametrize("step", [1, 50])
def test_causal_order_under_linear_biases_equals_a_band_of_them(kernel, step, monkeypatch):
    """Split into constants or written out: the same, over many blocks and gaps."""
    if kernel == "blocks":
        use_blocks(monkeypatch)
    position_ids = [*range(0, 300 * step, step), 20_000, 20_001]
    slopes = torch.tensor([0.5, 0.01])
    queries, keys, values = states(302, 302)
    at = torch.tensor(position_ids)
    band = Band(at, at, slopes=slopes[:, None], device=CPU)
    options = {"scaling": 0.4, "softcap": 3.0 if step == 1 else None}
    found = FadingCausal(position_ids, slopes).attend(queries, keys, values, **options)
    for ours, expected in zip(found, band.attend(queries, keys, values, **options), strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)
