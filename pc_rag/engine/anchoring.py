"""Requests of models whose entries cannot move: every entry read was encoded where it stands.

A plan says where the modules of a prompt stand, and reads each from the entry that its recipe
makes, wherever that was encoded. Where positions are part of the states (``Placement.FIXED``) an
entry serves at that start only, so a part that would be moved reads another entry instead: the same
tokens, encoded at the start where they stand, behind what they attended there::

    encoded    |prefix|module b|
    plan       |prefix|module a|module b|       module b would be moved
    anchored   |prefix|module a|module b'|      b' is encoded here, behind the prefix

Nothing is encoded here: the request gets the recipe, and whoever runs it finds the entry stored or
makes and stores it. Token ids and position IDs of a plan never change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pc_rag.kv.key import VisibilityContext
from pc_rag.layout.plan import Cached, Fresh, FreshKind, Occurrence, RequestPlan
from pc_rag.types import HitKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pc_rag.engine.request import EntryRecipe, Request
    from pc_rag.layout.plan import Part
    from pc_rag.types import ModuleKey


def anchored(request: Request, *, max_position: int) -> Request:
    """The request with every part read from an entry that was encoded where the part stands.

    What an entry attended stands, in the other one's recipe, where it stands in this request: where
    it is read or computed before the module, or else where it was encoded. Where that is not before
    the module, or the whole entry does not end within the model's positions, the part is computed
    (``FreshKind.UNPLACED``).

    An entry that attended all that stands before it, and nothing else does, is an exact hit.

    Args:
        request: What was planned. Not modified.
        max_position: Position IDs that the model has.

    Returns:
        A request without moved parts; ``request`` itself where there are none.
    """
    if not any(part.shift for part in request.plan.cached):
        return request
    anchors = _Anchors(request, max_position)
    moved = tuple(anchors.part(part) for part in request.plan.parts)
    recipes = {**request.recipes, **anchors.recipes}
    plan = RequestPlan(tuple(_with_exact_hits(moved, recipes)))
    return replace(request, plan=plan, recipes=recipes)


class _Anchors:
    """The entries that a request reads instead of moved ones.

    Args:
        request: The request.
        max_position: As of ``anchored``.

    Attributes:
        recipes: How to make those that it had no recipe for, and their contexts.
    """

    def __init__(self, request: Request, max_position: int) -> None:
        self.recipes: dict[ModuleKey, EntryRecipe] = {}
        self._known = request.recipes
        self._max_position = max_position
        self._starts: dict[ModuleKey, list[int]] = {}
        for part in request.plan.parts:
            if part.occurrence is not None:
                self._starts.setdefault(part.occurrence.key, []).append(part.occurrence.start)
        self._found: dict[Occurrence, EntryRecipe | None] = {}

    def part(self, part: Part) -> Part:
        """A part, read from or standing for the entry that was encoded where it stands."""
        use = part.occurrence
        if use is None or use.key not in self._known:
            return part
        recipe = self._recipe_at(use)
        if recipe is None:
            return _computed(part) if isinstance(part, Cached) else part
        key = recipe.address.key
        if isinstance(part, Cached):
            return replace(part, key=key, encoded_start=recipe.address.start)
        return replace(part, occurrence=Occurrence(key, use.start))

    def _recipe_at(self, use: Occurrence) -> EntryRecipe | None:
        """How the entry is made that stands for another one at a start; ``None`` where none can."""
        recipe = self._known[use.key]
        if use.start == recipe.address.start:
            return recipe
        if use not in self._found:
            self._found[use] = found = self._made_at(recipe, use.start)
            if found is not None:
                self.recipes[found.address.key] = found
        return self._found[use]

    def _made_at(self, recipe: EntryRecipe, start: int) -> EntryRecipe | None:
        address = recipe.address
        if start < 0 or start + len(address.token_ids) > self._max_position:
            return None
        context = self._context_before(recipe, start)
        if context is None:
            return None
        attended = address.context
        if context != recipe.context:  # keys tell where each stands, and what it attended there
            attended = VisibilityContext.of_entries(attended.visibility, context)
        moved = replace(address, start=start, context=attended)
        return replace(recipe, address=moved, context=context, origin=address.key)

    def _context_before(self, recipe: EntryRecipe, start: int) -> tuple[ModuleKey, ...] | None:
        """What a module at a start attends, in order; ``None`` where some of it stands behind."""
        keys: list[ModuleKey] = []
        end = 0
        for key in recipe.context:
            found = self._standing_before(key, start)
            if found is None or found.address.start < end:
                return None
            end = found.address.span.end
            keys.append(found.address.key)
        return tuple(keys)

    def _standing_before(self, key: ModuleKey, end: int) -> EntryRecipe | None:
        """An entry as it stands in this request, or else where it was encoded, before ``end``."""
        address = self._known[key].address
        latest = end - len(address.token_ids)
        starts = [start for start in self._starts.get(key, ()) if start <= latest]
        start = max(starts, default=address.start)
        return self._recipe_at(Occurrence(key, start)) if start <= latest else None


def _computed(part: Cached) -> Fresh:
    return Fresh(
        token_ids=part.token_ids,
        span=part.span,
        kind=FreshKind.UNPLACED,
        label=part.label,
        occurrence=part.occurrence,
    )


def _with_exact_hits(
    parts: tuple[Part, ...], recipes: Mapping[ModuleKey, EntryRecipe]
) -> Iterator[Part]:
    """The parts, none of them moved; those that attended just what stands before them are exact."""
    before: list[ModuleKey] = []  # read whole, each of them exact
    num_rows = 0  # read of the last of them
    is_exact = True
    for part in parts:
        if not isinstance(part, Cached):
            is_exact = False
        elif is_exact:
            if part.key not in before[-1:] or part.rows.start != num_rows:
                is_whole = not before or num_rows == len(recipes[before[-1]].address.token_ids)
                is_first = not part.rows.start and recipes[part.key].context == tuple(before)
                is_exact = is_whole and is_first
                before.append(part.key)
            num_rows = part.rows.end
        if isinstance(part, Cached) and is_exact and part.hit_kind is HitKind.COMPOSED:
            part = replace(part, hit_kind=HitKind.EXACT)  # noqa: PLW2901 - the same part
        yield part
