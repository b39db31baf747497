"""Finding a model's rotation by looking at what the model does, not at its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import ModelError, UnsupportedModelError
from pc_rag.model.kv_view import KVView
from pc_rag.model.positions import Rope, RopeStyle, uniform
from pc_rag.model.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROBE_LENGTH = 8
_PROBE_SHIFTS = (37, 2039)
"""Position IDs to move by: near, and far, where slow channels have turned too. Primes."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest difference of moved and directly encoded keys, relative to the largest key."""


def detect_rope(model: Any) -> Rope:  # noqa: ANN401 - transformers is untyped here
    """The model's rotation, proved on the model itself.

    A short text is encoded at several starts. Its keys at the first one, rotated by the difference,
    must equal those at the others, and its values must not differ.

    Raises:
        UnsupportedModelError: The model has no rotary frequencies, several sets of them, or its
            keys do not move by a rotation.
    """
    architecture = type(model).__name__
    inv_freq = _inverse_frequencies(model, architecture)
    runner = Runner(model, uniform(Rope(inv_freq), model.config.num_hidden_layers), pool_bytes=0)
    num_positions = model.config.max_position_embeddings - _PROBE_LENGTH
    shifts = sorted({min(shift, num_positions) for shift in _PROBE_SHIFTS})
    vocab_size = model.config.vocab_size
    try:
        keys, values = _encode(runner, vocab_size, start=0)
        moved = {shift: _encode(runner, vocab_size, start=shift) for shift in shifts}
    except ModelError as error:
        raise UnsupportedModelError(str(error), architecture, "attention") from error
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])

    def worst(rope: Rope) -> tuple[float, int]:
        """The largest difference over all shifts, and the shift it belongs to."""
        return max(
            (max(_difference(rope.place(keys, s), there[0]), _difference(values, there[1])), s)
            for s, there in moved.items()
        )

    (difference, shift), rope = min(
        ((worst(rope), rope) for rope in (Rope(inv_freq, style) for style in RopeStyle)),
        key=lambda candidate: candidate[0],
    )
    if difference > tolerance:
        raise UnsupportedModelError(
            f"{architecture}: keys and values encoded at position 0 and moved by {shift} differ "
            f"from those encoded there by {difference:.2g} of their size; allowed "
            f"{tolerance:.2g}. Its position encoding cannot be moved by a rotation; use a model "
            "with RoPE in every layer",
            architecture,
            "position encoding",
        )
    return rope


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
