"""Watching a forward pass for tables that are read by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    torch.ops.aten.embedding.default: lambda args: args[1],
    torch.ops.aten.index_select.default: lambda args: args[2],
    torch.ops.aten.index.Tensor: lambda args: args[1][0],
}
"""Operations that read rows of a table, and where their arguments hold the rows' indices."""


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A table that a model reads one row of for each position ID.

    Attributes:
        num_rows: Rows of the table.
        offset: Row of position ID 0.
    """

    num_rows: int
    offset: int

    @property
    def num_positions(self) -> int:
        """Position IDs that have a row."""
        return self.num_rows - self.offset


class TableReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, finds tables that are read at consecutive rows from ``start`` on.

    Args:
        start: Position ID of the text's first token.
        num_tokens: Length of the text.

    Attributes:
        found: Those tables.
    """

    def __init__(self, start: int, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start = start
        self._num_tokens = num_tokens
        self.found: set[PositionTable] = set()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch declares it
        types: Any,  # noqa: ANN401 - alike
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - alike
        read = _READS.get(func)
        if read is not None:
            self._note(args[0], read(args))
        return func(*args, **(kwargs or {}))

    def _note(self, table: torch.Tensor, rows: torch.Tensor | None) -> None:
        is_table = table.ndim == 2 and table.is_floating_point()  # noqa: PLR2004 - rows and channels
        if not is_table or rows is None or rows.dtype is torch.bool:
            return
        if rows.numel() != self._num_tokens:
            return
        row = rows.flatten()
        if bool((row.diff() == 1).all()):
            self.found.add(PositionTable(table.shape[0], int(row[0]) - self._start))
