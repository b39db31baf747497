"""From a model to what runs it: nothing about its attention is taken from its name.

A short text is encoded at several starts by the model itself, with slow attention that keeps what
each layer hands over. How a layer's keys change from start to start says which encoding it has:

    keys turn by a rotation that the model's frequencies allow     RoPE
    keys stay, and biases of a known kind give the model's logits  ALiBi
    keys stay, and no biases do                                    no encoding
    nothing explains them, and the model reads a table by position learned positions

What none of these explains is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pc_rag.errors import ConfigError
from pc_rag.model.detection.alibi import find_bias
from pc_rag.model.detection.encodings import explain_layers
from pc_rag.model.detection.limits import check_within, named_limit, position_limit
from pc_rag.model.detection.probing import probe
from pc_rag.model.detection.windows import agreed_windows, declared_windows
from pc_rag.model.positions import (
    Absent,
    LayerAttention,
    ModelPositions,
    PositionEncoding,
)
from pc_rag.model.positions.frozen_rope import frozen_rope, original_max_position
from pc_rag.model.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.buffer_pool import KVShape
    from pc_rag.model.detection.position_table import PositionTable
    from pc_rag.model.detection.recording import LayerCall
    from pc_rag.model.positions.frozen_rope import FrozenRope


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Detection:
    """What a model was seen to do.

    Attributes:
        positions: How each layer tells positions apart.
        shape: Geometry of its KV.
        calls: What each layer handed to attention, for a text of a few tokens.
        frozen: Its frequencies, where they would change with the prompt's length.
        max_position: Position IDs it can take.
    """

    positions: ModelPositions
    shape: KVShape
    calls: tuple[LayerCall, ...]
    frozen: FrozenRope | None
    max_position: int


def runner_of(model: Any, found: Detection | None = None) -> Runner:  # noqa: ANN401 - transformers is untyped here
    """A runner of a model.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        found: What ``detect`` returned for it; detected now by default.

    Raises:
        UnsupportedModelError: Its keys and values cannot be placed.
    """
    found = found or detect(model)
    return Runner(model, found.positions, found.shape, frozen=found.frozen)


def detect(model: Any, *, max_position: int | None = None) -> Detection:  # noqa: ANN401 - as above
    """Find out, on the model itself, how its layers encode positions and attend.

    Args:
        model: A causal language model in evaluation mode. It is left as it was.
        max_position: Position IDs that requests may use; see ``loading.load_model``.

    Raises:
        UnsupportedModelError: Its keys and values cannot be placed.
        ConfigError: More position IDs than the model has.
    """
    architecture = type(model).__name__
    limit = position_limit(model.config, max_position, architecture=architecture)
    named = named_limit(model.config)
    original = original_max_position(model.config)
    frozen = frozen_rope(model, is_long=original is not None and limit > original)
    probed = probe(model, max_position=min(limit, named or limit), frozen=frozen)
    windows = _windows_of(model, probed.calls, limit)
    encodings, table = explain_layers(model, probed, frozen)
    if table is not None:
        limit = _within_table(table, limit, max_position, architecture)
    elif all(isinstance(encoding, Absent) for encoding in encodings):
        bias = find_bias(model, probed.calls, windows, frozen, max_position=limit)
        encodings = [bias or encodings[0]] * len(encodings)
    else:
        check_within(named, max_position, architecture)
    return Detection(
        positions=_grouped(encodings, windows),
        shape=probed.shape,
        calls=probed.calls,
        frozen=frozen,
        max_position=limit,
    )


def _windows_of(model: Any, calls: Sequence[LayerCall], limit: int) -> list[int | None]:  # noqa: ANN401 - as above
    """The window of every layer; ``None`` also where no request is long enough for it to matter."""
    windows = agreed_windows(
        declared_windows(model.config, len(calls)),
        [call.window for call in calls],
        type(model).__name__,
    )
    return [window if window is not None and window < limit else None for window in windows]


def _within_table(table: PositionTable, limit: int, asked: int | None, architecture: str) -> int:
    rows = table.num_positions
    if asked is not None and asked > rows:
        raise ConfigError(
            f"max_position {asked} is more than the {rows} position IDs that the table of "
            f"{architecture} holds; pass at most {rows}"
        )
    return min(limit, rows)


def _grouped(
    encodings: Sequence[PositionEncoding], windows: Sequence[int | None]
) -> ModelPositions:
    """One object for all layers that are alike."""
    kinds: dict[tuple[int, int | None], LayerAttention] = {}
    return ModelPositions(
        tuple(
            kinds.setdefault((id(encoding), window), LayerAttention(encoding, window))
            for encoding, window in zip(encodings, windows, strict=True)
        )
    )
