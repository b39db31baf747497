"""A schema's layout as rows, for people and for ``pc-rag pml layout``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pc_rag.layout.schema_layout import ModuleLayout, RunItem, UnionLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.layout.schema_layout import Item, SchemaLayout
    from pc_rag.types import Span


class RowKind(StrEnum):
    """What a row stands for."""

    SCHEMA = "schema"
    TEXT = "text"
    """Text that is present whenever its module is."""
    MODULE = "module"
    UNION = "union"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One node of a layout.

    Attributes:
        name: Of the schema or module; empty for text and unions.
        path: Dotted path of its module (the module itself, or the one that holds the text or
            union); the schema's name on the first row; empty for what lies in no module.
        kind: What it is.
        depth: Nodes around it; 0 for the schema.
        span: Position IDs from its start to its own end.
        num_reserved: Position IDs kept free for it; for members of a union those of the longest.
        num_tokens: Tokens stored for it and all below, alternatives included.
    """

    name: str
    path: str
    kind: RowKind
    depth: int
    span: Span
    num_reserved: int
    num_tokens: int


def layout_rows(layout: SchemaLayout) -> tuple[LayoutRow, ...]:
    """The nodes of a layout in document order, each before what it holds."""
    root = LayoutRow(
        name=layout.name,
        path=layout.name,
        kind=RowKind.SCHEMA,
        depth=0,
        span=layout.span,
        num_reserved=len(layout.span),
        num_tokens=sum(len(run.token_ids) for run in layout.runs),
    )
    return (root, *_rows_of(layout.items, path="", depth=1))


def _rows_of(items: tuple[Item, ...], *, path: str, depth: int) -> Iterator[LayoutRow]:
    for item in items:
        if isinstance(item, ModuleLayout):
            yield from _module_rows(item, depth=depth, num_reserved=len(item.span))
            continue
        yield LayoutRow(
            name="",
            path=path,
            kind=RowKind.TEXT if isinstance(item, RunItem) else RowKind.UNION,
            depth=depth,
            span=item.span,
            num_reserved=len(item.span),
            num_tokens=_num_tokens(item),
        )
        if isinstance(item, UnionLayout):
            for member in item.members:
                yield from _module_rows(member, depth=depth + 1, num_reserved=len(item.span))


def _module_rows(module: ModuleLayout, *, depth: int, num_reserved: int) -> Iterator[LayoutRow]:
    yield LayoutRow(
        name=module.name,
        path=module.path,
        kind=RowKind.MODULE,
        depth=depth,
        span=module.span,
        num_reserved=num_reserved,
        num_tokens=_num_tokens(module),
    )
    yield from _rows_of(module.items, path=module.path, depth=depth + 1)


def _num_tokens(item: Item) -> int:
    if isinstance(item, RunItem):
        return len(item.span)
    children = item.items if isinstance(item, ModuleLayout) else item.members
    return sum(_num_tokens(child) for child in children)
