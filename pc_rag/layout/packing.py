"""How many whole chunks fit a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def num_fitting(counts: Iterable[int], room: int, *, separator_tokens: int) -> int:
    """How many of the first chunks fit side by side, none of them split and none left out between.

    Args:
        counts: Tokens of each chunk, in the order of the prompt.
        room: Tokens that there is room for.
        separator_tokens: Tokens between two chunks.
    """
    fitting = 0
    for count in counts:
        room -= count + (separator_tokens if fitting else 0)
        if room < 0:
            break
        fitting += 1
    return fitting
