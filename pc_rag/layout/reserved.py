"""What the parameters of a schema reserve, told before it is laid out.

A parameter of a few characters reserves up to a million tokens, so a small document could ask for
more memory than there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.errors import LayoutError
from pc_rag.pml.nodes import Module, Parameter, RoleBlock, Scaffold, Text, Union

if TYPE_CHECKING:
    from pc_rag.pml.nodes import Schema, SchemaChild

MAX_RESERVED_TOKENS = 10_000_000
"""Tokens that the parameters of one schema may reserve, all members of unions counted."""


def check_reserved(schema: Schema, max_position: int | None) -> None:
    """Refuse a schema whose parameters alone reserve too much.

    Args:
        schema: A parsed schema.
        max_position: Position IDs that the model has; ``None`` where it sets no limit.

    Raises:
        LayoutError: They reserve more position IDs than the model has, or more tokens than
            ``MAX_RESERVED_TOKENS``.
    """
    positions, tokens = _reserved(schema.children)
    if max_position is not None and positions > max_position:
        raise LayoutError(
            f"schema {schema.name!r}: its parameters alone reserve {positions:,} position IDs, the "
            f"model has {max_position:,}; shorten them, or make alternatives a union"
        )
    if tokens > MAX_RESERVED_TOKENS:
        raise LayoutError(
            f"schema {schema.name!r}: its parameters reserve {tokens:,} tokens in all, at most "
            f"{MAX_RESERVED_TOKENS:,} are allowed; shorten them"
        )


def _reserved(children: tuple[SchemaChild, ...]) -> tuple[int, int]:
    """Position IDs and tokens; members of a union share their positions."""
    positions = tokens = 0
    for child in children:
        match child:
            case Text():
                continue
            case Parameter(max_tokens=length):
                own = (length, length)
            case Module(children=inner) | RoleBlock(children=inner) | Scaffold(members=inner):
                own = _reserved(inner)
            case Union(members=members):
                each = [_reserved(member.children) for member in members]
                own = (max(p for p, _ in each), sum(t for _, t in each))
        positions += own[0]
        tokens += own[1]
    return positions, tokens
