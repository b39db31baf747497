"""What a loaded model can do with stored KV, in words and numbers for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pc_rag.model.positions import Absent, Alibi, Learned, Rope, RopeStyle
from pc_rag.model.positions.frozen_rope import LONGROPE, rope_kinds
from pc_rag.types import Visibility

if TYPE_CHECKING:
    from pc_rag.model.detection.detect import Detection
    from pc_rag.model.detection.self_check import SelfCheck
    from pc_rag.model.loading import LoadedModel
    from pc_rag.model.positions import PositionEncoding
    from pc_rag.types import Placement

_SCALINGS = {
    "linear": "linear scaling",
    "llama3": "llama3 scaling",
    "yarn": "YaRN",
    "proportional": "proportional scaling",
}
"""Rope types that change frequencies, as people call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of a model that are alike.

    Attributes:
        num_layers: How many there are.
        encoding: How they tell positions apart, for example ``RoPE, partial``.
        rotary_dim: Channels of a key that are rotated; ``None`` without RoPE.
        key_dim: Channels of a key.
        window: Position IDs that a token sees, itself among them; ``None`` for all before it.
        softcap: Bound of attention scores; ``None`` where they have none.
        has_sinks: Whether learned logits join the softmax.
    """

    num_layers: int
    encoding: str
    rotary_dim: int | None
    key_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What was found out about a model when it was loaded.

    Attributes:
        name: What the user called it.
        architecture: Name of the model's class.
        placement: Where an entry can stand.
        visibilities: What entries may have attended.
        layers: Its kinds of layers.
        max_position: Position IDs that requests may use.
        dtype: Numeric type it computes in.
        bytes_per_token: Of stored keys and values, over all layers, in that type.
        self_check: How its stored KV compared with what it computes by itself.
    """

    name: str
    architecture: str
    placement: Placement
    visibilities: tuple[Visibility, ...]
    layers: tuple[LayerKind, ...]
    max_position: int
    dtype: str
    bytes_per_token: int
    self_check: SelfCheck


def capabilities_of(loaded: LoadedModel) -> Capabilities:
    """Describe a loaded model."""
    found = loaded.detection
    return Capabilities(
        name=loaded.name,
        architecture=loaded.architecture,
        placement=found.positions.placement,
        visibilities=tuple(Visibility),
        layers=layer_kinds(found, loaded.model.config),
        max_position=loaded.max_position,
        dtype=str(loaded.dtype).removeprefix("torch."),
        bytes_per_token=found.shape.bytes_per_token(loaded.dtype),
        self_check=loaded.self_check,
    )


def layer_kinds(found: Detection, config: Any) -> tuple[LayerKind, ...]:  # noqa: ANN401 - configurations share no useful type
    """The kinds of layers of a model, in the order of their first use.

    Args:
        found: What was found out about the model.
        config: Its configuration, which names the scaling of frequencies.
    """
    kinds = []
    for kind in found.positions.kinds:
        numbers = [n for n, layer in enumerate(found.positions.layers) if layer is kind]
        call = found.calls[numbers[0]]
        encoding = kind.encoding
        kinds.append(
            LayerKind(
                num_layers=len(numbers),
                encoding=_encoding_text(encoding, found, _rope_type(config, numbers[0])),
                rotary_dim=encoding.rotary_dim if isinstance(encoding, Rope) else None,
                key_dim=found.shape.key_dim,
                window=kind.window,
                softcap=call.softcap,
                has_sinks=call.sinks is not None,
            )
        )
    return tuple(kinds)


def _encoding_text(encoding: PositionEncoding, found: Detection, rope_type: str) -> str:
    match encoding:
        case Rope():
            return ", ".join(_rope_words(encoding, found, rope_type))
        case Alibi():
            return "ALiBi"
        case Learned():
            return "learned"
        case Absent():
            return "none"
        case _:
            return type(encoding).__name__


def _rope_words(rope: Rope, found: Detection, rope_type: str) -> list[str]:
    words = ["RoPE"]
    if rope.first_channel:
        words = ["RoPE in the rotary channels of MLA"]
    elif rope.rotary_dim < found.shape.key_dim:
        words.append("partial")
    if rope.style is RopeStyle.INTERLEAVED:
        words.append("interleaved")
    if rope_type in _SCALINGS:
        words.append(_SCALINGS[rope_type])
    if rope_type == LONGROPE and found.frozen is not None:
        words.append(f"LongRoPE ({'long' if found.frozen.is_long else 'short'} factors)")
    return words


def _rope_type(config: Any, layer: int) -> str:  # noqa: ANN401 - as above
    """What a configuration calls the scaling of a layer's frequencies."""
    kinds = rope_kinds(config)
    layer_types = getattr(config, "layer_types", None) or ()
    layer_type = layer_types[layer] if layer < len(layer_types) else None
    parameters = kinds.get(layer_type) or kinds.get(None) or {}
    return str(parameters.get("rope_type", "default"))
