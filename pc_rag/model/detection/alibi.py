"""Biases of attention that keys do not show: the known ones are tried against the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.detection.own_attention import own_logits
from pc_rag.model.detection.probing import (
    probe_text,
    recording_runner,
    refused,
    relative_difference,
    tolerance_of,
)
from pc_rag.model.detection.recording import CallRecorder
from pc_rag.model.positions import Alibi
from pc_rag.model.positions.alibi_slopes import bloom_slopes, falcon_slopes, mpt_slopes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pc_rag.model.detection.recording import LayerCall
    from pc_rag.model.positions.frozen_rope import FrozenRope

_NUM_TOKENS = 24
_NUM_LAST = 8


def find_bias(
    model: Any,  # noqa: ANN401 - transformers is untyped here
    calls: Sequence[LayerCall],
    windows: Sequence[int | None],
    frozen: FrozenRope | None,
    *,
    max_position: int,
) -> Alibi | None:
    """The biases with which the model's own logits arise; ``None`` where they arise without.

    Args:
        model: Its keys carry no position in any layer.
        calls: What its layers handed to attention.
        windows: Of its layers.
        frozen: Its frequencies, where they would change.
        max_position: Position IDs that it can take.

    Raises:
        UnsupportedModelError: No known biases give the model's own logits.
    """
    num_tokens = min(_NUM_TOKENS, max_position)
    num_last = min(_NUM_LAST, num_tokens)
    text = probe_text(model, num_tokens)
    with refused(model):
        own = own_logits(model, text, num_last=num_last, frozen=frozen)
    runner = recording_runner(model, frozen)

    def difference(slopes: torch.Tensor | None) -> float:
        last = torch.arange(num_tokens - num_last, num_tokens)
        logits = runner.run_pass(
            CallRecorder(windows=windows, slopes=slopes),
            text,
            torch.arange(num_tokens)[None],
            logits_behind=last,
        )
        return float(relative_difference(logits, own))

    worst, slopes = min(
        ((difference(slopes), slopes) for slopes in _candidates(model, calls[0])),
        key=lambda candidate: candidate[0],
    )
    if worst > tolerance_of(model.dtype):
        architecture = type(model).__name__
        raise UnsupportedModelError(
            f"{architecture}: its keys carry no position, and neither plain attention nor the "
            f"biases (ALiBi) of BLOOM, Falcon or MPT give its logits: they differ by {worst:.2g} "
            f"of their size; allowed {tolerance_of(model.dtype):.2g}. Use a model with one of "
            "these position encodings",
            architecture,
            "position encoding",
        )
    return None if slopes is None else Alibi(slopes.to(model.device))


def _candidates(model: Any, call: LayerCall) -> Iterator[torch.Tensor | None]:  # noqa: ANN401 - as above
    yield None
    yield bloom_slopes(call.num_heads)
    yield falcon_slopes(call.num_heads, call.keys.shape[-1])
    biases = getattr(getattr(model.config, "attn_config", None), "alibi_bias_max", None)
    for bias_max in sorted({8.0, float(biases or 8)}):
        yield mpt_slopes(call.num_heads, bias_max)
