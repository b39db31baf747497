"""PML schemas that an engine knows, and the requests of their prompts."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from pc_rag.engine.request import EntryRecipe, Request
from pc_rag.engine.siblings import runs_of, with_siblings
from pc_rag.errors import Problem, PromptError, SchemaError
from pc_rag.kv.key import VisibilityContext
from pc_rag.layout import ANONYMOUS_LABEL, apply_repair, lay_out, parse_repair, plan_prompt
from pc_rag.pml import Program, Prompt, Schema, parse_schema, read_schema, write_schema
from pc_rag.pml.node_types import type_problems
from pc_rag.pml.nodes import NOWHERE, Parameter, Scaffold, Text, Union
from pc_rag.types import Placement

if TYPE_CHECKING:
    from collections.abc import Collection

    from pc_rag.engine.machinery import Machinery
    from pc_rag.kv.key import EntryAddress
    from pc_rag.layout.schema_layout import SchemaLayout
    from pc_rag.pml.nodes import SchemaChild
    from pc_rag.types import ModuleKey


_NO_MODULE = frozenset({"", ANONYMOUS_LABEL})
"""Labels of text that is in every prompt: there is nothing to repair in it."""


class _Known:
    """A schema with the recipes of its runs.

    Attributes:
        layout: Its layout.
        keys: Of the entry of every run, by index; of one that is not stored, what it would be.
        recipes: Of the runs that are stored, and of those of parameters only, which nothing but
            the encoding of others reads.
        entries: The recipes of what requests read.
    """

    def __init__(self, layout: SchemaLayout, recipes: list[EntryRecipe]) -> None:
        pairs = list(zip(layout.runs, recipes, strict=True))
        self.layout = layout
        self.keys = [recipe.address.key for recipe in recipes]
        self.recipes = {recipe.address.key: recipe for run, recipe in pairs if run.is_stored}
        self.entries = [recipe for run, recipe in pairs if run.is_entry]


class SchemaRegistry:
    """Schemas by name. Thread-safe.

    Args:
        machinery: Whose model encodes the modules.
    """

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery
        self._repair = parse_repair(machinery.config.repair)
        self._known: dict[str, _Known] = {}
        self._lock = Lock()

    def add(
        self, schema: Schema | Path | str, *, src_root: Path | str | None = None
    ) -> SchemaLayout:
        """See ``PromptCache.add_schema``."""
        schema = _checked(schema, src_root)
        machinery = self._machinery
        layout = lay_out(
            schema,
            machinery.text_encoder,
            visibility=machinery.config.visibility,
            max_position=machinery.max_position,
        )
        known = _Known(layout, with_siblings(layout, self._recipes(layout)))
        missing = machinery.source.missing(known.entries)
        for encoded in machinery.source.encode(missing, known.recipes):
            if encoded.refusal is not None:
                raise encoded.refusal
        with self._lock:
            self._known[layout.name] = known
        return layout

    def plan(self, prompt: Prompt) -> Request:
        """The request of a prompt.

        Raises:
            PromptError: No schema of that name was added, the prompt does not fit it, or it was
                built of values that no prompt holds.
            LayoutError: The prompt does not fit the model's context.
        """
        problems = type_problems(prompt, Prompt)
        if problems:
            raise PromptError(problems, prompt.source)
        known = self._find(prompt)
        plan = plan_prompt(
            known.layout,
            prompt,
            self._machinery.text_encoder,
            policy=self._machinery.config.position_policy,
            entry_key=lambda index: known.keys[index],
            max_position=self._machinery.max_position,
            closes_gaps=self._machinery.placement is Placement.FREE,
        )
        plan = apply_repair(plan, self._repair, lambda part: part.label not in _NO_MODULE)
        request = Request(plan=plan, recipes=known.recipes, template=known.layout.name)
        return self._machinery.placeable(request)

    def addresses(self, schema: str, paths: Collection[str] | None) -> list[EntryAddress]:
        """The entries of a schema's modules; see ``PromptCache.prefetch``."""
        if not isinstance(schema, str):
            raise PromptError(
                f"the name of a schema is a text; got {schema!r} of type {type(schema).__name__}"
            )
        known = self._find(Prompt(schema))
        return [known.recipes[known.keys[i]].address for i in runs_of(known.layout, paths)]

    def _find(self, prompt: Prompt) -> _Known:
        """The schema that a prompt names."""
        with self._lock:
            known = self._known.get(prompt.schema)
            names = sorted(self._known)
        if known is None:
            place = prompt.location
            message = (
                f"schema {prompt.schema!r} is not known; known: {', '.join(names) or 'none'}. "
                "Add it with add_schema first"
            )
            raise PromptError((Problem(place.line, place.column, message),), prompt.source)
        return known

    def _recipes(self, layout: SchemaLayout) -> list[EntryRecipe]:
        recipes: list[EntryRecipe] = []
        keys: list[ModuleKey] = []
        chained = layout.chained_runs()
        for index, run in enumerate(layout.runs):
            attended = tuple(keys[i] for i in run.context)
            if index in chained:
                token_ids, position_ids = layout.context_of(index)
                context = VisibilityContext.of(layout.visibility, token_ids, position_ids)
            else:
                context = VisibilityContext.of_entries(layout.visibility, attended)
            address = self._machinery.address(run.token_ids, start=run.span.start, context=context)
            recipes.append(EntryRecipe(address, attended))
            keys.append(address.key)
        return recipes


def _checked(schema: Schema | Path | str, src_root: Path | str | None) -> Schema:
    """A schema that keeps the rules of the markup."""
    if isinstance(schema, Path):
        return read_schema(schema, src_root=src_root)
    if isinstance(schema, str):
        return parse_schema(schema, src_root=src_root)
    if not isinstance(schema, Schema):
        hint = " (a program: pass its .schema)" if isinstance(schema, Program) else ""
        raise SchemaError(
            "a schema is a parsed Schema, the text of its document, or the Path of its file; got "
            f"a {type(schema).__name__}{hint}"
        )
    problems = type_problems(schema, Schema)
    if problems:
        raise SchemaError(problems, schema.source)
    if _is_built(schema):  # so nothing has checked its rules yet
        return parse_schema(write_schema(schema), source=schema.source)
    return schema


def _is_built(node: Schema | SchemaChild) -> bool:
    """Whether some of a schema was built in Python: a part that comes from no document."""
    match node:
        case Text() | Parameter():
            inner: tuple[SchemaChild, ...] = ()
        case Union() | Scaffold():
            inner = node.members
        case _:
            inner = node.children
    return node.location == NOWHERE or any(map(_is_built, inner))
