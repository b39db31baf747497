"""Finding a model's rotation by looking at what the model does, not at its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.kv_view import KVView
from pc_rag.model.positions.rope import Rope, RopeStyle
from pc_rag.model.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROBE_LENGTH = 8
_PROBE_SHIFT = 37
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference of moved and directly encoded keys, relative to the largest key."""


def detect_rope(model: Any) -> Rope:  # noqa: ANN401 - transformers is untyped here
    """The model's rotation, proved on the model itself.

    A short text is encoded at two starts. Its keys at the first start, rotated by the difference,
    must equal those at the second, and its values must not differ.

    Raises:
        UnsupportedModelError: The model has no rotary frequencies, several sets of them, or its
            keys do not move by a rotation.
    """
    architecture = type(model).__name__
    inv_freq = _inverse_frequencies(model, architecture)
    halves = Rope(inv_freq, RopeStyle.HALVES)
    runner = Runner(model, halves, pool_bytes=0)
    keys, values = _encode(runner, model.config.vocab_size, start=0)
    moved_keys, moved_values = _encode(runner, model.config.vocab_size, start=_PROBE_SHIFT)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    values_differ = _difference(values, moved_values)
    found: dict[RopeStyle, float] = {}
    for style in RopeStyle:
        rope = Rope(inv_freq, style)
        found[style] = _difference(rope.place(keys, _PROBE_SHIFT), moved_keys)
    style = min(found, key=lambda candidate: found[candidate])
    if max(found[style], values_differ) > tolerance:
        raise UnsupportedModelError(
            f"{architecture}: keys encoded at position 0 and rotated by {_PROBE_SHIFT} differ from "
            f"keys encoded there by {found[style]:.2g} of their size, values by "
            f"{values_differ:.2g}; allowed {tolerance:.2g}. Its position encoding cannot be moved "
            "by a rotation; use a model with RoPE in every layer",
            architecture,
            "position encoding",
        )
    return Rope(inv_freq, style)


def _inverse_frequencies(model: Any, architecture: str) -> torch.Tensor:  # noqa: ANN401
    def buffers() -> Iterator[torch.Tensor]:
        for name, buffer in model.named_buffers():
            if name.rsplit(".", maxsplit=1)[-1] == "inv_freq":
                yield buffer

    distinct: list[torch.Tensor] = []
    for buffer in buffers():
        if not any(torch.equal(buffer, known) for known in distinct):
            distinct.append(buffer)
    if len(distinct) != 1:
        raise UnsupportedModelError(
            f"{architecture} has {len(distinct)} sets of rotary frequencies; exactly one is "
            "supported. Use a model with one rotary position encoding for all layers",
            architecture,
            "position encoding",
        )
    return distinct[0].detach().to(torch.float32)


def _encode(runner: Runner, vocab_size: int, *, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the probe text at ``start``, all layers."""
    token_ids = torch.arange(1, _PROBE_LENGTH + 1).mul(17).remainder(vocab_size)[None]
    tail = runner.pool.take(_PROBE_LENGTH)
    view = KVView((), tail)
    runner.compute(view, token_ids, range(start, start + _PROBE_LENGTH))
    rows = slice(0, _PROBE_LENGTH)
    return tail.keys[:, :, :, rows], tail.values[:, :, :, rows]


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference relative to the largest magnitude; infinite where not a number."""
    scale = theirs.float().abs().max().clamp_min(1e-6)
    difference = ((ours.float() - theirs.float()).abs().max() / scale).item()
    return difference if difference == difference else float("inf")  # noqa: PLR0124 - NaN test
