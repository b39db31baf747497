"""The prefixes that chunks are encoded behind, and the recipes of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.engine.request import EntryRecipe
from pc_rag.kv.key import VisibilityContext
from pc_rag.types import Placement, Visibility

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pc_rag.corpus.catalog.records import PrefixRecord
    from pc_rag.engine import PromptCache
    from pc_rag.types import ModuleKey, TokenIds


@dataclass(frozen=True, slots=True)
class CorpusPrefix:
    """What stands before the chunks of a prompt, and how its entries are made.

    Attributes:
        record: Its row in the catalog.
        recipe: Its own entry; ``None`` where it has no tokens.
        context: What chunks behind it attend.
        context_keys: The entries that hold it.
        start: Position ID that chunks behind it are encoded at.
    """

    record: PrefixRecord
    recipe: EntryRecipe | None
    context: VisibilityContext
    context_keys: tuple[ModuleKey, ...]
    start: int

    @property
    def token_ids(self) -> TokenIds:
        """Its tokens."""
        return self.record.token_ids

    @property
    def recorded_id(self) -> str | None:
        """What the catalog calls it beside chunks; ``None`` where chunks attend nothing of it."""
        return self.record.id if self.context_keys else None


def corpus_prefix(engine: PromptCache, record: PrefixRecord) -> CorpusPrefix:
    """The prefix of a catalog row under the engine's model and visibility."""
    token_ids = record.token_ids
    address = engine.address(token_ids, start=0, context=VisibilityContext.module())
    recipe = EntryRecipe(address) if token_ids else None
    if engine.config.visibility is Visibility.MODULE or recipe is None:
        # An entry that cannot move is encoded where the first chunk of a prompt stands.
        is_fixed = engine.runner.positions.placement is Placement.FIXED
        start = len(token_ids) if is_fixed else 0
        return CorpusPrefix(record, recipe, VisibilityContext.module(), (), start)
    context = VisibilityContext.of(Visibility.PREFIX, token_ids, range(len(token_ids)))
    return CorpusPrefix(record, recipe, context, (address.key,), len(token_ids))


def chunk_recipe(engine: PromptCache, token_ids: TokenIds, prefix: CorpusPrefix) -> EntryRecipe:
    """How the entry of a chunk behind a prefix is made."""
    address = engine.address(token_ids, start=prefix.start, context=prefix.context)
    return EntryRecipe(address, prefix.context_keys)


def recipe_table(
    recipes: Iterable[EntryRecipe], prefixes: Iterable[CorpusPrefix]
) -> Mapping[ModuleKey, EntryRecipe]:
    """Recipes by key, those of the prefixes included."""
    own = [prefix.recipe for prefix in prefixes if prefix.recipe is not None]
    return {recipe.address.key: recipe for recipe in (*own, *recipes)}


def longest_prefix_of(head: TokenIds, prefixes: Iterable[CorpusPrefix]) -> CorpusPrefix | None:
    """The prefix that a prompt's head starts with; the longest of several."""
    fitting = [p for p in prefixes if p.token_ids and head[: len(p.token_ids)] == p.token_ids]
    return max(fitting, key=lambda prefix: len(prefix.token_ids), default=None)
