"""Encoding a short text at several starts, and keeping what every layer does with it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import ModelError, UnsupportedModelError
from pc_rag.model.buffer_pool import KVShape
from pc_rag.model.detection.position_table import PositionTable, TableReads
from pc_rag.model.detection.recording import CallRecorder, LayerCall
from pc_rag.model.positions import Absent, uniform
from pc_rag.model.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from pc_rag.model.positions.frozen_rope import FrozenRope

_NUM_TOKENS = 8
"""Of the probe text, where the model has positions for twice as many."""
_SHIFTS = (37, 2039)
"""Position IDs to move by: near, and far, where slow channels have turned too. Primes."""
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What code raises that was written for other callers: a missing mask, argument or cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A short text at several starts. All layers have one shape.

    Attributes:
        calls: Of each layer at position ID 0.
        keys: Of all layers there, ``[num_layers, num_kv_heads, num_tokens, key_dim]``.
        values: Alike.
        moved: Keys and values at other starts, by start.
    """

    calls: tuple[LayerCall, ...]
    keys: torch.Tensor
    values: torch.Tensor
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]]

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return self.keys.shape[2]

    @property
    def shape(self) -> KVShape:
        """Geometry of the model's KV."""
        num_layers, num_kv_heads, _, key_dim = self.keys.shape
        return KVShape(num_layers, num_kv_heads, key_dim, self.values.shape[-1])


def probe(
    model: Any,  # noqa: ANN401 - transformers is untyped here
    *,
    max_position: int,
    frozen: FrozenRope | None,
) -> Probe:
    """Run the probe text at several starts.

    Args:
        model: In evaluation mode; it is left as it was.
        max_position: Position IDs that it can take.
        frozen: Its frequencies, where they would change with the prompt.

    Raises:
        UnsupportedModelError: Not every layer attends through pc-rag, once, with one shape; or
            what they give are no numbers.
    """
    num_tokens = min(_NUM_TOKENS, max_position // 2)
    calls = _record(model, 0, num_tokens, frozen)
    _check_alike(calls, type(model).__name__)
    _check_finite(calls, model)
    shifts = sorted({min(shift, max_position - num_tokens) for shift in _SHIFTS})
    keys, values = _stacked(calls)
    moved = {shift: _stacked(_record(model, shift, num_tokens, frozen)) for shift in shifts}
    return Probe(calls, keys, values, moved)


def find_tables(model: Any, probed: Probe, frozen: FrozenRope | None) -> set[PositionTable]:  # noqa: ANN401 - as above
    """Tables that the model reads one row of for each position ID, at every start."""
    found: list[set[PositionTable]] = []
    for start in (0, *probed.moved):
        reads = TableReads(start, probed.num_tokens)
        _record(model, start, probed.num_tokens, frozen, reads)
        found.append(reads.found)
    return set.intersection(*found)


@contextmanager
def refused(model: Any) -> Iterator[None]:  # noqa: ANN401 - as above
    """Turn what a model's code raises while it is tried out into a refusal of the model."""
    name = type(model).__name__
    try:
        yield
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except ModelError as error:
        raise UnsupportedModelError(str(error), name, "attention") from error
    except _FAULTS as error:
        raise UnsupportedModelError(
            f"{name} cannot be run by pc-rag: its code raises {type(error).__name__} ({error}) "
            "when it is called without a cache and attends through pc-rag. Use another model, or "
            "update transformers",
            name,
            "attention",
        ) from error


def recording_runner(model: Any, frozen: FrozenRope | None) -> Runner:  # noqa: ANN401 - as above
    """A runner for recorders: it knows the number of layers, and nothing else yet."""
    num_layers = int(model.config.num_hidden_layers)
    shape = KVShape(num_layers, 1, 1, 1)
    return Runner(model, uniform(Absent(), num_layers), shape, frozen=frozen, pool_bytes=0)


def probe_text(model: Any, num_tokens: int) -> torch.Tensor:  # noqa: ANN401 - as above
    """``[1, num_tokens]`` token ids that differ."""
    return torch.arange(1, num_tokens + 1).mul(17).remainder(model.config.vocab_size)[None]


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Largest difference of each layer relative to its largest magnitude.

    In half precision that of the median token: where routers choose between experts that score
    nearly alike, rounding lets single tokens go another way. What is wrong with a position
    encoding or with attention is wrong for all.

    Args:
        ours: ``[num_layers, ..., num_tokens, channels]``.
        theirs: Alike.

    Returns:
        ``[num_layers]``, float32, on the CPU; infinite where not a number.
    """
    difference = (ours.float() - theirs.float()).abs().amax(dim=-1)
    if difference.ndim > 2:  # noqa: PLR2004 - layers and tokens
        difference = difference.flatten(1, -2).amax(dim=1)
    scale = theirs.float().abs().flatten(1).amax(dim=1, keepdim=True).clamp_min(1e-6)
    by_token = (difference / scale).nan_to_num(nan=float("inf"), posinf=float("inf")).cpu()
    is_rough = theirs.dtype in (torch.float16, torch.bfloat16)
    return by_token.median(dim=1).values if is_rough else by_token.amax(dim=1)


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest difference that rounding explains, relative to the largest number."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])


def _record(
    model: Any,  # noqa: ANN401 - as above
    start: int,
    num_tokens: int,
    frozen: FrozenRope | None,
    watching: AbstractContextManager[Any] | None = None,
) -> tuple[LayerCall, ...]:
    recorder = CallRecorder()
    positions = torch.arange(start, start + num_tokens)[None]
    with refused(model), watching or nullcontext():
        recording_runner(model, frozen).run_pass(
            recorder, probe_text(model, num_tokens), positions, logits_behind=None
        )
    layers = sorted(recorder.calls)
    if layers != list(range(recorder.num_layers_served)):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its {recorder.num_layers_served} calls of attention name the "
            f"layers {layers}; each layer must attend once. Use another model",
            type(model).__name__,
            "attention in every layer",
        )
    return tuple(recorder.calls[layer] for layer in layers)


def _check_alike(calls: tuple[LayerCall, ...], architecture: str) -> None:
    for layer, call in enumerate(calls):
        if call.shape != calls[0].shape:
            raise UnsupportedModelError(
                f"{architecture}: layer {layer} has {_described(call)}, layer 0 has "
                f"{_described(calls[0])}. Entries hold the KV of all layers in one tensor; use a "
                "model whose layers are alike",
                architecture,
                "layers of one shape",
            )


def _check_finite(calls: tuple[LayerCall, ...], model: Any) -> None:  # noqa: ANN401 - as above
    for layer, call in enumerate(calls):
        if not bool(call.keys.isfinite().all() and call.values.isfinite().all()):
            name = type(model).__name__
            raise UnsupportedModelError(
                f"{name}: keys or values of layer {layer} are not finite in {model.dtype}. Its "
                "weights are damaged, or its states are too large for the dtype; fetch the model "
                "again, or load it with dtype='float32'",
                name,
                "finite keys and values",
            )


def _described(call: LayerCall) -> str:
    num_heads, num_kv_heads, key_dim, value_dim = call.shape
    return f"{num_heads} query and {num_kv_heads} KV heads of {key_dim} and {value_dim} channels"


def _stacked(calls: tuple[LayerCall, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([call.keys for call in calls]), torch.stack([call.values for call in calls])
