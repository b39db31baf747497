"""Where a model computes, and in which numeric type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pc_rag.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(device: torch.device | str) -> torch.device:
    """The device that a user names.

    Raises:
        ConfigError: torch knows or sees no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use 'auto', 'cpu' or 'cuda'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {str(device)!r} was asked for, but torch {torch.__version__} sees no CUDA "
            f"device; use 'cpu' or 'auto'"
        )
    return chosen


def move_model(model: PreTrainedModel, device: torch.device, name: str | Path) -> None:
    """Move a model's weights.

    Raises:
        ModelError: This torch cannot use the device.
    """
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch built without it
        raise ModelError(
            f"{name}: cannot be moved to device {str(device)!r}: {error}. Use device='cpu', or "
            "install a torch that supports the device"
        ) from error


def choose_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """The dtype that a user names; by default the fastest that serves on the device.

    Raises:
        ConfigError: An unknown one.
    """
    if dtype == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    chosen = _DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None:
        allowed = ", ".join(map(repr, ("auto", *_DTYPES)))
        raise ConfigError(f"dtype must be one of {allowed}; got {str(dtype)!r}")
    return chosen
