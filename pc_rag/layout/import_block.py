"""Where the imports of one block stand, and why one of them does not fit."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from pc_rag.layout.schema_layout import ScaffoldLayout, UnionLayout, targets_in
from pc_rag.pml.names import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pc_rag.layout.schema_layout import Item, SchemaLayout, Target
    from pc_rag.pml.nodes import Import, Location, Text, Turn
    from pc_rag.types import TokenIds

_NUM_NAMES_SHOWN = 10


class Block:
    """The state of one enclosing import (or of the prompt) while its children are looked up.

    Attributes:
        items: What it holds.
        holder: The schema, module or scaffold, for messages.
        starts_in_role: It lies in a turn as a whole.
        is_in_role: The place of the next text lies in a turn.
        arguments: Tokens for its parameters, by name.
        imports_all: Every module in it is imported, whether a child names it or not.
        location: Of its import.
        targets: What imports in it can name.
        cursor: Index of the first item whose runs have no steps yet.
        taken: The import that took a place.
        trailing: Children that go to its end, because a turn of the schema lies before it.
    """

    def __init__(
        self,
        items: tuple[Item, ...],
        holder: str,
        *,
        location: Location,
        is_in_role: bool,
        starts_in_role: bool,
        arguments: Mapping[str, TokenIds],
        imports_all: bool = False,
    ) -> None:
        self.items = items
        self.holder = holder
        self.location = location
        self.is_in_role = is_in_role
        self.starts_in_role = starts_in_role
        self.arguments = arguments
        self.imports_all = imports_all
        self.targets = targets_in(items)
        self.cursor = 0
        self.taken: dict[tuple[int, int], Import] = {}
        self.trailing: list[Text | Turn] = []

    def has(self, index: int) -> bool:
        """Whether an item was imported."""
        return (index, 0) in self.taken

    def whole_scaffolds(self) -> Iterator[ScaffoldLayout]:
        """The scaffolds of which every member is imported."""
        for index, item in enumerate(self.items):
            if isinstance(item, ScaffoldLayout) and all(
                (index, number) in self.taken for number in range(len(item.members))
            ):
                yield item


def conflict(block: Block, node: Import, target: Target) -> str:
    """Why a module or scaffold cannot be imported now; empty where it can."""
    what = "scaffold" if isinstance(target.node, ScaffoldLayout) else "module"
    for place in target.places:
        first = block.taken.get(place)
        if first is None:
            continue
        at = f"line {first.location.line}, column {first.location.column}"
        if first.name == node.name:
            return f"{what} {node.name!r} is already imported at {at}; remove one"
        if isinstance(block.items[place[0]], UnionLayout):
            return (
                f"modules {first.name!r} and {node.name!r} are members of one union, of which a "
                f"prompt imports at most one; {first.name!r} is imported at {at}"
            )
        return (
            f"{what} {node.name!r} and {first.name!r}, which is imported at {at}, import the same "
            "module; remove one"
        )
    last = next(reversed(block.taken), (0, 0))  # places are taken in order
    if target.places[0] < last:
        return (
            f"{what} {node.name!r} is imported behind {block.taken[last].name!r}, but the schema "
            "declares it before; import modules in the order of the schema"
        )
    return ""


def paths_by_name(layout: SchemaLayout) -> dict[str, tuple[str, ...]]:
    """By name of a module or scaffold: the names from the outermost module to the first of them."""
    paths: dict[str, tuple[str, ...]] = {}
    for names in _paths(layout.items, ()):
        paths.setdefault(names[-1], names)
    return paths


def unknown(
    block: Block, node: Import, paths: Mapping[str, tuple[str, ...]], *, looks_for_close: bool
) -> str:
    """What to say of an import that names nothing, and what to write.

    Args:
        block: Where it stands.
        node: The import.
        paths: Of the schema, as ``paths_by_name`` tells them.
        looks_for_close: Whether to look for names like it, which takes long for many of both.
    """
    message = f"{block.holder} has no module {shorten(node.name)!r}"
    if node.name in paths:
        around = paths[node.name][:-1]
        opened = "".join(f"<{name}>" for name in around)
        closed = "".join(f"</{name}>" for name in reversed(around))
        return f"{message}; write {opened}<{node.name}/>{closed} at the top of the prompt"
    if looks_for_close:
        close = get_close_matches(node.name, [*block.targets, *_dotted(block.items)], n=1)
        if close:
            return f"{message}; did you mean <{close[0]}/>?"
    names = ", ".join(list(block.targets)[:_NUM_NAMES_SHOWN])
    more = ", ..." if len(block.targets) > _NUM_NAMES_SHOWN else ""
    return f"{message}; it has {names}{more}" if names else f"{message}; it has none"


def _dotted(items: tuple[Item, ...]) -> Iterator[str]:
    return (".".join(names) for names in _paths(items, ()) if len(names) > 1)


def _paths(items: tuple[Item, ...], names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, target in targets_in(items).items():
        path = (*names, name)
        yield path
        if not isinstance(target.node, ScaffoldLayout):
            yield from _paths(target.node.items, path)
