"""A forward pass is timed where its device tells the time."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pc_rag.model.pass_clock import PassClock


def test_seconds_are_known_when_the_pass_ran_on_a_cpu():
    """A CPU is done when the call returns."""
    clock = PassClock(torch.device("cpu"))
    assert clock.seconds() is None
    with clock.measure():
        torch.ones(10).sum()
    assert clock.seconds() > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_seconds_are_unknown_when_the_pass_failed_or_nobody_can_tell(device):
    """Half a pass, or a device that works on behind our back, gives no time."""
    clock = PassClock(torch.device(device))
    with contextlib.suppress(ZeroDivisionError), clock.measure():
        if device == "cpu":
            raise ZeroDivisionError
    assert clock.seconds() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_seconds_are_the_device_s_when_the_pass_ran_on_cuda():
    """The event behind the pass is read once the device has come past it."""
    clock = PassClock(torch.device("cuda"))
    with clock.measure():
        product = torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    assert product.sum().item() == 512**3
    assert clock.seconds() > 0
