"""From a model to what runs it: nothing about its attention is taken from its name."""

from __future__ import annotations

from typing import Any

from pc_rag.model.detect_rope import detect_rope
from pc_rag.model.positions import uniform
from pc_rag.model.runner import Runner


def runner_of(model: Any) -> Runner:  # noqa: ANN401 - transformers is untyped here
    """A runner of a model, proved on the model itself.

    Raises:
        UnsupportedModelError: Its keys and values cannot be placed.
    """
    return Runner(model, uniform(detect_rope(model), model.config.num_hidden_layers))
