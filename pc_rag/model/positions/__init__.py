"""Position encodings: letting keys stand at other position IDs than they were encoded at."""

from pc_rag.model.positions.rope import Rope, RopeStyle

__all__ = ["Rope", "RopeStyle"]
