"""What the engine needs to run a prompt: its plan, and how to make the entries it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.errors import LayoutError
from pc_rag.layout.plan import Fresh

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pc_rag.kv.key import EntryAddress
    from pc_rag.layout.plan import RequestPlan
    from pc_rag.types import MissReason, ModuleKey


@dataclass(frozen=True, slots=True)
class EntryRecipe:
    """How to make an entry that is not stored.

    Attributes:
        address: The entry.
        context: Keys of the entries it attends, by rising position ID; each has a recipe too.
        siblings: Keys of the entries that a prompt could read in its place: those of the other
            members of the unions that it lies in.
        origin: The entry of the same tokens that this one stands for at another start, where
            positions are fixed (``engine.anchoring``); ``None`` of any other.
    """

    address: EntryAddress
    context: tuple[ModuleKey, ...] = ()
    siblings: tuple[ModuleKey, ...] = ()
    origin: ModuleKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, ready to run.

    Attributes:
        plan: Its parts.
        recipes: Recipe of every entry that the plan reads, and of their contexts.
        template: Label of the schema or corpus, for metrics.
        remarks: By label of a cached part: why it is not served better than it is.

    Raises:
        LayoutError: A cached part has no recipe, or a recipe's context has none; or the plan does
            not end in a fresh token, whose logits give the first new one.
    """

    plan: RequestPlan
    recipes: Mapping[ModuleKey, EntryRecipe] = field(default_factory=dict)
    template: str = ""
    remarks: Mapping[str, MissReason] = field(default_factory=dict)

    def __post_init__(self) -> None:
        last = self.plan.parts[-1] if self.plan.parts else None
        if not isinstance(last, Fresh) or not last.token_ids:
            raise LayoutError(
                "the plan does not end in a fresh token, whose logits give the first new one; "
                "make it so with pc_rag.layout.with_fresh_end(plan)"
            )
        for part in self.plan.cached:
            recipe = self.recipes.get(part.key)
            if recipe is None or any(key not in self.recipes for key in recipe.context):
                raise LayoutError(
                    f"{part.label!r}: there is no recipe for entry {part.key[:12]} or for an entry "
                    "that it attends; give the request the recipe of every entry it may encode"
                )
