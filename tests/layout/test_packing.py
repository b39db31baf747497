"""Whole chunks, as many as fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pc_rag.layout.packing import num_fitting


@pytest.mark.parametrize(
    ("room", "expected"), [(-1, 0), (9, 0), (10, 1), (21, 1), (22, 2), (53, 2), (54, 3), (99, 3)]
)
def test_chunks_fit_with_separators_when_room_grows(room, expected):
    """Separators stand between chunks only; the last token of room is used."""
    assert num_fitting([10, 10, 30], room, separator_tokens=2) == expected


@given(st.lists(st.integers(0, 50)), st.integers(-5, 400), st.integers(0, 5))
def test_no_more_and_no_fewer_fit_when_they_are_counted(counts, room, separator):
    """What is taken fits, and one more would not."""

    def needed(num: int) -> int:
        return sum(counts[:num]) + separator * max(num - 1, 0)

    fitting = num_fitting(counts, room, separator_tokens=separator)
    assert fitting == 0 or needed(fitting) <= room
    assert fitting == len(counts) or needed(fitting + 1) > room
