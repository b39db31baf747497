"""Which runs of a schema belong together: those of a union's members, and those of a module."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pc_rag.errors import Problem, PromptError
from pc_rag.layout.schema_layout import (
    ModuleLayout,
    RunItem,
    ScaffoldLayout,
    UnionLayout,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pc_rag.engine.request import EntryRecipe
    from pc_rag.layout.schema_layout import Item, SchemaLayout

_NUM_PATHS_SHOWN = 10


def with_siblings(layout: SchemaLayout, recipes: Sequence[EntryRecipe]) -> list[EntryRecipe]:
    """The recipes of a schema's runs, each with its siblings.

    Args:
        layout: Of the schema.
        recipes: By index of the run.
    """
    siblings = sibling_runs(layout)
    keys = [recipe.address.key for recipe in recipes]
    return [
        # Members of the same text and place share an entry, which is no sibling of itself.
        replace(recipe, siblings=tuple(dict.fromkeys(keys[i] for i in found if keys[i] != own)))
        if (found := siblings.get(index))
        else recipe
        for index, (own, recipe) in enumerate(zip(keys, recipes, strict=True))
    ]


def sibling_runs(layout: SchemaLayout) -> dict[int, tuple[int, ...]]:
    """By index of each run in a union's member: the runs of the other members.

    Those of the innermost union come first; a member's runs are those of all it holds, as far as
    they have entries.
    """
    found: dict[int, tuple[int, ...]] = {}
    for union in _unions_in(layout.items):
        runs = [_entries_in(layout, member.items) for member in union.members]
        for number, own in enumerate(runs):
            others = tuple(i for each in (*runs[:number], *runs[number + 1 :]) for i in each)
            for index in own:
                found[index] = (*found.get(index, ()), *others)
    return found


def runs_of(layout: SchemaLayout, paths: Collection[str] | None) -> list[int]:
    """Indexes of the runs of some modules and of what they attend, in document order.

    Args:
        layout: Of their schema.
        paths: Dotted paths of modules and scaffolds, each with all that it holds; ``None`` for all
            runs. What has no entry is left out.

    Raises:
        PromptError: There are no such modules, all of which are named; or a single text.
    """
    if paths is None:
        return _entries_in(layout, layout.items)
    if isinstance(paths, str) or not isinstance(paths, Collection):
        what = "text" if isinstance(paths, str) else type(paths).__name__
        raise PromptError(f"got a single {what} for paths; pass a list of paths of modules")
    items = dict(_paths_in(layout.items))
    unknown = [each for each in paths if not isinstance(each, str) or each not in items]
    if unknown:
        problems = (_unknown(layout, path, list(items)) for path in unknown)
        raise PromptError(tuple(Problem(0, 0, problem) for problem in problems))
    wanted = {index for path in paths for index in _entries_in(layout, items[path])}
    attended = {i for index in wanted for i in layout.runs[index].context}
    return sorted(i for i in wanted | attended if layout.runs[i].is_entry)


def _unknown(layout: SchemaLayout, path: object, paths: Sequence[str]) -> str:
    message = f"schema {layout.name!r} has no module {path!r}"
    close = get_close_matches(str(path), paths, n=1)
    if close:
        return f"{message}; did you mean {close[0]!r}?"
    more = ", ..." if len(paths) > _NUM_PATHS_SHOWN else ""
    return f"{message}; it has {', '.join(paths[:_NUM_PATHS_SHOWN]) or 'none'}{more}"


def _entries_in(layout: SchemaLayout, items: tuple[Item, ...]) -> list[int]:
    """Indexes of all runs with an entry, at any depth."""
    return sorted(index for index in _runs_in(items) if layout.runs[index].is_entry)


def _runs_in(items: tuple[Item, ...]) -> Iterator[int]:
    for item in items:
        match item:
            case RunItem(index=index):
                yield index
            case ScaffoldLayout(joint_index=int(index)):
                yield index
        for module in _modules_of(item):
            yield from _runs_in(module.items)


def _unions_in(items: tuple[Item, ...]) -> Iterator[UnionLayout]:
    """Every union, the inner ones before those around them."""
    for item in items:
        for module in _modules_of(item):
            yield from _unions_in(module.items)
        if isinstance(item, UnionLayout):
            yield item


def _paths_in(items: tuple[Item, ...]) -> Iterator[tuple[str, tuple[Item, ...]]]:
    """Every path, with the items that it stands for."""
    for item in items:
        if isinstance(item, ScaffoldLayout):
            yield item.path, (item,)
        for module in _modules_of(item):
            yield module.path, module.items
            yield from _paths_in(module.items)


def _modules_of(item: Item) -> tuple[ModuleLayout, ...]:
    """The modules that an item is or has as members."""
    match item:
        case RunItem():
            return ()
        case ModuleLayout():
            return (item,)
        case _:
            return item.members
