"""What explains how the keys of each layer change with their position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pc_rag.errors import UnsupportedModelError
from pc_rag.model.detection.frequencies import rotations
from pc_rag.model.detection.probing import find_tables, relative_difference, tolerance_of
from pc_rag.model.positions import Absent, Learned

if TYPE_CHECKING:
    from pc_rag.model.detection.position_table import PositionTable
    from pc_rag.model.detection.probing import Probe
    from pc_rag.model.positions import PositionEncoding
    from pc_rag.model.positions.frozen_rope import FrozenRope


def explain_layers(
    model: Any,  # noqa: ANN401 - transformers is untyped here
    probed: Probe,
    frozen: FrozenRope | None,
) -> tuple[list[PositionEncoding], PositionTable | None]:
    """The encoding of every layer, and the table of positions where they are learned.

    Args:
        model: It is left as it was.
        probed: What its layers did; they have one shape.
        frozen: Its frequencies, where they would change.

    Returns:
        One encoding for each layer; like layers share one object.

    Raises:
        UnsupportedModelError: Nothing explains the keys or the values of a layer.
    """
    candidates: list[PositionEncoding] = [Absent()]
    candidates += rotations(model, probed.keys.shape[-1], frozen)
    differences = torch.stack([_differences(candidate, probed) for candidate in candidates])
    worst, shift = differences.max(dim=1)  # over the starts
    least, best = worst.min(dim=0)  # over the candidates
    num_layers = len(best)
    layer = int(least.argmax())
    if least[layer] <= tolerance_of(model.dtype):
        return [candidates[number] for number in best.tolist()], None
    tables = find_tables(model, probed, frozen)
    if tables:
        smallest = min(tables, key=lambda table: table.num_positions)
        return [Learned()] * num_layers, smallest
    moved_by = list(probed.moved)[int(shift[best[layer], layer])]
    raise _unexplained(model, layer, moved_by, float(least[layer]))


def _differences(encoding: PositionEncoding, probed: Probe) -> torch.Tensor:
    """The larger difference of keys and values, ``[num_starts, num_layers]``."""
    return torch.stack(
        [
            torch.maximum(
                relative_difference(encoding.place(probed.keys, shift), keys),
                relative_difference(probed.values, values),
            )
            for shift, (keys, values) in probed.moved.items()
        ]
    )


def _unexplained(model: Any, layer: int, shift: int, difference: float) -> UnsupportedModelError:  # noqa: ANN401 - as above
    architecture = type(model).__name__
    return UnsupportedModelError(
        f"{architecture}: keys and values of layer {layer} encoded at position 0 and moved by "
        f"{shift} differ from those encoded there by {difference:.2g} of their size; allowed "
        f"{tolerance_of(model.dtype):.2g}. No rotation that the model's frequencies allow explains "
        "them, and it reads no table by position; use a model with RoPE, ALiBi or learned "
        "positions",
        architecture,
        "position encoding",
    )
