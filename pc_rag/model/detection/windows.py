"""Sliding windows: what a configuration declares, against what the layers hand to attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pc_rag.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

SLIDING_ATTENTION = "sliding_attention"
"""The layer type of transformers."""
_LOCAL_ATTENTION = "local"
"""GPT-Neo's."""


def declared_windows(config: Any, num_layers: int) -> list[int | None]:  # noqa: ANN401 - configurations share no useful type
    """The window of every layer that a configuration declares; ``None`` where there is none."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        window = _positive(getattr(config, "sliding_window", None))
        return [window if kind == SLIDING_ATTENTION else None for kind in layer_types]
    local_layers = getattr(config, "attention_layers", None)
    if local_layers is not None:
        window = _positive(getattr(config, "window_size", None))
        return [window if kind == _LOCAL_ATTENTION else None for kind in local_layers]
    is_sliding = getattr(config, "use_sliding_window", True)
    window = _positive(getattr(config, "sliding_window", None)) if is_sliding else None
    return [window] * num_layers


def agreed_windows(
    declared: Sequence[int | None], named: Sequence[int | None], architecture: str
) -> list[int | None]:
    """The windows, where no layer's call contradicts the configuration.

    A call may name none: in many models only the mask holds the window, which is not built here.
    The self-check compares with the model's own mask.

    Args:
        declared: By the configuration.
        named: By the calls.
        architecture: For the message.

    Raises:
        UnsupportedModelError: They differ.
    """
    for layer, (configured, called) in enumerate(zip(declared, named, strict=True)):
        if _positive(called) not in (None, configured):
            raise UnsupportedModelError(
                f"{architecture}: layer {layer} attends with a window of {called} tokens, its "
                f"configuration declares {_described(configured)}. One of them is wrong; set "
                "sliding_window and layer_types in config.json as the model was trained",
                architecture,
                "sliding window",
            )
    return list(declared)


def _positive(window: Any) -> int | None:  # noqa: ANN401 - read from a configuration
    return int(window) if window else None


def _described(window: int | None) -> str:
    return "none" if window is None else f"{window} tokens"
