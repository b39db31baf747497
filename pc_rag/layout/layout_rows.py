"""A schema's layout as rows, for people and for ``pc-rag pml layout``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pc_rag.layout.schema_layout import ModuleLayout, RunItem, ScaffoldLayout, UnionLayout
from pc_rag.types import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pc_rag.layout.schema_layout import Item, Run, SchemaLayout


class RowKind(StrEnum):
    """What a row stands for."""

    SCHEMA = "schema"
    TEXT = "text"
    """Text that is present whenever its module is."""
    PARAMETER = "parameter"
    """Positions in a text that an argument fills."""
    MODULE = "module"
    UNION = "union"
    SCAFFOLD = "scaffold"
    """Modules that are stored together, besides each on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One node of a layout.

    Attributes:
        name: Of the schema, module, parameter or scaffold; empty for text and unions.
        path: Dotted path of the module or scaffold, or of the module that holds the text,
            parameter or union; the schema's name on the first row; empty for what lies in no
            module.
        kind: What it is.
        depth: Nodes around it; 0 for the schema.
        span: Position IDs from its start to its own end.
        num_reserved: Position IDs kept free for it; for members of a union those of the longest.
        num_tokens: Tokens stored for it and all below, alternatives included; of a scaffold those
            of its members twice, because they are stored together too.
        num_entries: Entries stored for it and all below: one for each text, none for a parameter,
            and one more for a scaffold.
    """

    name: str
    path: str
    kind: RowKind
    depth: int
    span: Span
    num_reserved: int
    num_tokens: int
    num_entries: int


def layout_rows(layout: SchemaLayout) -> tuple[LayoutRow, ...]:
    """The nodes of a layout in document order, each before what it holds."""
    return tuple(_Rows(layout.runs).of_schema(layout))


class _Rows:
    """Makes the rows.

    Args:
        runs: Of the layout.
    """

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self._runs = runs

    def of_schema(self, layout: SchemaLayout) -> Iterator[LayoutRow]:
        yield LayoutRow(
            name=layout.name,
            path=layout.name,
            kind=RowKind.SCHEMA,
            depth=0,
            span=layout.span,
            num_reserved=len(layout.span),
            num_tokens=sum(len(run.token_ids) for run in layout.runs if run.is_entry),
            num_entries=sum(run.is_entry for run in layout.runs),
        )
        yield from self._of_items(layout.items, path="", depth=1)

    def _of_items(self, items: Iterable[Item], *, path: str, depth: int) -> Iterator[LayoutRow]:
        for item in items:
            yield from self._of_item(item, path=path, depth=depth, num_reserved=len(item.span))

    def _of_item(
        self, item: Item, *, path: str, depth: int, num_reserved: int
    ) -> Iterator[LayoutRow]:
        entries = list(self._entries(item))
        name = ""
        if isinstance(item, ModuleLayout | ScaffoldLayout):
            name, path = item.name, item.path
        yield LayoutRow(
            name=name,
            path=path,
            kind=_kind(item),
            depth=depth,
            span=item.span,
            num_reserved=num_reserved,
            num_tokens=sum(len(run.token_ids) for run in entries),
            num_entries=len(entries),
        )
        match item:
            case RunItem():
                yield from self._of_parameters(item, path=path, depth=depth + 1)
            case ModuleLayout():
                yield from self._of_items(item.items, path=path, depth=depth + 1)
            case ScaffoldLayout():
                yield from self._of_items(item.members, path=path, depth=depth + 1)
            case UnionLayout():
                for member in item.members:
                    yield from self._of_item(
                        member, path=path, depth=depth + 1, num_reserved=len(item.span)
                    )

    def _of_parameters(self, item: RunItem, *, path: str, depth: int) -> Iterator[LayoutRow]:
        run = self._runs[item.index]
        for each in run.parameters:
            start = item.span.start + each.rows.start
            yield LayoutRow(
                name=each.parameter.name,
                path=path,
                kind=RowKind.PARAMETER,
                depth=depth,
                span=Span(start, start + len(each.rows)),
                num_reserved=len(each.rows),
                num_tokens=len(each.rows) if run.is_entry else 0,
                num_entries=0,
            )

    def _entries(self, item: Item) -> Iterator[Run]:
        """The runs that are stored for an item and all below."""
        match item:
            case RunItem(index=index):
                runs: Iterable[Run] = (self._runs[index],)
            case ModuleLayout(items=items):
                runs = (run for each in items for run in self._entries(each))
            case UnionLayout(members=members) | ScaffoldLayout(members=members):
                runs = (run for each in members for run in self._entries(each))
        yield from (run for run in runs if run.is_entry)
        joint = item.joint_index if isinstance(item, ScaffoldLayout) else None
        if joint is not None and self._runs[joint].is_entry:
            yield self._runs[joint]


def _kind(item: Item) -> RowKind:
    match item:
        case RunItem():
            return RowKind.TEXT
        case ModuleLayout():
            return RowKind.MODULE
        case UnionLayout():
            return RowKind.UNION
        case ScaffoldLayout():
            return RowKind.SCAFFOLD
