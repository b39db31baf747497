"""What pc-rag can do with a loaded model, in numbers and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pc_rag.model.frozen_rope import LONGROPE, rope_kinds
from pc_rag.model.positions import Alibi, Learned, Rope, RopeStyle
from pc_rag.types import Visibility

if TYPE_CHECKING:
    from pc_rag.model.detect import Detection
    from pc_rag.model.loading import LoadedModel
    from pc_rag.model.positions import PositionEncoding
    from pc_rag.model.self_check import SelfCheck
    from pc_rag.types import Placement

_SCALINGS = {"linear": "linear scaling", "llama3": "Llama 3 scaling", "yarn": "YaRN"}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of a model that are alike.

    Attributes:
        num_layers: How many.
        encoding: How positions enter, in words, for example
            ``RoPE, interleaved pairs, 32 of 64 channels, YaRN factor 4``.
        window: Tokens that a query sees, itself included; ``None`` where it sees all before it.
    """

    num_layers: int
    encoding: str
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What pc-rag can do with a model.

    Attributes:
        architecture: Name of the model's class.
        placement: Where an entry can stand.
        layers: The kinds of layers, in the order of their first use.
        visibilities: What modules may be encoded to see.
        max_position: Position IDs that requests may use.
        bytes_per_token: Bytes of one token's keys and values in the compute dtype.
        softcap: Bound that scores are squashed into; ``None`` where they are not.
        has_sinks: Whether learned logits join each softmax.
        has_latent_attention: Whether the model compresses keys and values (MLA). Entries hold them
            expanded, per head.
        self_check: How stored and moved KV compared with what the model computes by itself.
    """

    architecture: str
    placement: Placement
    layers: tuple[LayerKind, ...]
    visibilities: tuple[Visibility, ...]
    max_position: int
    bytes_per_token: int
    softcap: float | None
    has_sinks: bool
    has_latent_attention: bool
    self_check: SelfCheck


def capabilities_of(loaded: LoadedModel) -> Capabilities:
    """What pc-rag can do with a loaded model; nothing is computed by the model for it.

    Args:
        loaded: From ``load_model`` or ``wrap_model``.
    """
    found = loaded.detection
    config: Any = loaded.model.config
    call = found.calls[0]
    return Capabilities(
        architecture=loaded.architecture,
        placement=found.positions.placement,
        layers=_layer_kinds(found, config),
        visibilities=tuple(Visibility),
        max_position=loaded.max_position,
        bytes_per_token=found.shape.bytes_per_token(loaded.dtype),
        softcap=call.softcap,
        has_sinks=call.sinks is not None,
        has_latent_attention=bool(getattr(config, "kv_lora_rank", None)),
        self_check=loaded.self_check,
    )


def _layer_kinds(found: Detection, config: Any) -> tuple[LayerKind, ...]:  # noqa: ANN401 - configurations share no useful type
    layers = found.positions.layers
    counts = Counter(layers)
    return tuple(
        LayerKind(
            counts[kind],
            _described(kind.encoding, found, _rope_parameters(config, layers.index(kind))),
            kind.window,
        )
        for kind in found.positions.kinds
    )


def _rope_parameters(config: Any, layer: int) -> dict[str, Any]:  # noqa: ANN401 - as above
    kinds = rope_kinds(config)
    layer_types = getattr(config, "layer_types", None)
    return kinds.get(None) or kinds.get(layer_types[layer] if layer_types else None) or {}


def _described(encoding: PositionEncoding, found: Detection, rope: dict[str, Any]) -> str:
    if isinstance(encoding, Alibi):
        steepest, flattest = float(encoding.slopes.max()), float(encoding.slopes.min())
        return f"ALiBi, slopes from {flattest:.3g} to {steepest:.3g}"
    if isinstance(encoding, Learned):
        return "learned positions"
    if not isinstance(encoding, Rope):
        return "no positions"
    pairs = "interleaved pairs" if encoding.style is RopeStyle.INTERLEAVED else "halves"
    channels = f"{encoding.rotary_dim} of {found.shape.key_dim} channels"
    if encoding.first_channel:
        channels = f"the last {channels}"
    return ", ".join(filter(None, ("RoPE", pairs, channels, _scaling(found, rope))))


def _scaling(found: Detection, rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type", "default")
    if kind == LONGROPE and found.frozen is not None:
        return f"LongRoPE with {'long' if found.frozen.is_long else 'short'} factors"
    if kind not in _SCALINGS:
        return ""
    return f"{_SCALINGS[kind]} factor {rope.get('factor', 1):g}"
