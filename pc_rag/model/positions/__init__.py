"""Position encodings: letting keys stand at other position IDs than they were encoded at."""

from pc_rag.model.positions.absent import Absent
from pc_rag.model.positions.alibi import Alibi
from pc_rag.model.positions.base import (
    LayerAttention,
    ModelPositions,
    PositionEncoding,
    uniform,
)
from pc_rag.model.positions.learned import Learned
from pc_rag.model.positions.rope import Rope, RopeStyle

__all__ = [
    "Absent",
    "Alibi",
    "LayerAttention",
    "Learned",
    "ModelPositions",
    "PositionEncoding",
    "Rope",
    "RopeStyle",
    "uniform",
]
