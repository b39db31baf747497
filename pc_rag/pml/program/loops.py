"""The turns of a loop over constants."""

from __future__ import annotations

import ast
from itertools import islice
from typing import TYPE_CHECKING

from pc_rag.pml.program.definition import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from pc_rag.pml.program.scope import Lookup, Scope

MAX_TURNS = 10_000
"""Turns of all loops of a program, those of the programs it calls included."""


class Budget:
    """The turns that the loops of a program may still take."""

    def __init__(self) -> None:
        self._num_turns = MAX_TURNS

    def turns(self, node: ast.For, values: Iterable[object]) -> list[object]:
        """The values of a loop.

        Raises:
            RefusedError: They are too many.
        """
        found = list(islice(values, self._num_turns + 1))
        self._num_turns -= len(found)
        if self._num_turns < 0:
            self._num_turns = 0
            raise RefusedError(
                node, f"loops take more than {MAX_TURNS:,} turns; a program unrolls all of them"
            )
        return found


def loop_turns(
    node: ast.For, lookup: Lookup, scope: Scope, budget: Budget
) -> list[Mapping[str, object]]:
    """The names that a loop gives values, turn by turn.

    Args:
        node: The loop.
        lookup: Of the function.
        scope: Around the loop.
        budget: Taken from.

    Raises:
        RefusedError: It is no loop over constants, takes too many turns, or gives a name that has a
            value another one.
    """
    if node.orelse:
        raise RefusedError(node.orelse[0], "else of a loop is not compiled; write it behind")
    for each in ast.walk(node.target):
        if isinstance(each, ast.Name) and scope.has(each.id):
            raise RefusedError(each, f"the loop gives {each.id!r} another value; rename it")
        if not isinstance(each, (ast.Name, ast.Tuple, ast.List, ast.expr_context)):
            raise RefusedError(each, "a loop gives values to names only; name each part")
    values: Any = lookup.known(node.iter, scope)
    try:
        return [dict(_bound(node.target, value)) for value in budget.turns(node, values)]
    except (TypeError, ValueError) as error:
        raise RefusedError(node.iter, f"the loop cannot be unrolled: {error}") from error


def _bound(target: ast.expr, value: Any) -> Iterable[tuple[str, object]]:  # noqa: ANN401 - an item
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    pairs = zip(getattr(target, "elts", ()), value, strict=True)
    return [pair for inner, each in pairs for pair in _bound(inner, each)]
