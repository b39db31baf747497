"""Rotations that would change with the length of the prompt, held still while pc-rag runs a model.

LongRoPE has two sets of frequencies: short factors up to the length a model was first trained for,
long factors beyond. transformers chooses by the largest position ID of a forward pass and writes
the choice into the model. Keys that were stored under one set would then be attended by queries
under the other, so a loaded model keeps to one of them for every request, as vLLM does.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

LONGROPE = "longrope"
_HELD = "default"
"""A rope type whose frequencies transformers does not touch in a forward pass."""


@dataclass(frozen=True, slots=True, eq=False)
class _HeldModule:
    """A rotary module, and what its buffers are while it is held.

    Attributes:
        module: The module.
        inv_freq: By buffer name.
    """

    module: Any
    inv_freq: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class FrozenRope:
    """One regime of a model's frequencies.

    Attributes:
        is_long: Whether the long factors are held.
        original_max_position: Position IDs that the short factors serve.
        modules: What is held.
    """

    is_long: bool
    original_max_position: int
    modules: tuple[_HeldModule, ...]


def original_max_position(config: Any) -> int | None:  # noqa: ANN401 - configurations share no useful type
    """Position IDs that a configuration's short factors serve; ``None`` without LongRoPE."""
    limits = []
    for parameters in rope_kinds(config).values():
        if parameters.get("rope_type") == LONGROPE:
            original = parameters.get("original_max_position_embeddings")
            limits.append(int(original or config.max_position_embeddings))
    return min(limits, default=None)


def rope_kinds(config: Any) -> dict[str | None, dict[str, Any]]:  # noqa: ANN401 - as above
    """The rope parameters of a configuration by layer type; under ``None`` where all share them."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        return {}
    by_type: dict[str | None, dict[str, Any]] = {
        kind: value for kind, value in parameters.items() if isinstance(value, dict)
    }
    # Factors of some rope types are lists; only layer types map to dictionaries.
    return by_type or {None: parameters}


def frozen_rope(model: Any, *, is_long: bool) -> FrozenRope | None:  # noqa: ANN401 - transformers is untyped here
    """One regime of a model's frequencies; ``None`` where they never change.

    Args:
        model: It is not changed.
        is_long: The long factors, for prompts that may be longer than the original length.
    """
    original = original_max_position(model.config)
    if original is None:
        return None
    modules = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        by_layer_type = types if isinstance(types, dict) else {None: types}
        held = {
            f"{layer_type}_inv_freq" if layer_type else "inv_freq": _frequencies(
                module, layer_type, is_long=is_long
            )
            for layer_type, rope_type in by_layer_type.items()
            if rope_type == LONGROPE
        }
        if held:
            modules.append(_HeldModule(module, held))
    return FrozenRope(is_long, original, tuple(modules))


def _frequencies(module: Any, layer_type: str | None, *, is_long: bool) -> torch.Tensor:  # noqa: ANN401 - as above
    parameters = rope_kinds(module.config)[layer_type]
    original = parameters.get("original_max_position_embeddings")
    length = int(original or module.config.max_position_embeddings)
    name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
    inv_freq: torch.Tensor = ROPE_INIT_FUNCTIONS[LONGROPE](
        module.config, getattr(module, name).device, seq_len=length + is_long, layer_type=layer_type
    )[0]
    return inv_freq


@contextmanager
def held(frozen: FrozenRope | None) -> Iterator[None]:
    """Hold a model's frequencies meanwhile; what it had before is put back on leaving.

    Entered under the model's lock (``own_attention``). Not to be held over a ``yield``.
    """
    before: list[tuple[Any, Any, dict[str, torch.Tensor]]] = []
    try:
        for each in frozen.modules if frozen else ():
            module = each.module
            buffers = {name: getattr(module, name) for name in each.inv_freq}
            before.append((module, module.rope_type, buffers))
            is_by_layer = isinstance(module.rope_type, dict)
            module.rope_type = dict.fromkeys(module.rope_type, _HELD) if is_by_layer else _HELD
            for name, inv_freq in each.inv_freq.items():
                setattr(module, name, inv_freq.to(buffers[name].device))
        yield
    finally:
        for module, rope_type, buffers in before:
            module.rope_type = rope_type
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
