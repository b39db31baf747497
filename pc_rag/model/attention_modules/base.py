"""The contract of attention code of our own, and how attention finds the pass it belongs to.

A forward pass belongs to the thread that runs it, and so does what it attends: architectures differ
in which keyword arguments reach their layers, threads do not. A thread that calls a model while
another runs a pass of it carries nothing, and is told so.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pc_rag.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_CARRIED = threading.local()


class RunningPass(Protocol):
    """What the layers of one forward pass attend through.

    Attributes:
        num_layers_served: Layers that attended so far.
    """

    num_layers_served: int

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a layer's fresh KV, and attend everything its tokens may see.

        Args:
            layer: Index of the layer.
            queries: ``[batch_size, num_heads, num_tokens, head_dim]``, rotated where the layer
                rotates.
            keys: ``[batch_size, num_kv_heads, num_tokens, head_dim]``, alike.
            values: ``[batch_size, num_kv_heads, num_tokens, value_dim]``.
            scaling: Factor on the scores.
            softcap: Scores become ``softcap * tanh(scores / softcap)``.
            sinks: ``[num_heads]``; logits that join each softmax, with value 0.

        Returns:
            ``[batch_size, num_heads, num_tokens, value_dim]`` in the dtype of ``queries``.
        """


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """Attention code of our own for an architecture that does not call transformers' interface.

    Attributes:
        class_names: Its attention modules, by full name. Subclasses are others' code.
        forward: Called as the module's ``forward``, the module first; whatever else the
            architecture hands over (masks, biases, caches) is taken and left alone.
        takes_positions: Whether the model takes ``position_ids``.
        takes_mask: Whether the model's code fails where transformers builds no mask, so that it
            needs one, which nobody looks at.
    """

    class_names: tuple[str, ...]
    forward: Callable[..., tuple[torch.Tensor, None]]
    takes_positions: bool = True
    takes_mask: bool = False


@contextmanager
def carry(running: RunningPass) -> Iterator[None]:
    """Let layers that this thread runs inside attend through ``running``."""
    before = getattr(_CARRIED, "running", None)
    _CARRIED.running = running
    try:
        yield
    finally:
        _CARRIED.running = before


def running_pass(module: Any) -> RunningPass:  # noqa: ANN401 - attention modules share no useful type
    """The pass that this thread carries.

    Args:
        module: Who asks; for the message.

    Raises:
        ModelError: There is none.
    """
    running: RunningPass | None = getattr(_CARRIED, "running", None)
    if running is None:
        raise ModelError(
            f"{type(module).__name__} was called without pc-rag's pass: by its owner, on another "
            "thread, while pc-rag was running it. Give pc-rag a model of its own, or serialise "
            "the calls"
        )
    return running


def split_heads(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[batch_size, num_tokens, channels]`` to ``[batch_size, num_heads, num_tokens, head_dim]``.

    Returns:
        A view.
    """
    return states.view(*states.shape[:2], num_heads, -1).transpose(1, 2)


def merge_heads(out: torch.Tensor) -> torch.Tensor:
    """The inverse of ``split_heads``; a copy."""
    return out.transpose(1, 2).flatten(2)


def attend_projected(
    module: Any,  # noqa: ANN401 - attention modules share no useful type
    hidden_states: torch.Tensor,
    *,
    layer: int,
    scaling: float,
) -> tuple[torch.Tensor, None]:
    """Attention of a module with ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``.

    Args:
        module: It has ``num_heads``, too.
        hidden_states: ``[batch_size, num_tokens, hidden_size]``, normalised.
        layer: Index of the layer.
        scaling: Factor on the scores.
    """
    running = running_pass(module)
    queries, keys, values = (
        split_heads(project(hidden_states), module.num_heads)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    out = running.attend(layer, queries, keys, values, scaling=scaling)
    return module.out_proj(merge_heads(out)), None
