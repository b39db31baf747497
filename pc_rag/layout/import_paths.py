"""Imports by dotted path, written out as nested imports."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pc_rag.layout.schema_layout import ModuleLayout, targets_in
from pc_rag.pml.nodes import Import, Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pc_rag.layout.schema_layout import Target
    from pc_rag.pml.nodes import PromptChild


def nest_paths(
    children: tuple[PromptChild, ...], targets: Mapping[str, Target]
) -> tuple[PromptChild, ...]:
    """Write ``<a.b/>`` as ``<a><b/></a>``, one level of it.

    A path goes on with an import of the same module that only text stands behind: that text lies
    inside then. So ``<a.b/>, <a.c/>`` is ``<a><b/>, <c/></a>``, and an import of ``a`` that gives
    arguments may stand in front of both. A name that is itself a module's is no path, whatever
    dots are in it; a path that leads nowhere stays as it is.

    Args:
        children: Of a prompt, an import or a turn.
        targets: What imports among them can name.
    """
    nested: list[PromptChild] = []
    inside: dict[int, list[PromptChild]] = {}  # what imports of ``nested`` hold, by index
    inner_targets: dict[str, Mapping[str, Target]] = {}
    for child in children:
        names = _split(child.name, targets, inner_targets) if isinstance(child, Import) else None
        if not isinstance(child, Import) or names is None:
            nested.append(child)
            continue
        head, rest = names
        inner = replace(child, name=rest)
        index = _last_import(nested)
        outer = nested[index] if index >= 0 else None
        if isinstance(outer, Import) and outer.name == head:
            held = inside.setdefault(index, list(outer.children))
            held += [*nested[index + 1 :], inner]
            del nested[index + 1 :]
        else:
            nested.append(Import(head, (inner,), location=child.location))
    for index, held in inside.items():
        outer = nested[index]
        if isinstance(outer, Import):
            nested[index] = replace(outer, children=tuple(held))
    return tuple(nested)


def _last_import(children: list[PromptChild]) -> int:
    """Index of the last child that is no text; -1 without one."""
    index = len(children) - 1
    while index >= 0 and isinstance(children[index], Text):
        index -= 1
    return index


def _split(
    name: str, targets: Mapping[str, Target], inner_targets: dict[str, Mapping[str, Target]]
) -> tuple[str, str] | None:
    """The outermost module of a path and the rest of it; ``None`` for what is no path.

    Args:
        name: Of an import.
        targets: What it can name.
        inner_targets: By path of a module: what imports in it can name, as far as it was asked
            for. Added to.
    """
    if name in targets:
        return None
    for index, character in enumerate(name):
        head = targets.get(name[:index]) if character == "." else None
        if head is None or not isinstance(head.node, ModuleLayout):
            continue
        module = head.node
        if module.path not in inner_targets:
            inner_targets[module.path] = targets_in(module.items)
        rest, inner = name[index + 1 :], inner_targets[module.path]
        if rest in inner or _split(rest, inner, inner_targets):
            return name[:index], rest
    return None
