"""Which runs and texts a prompt is made of, in order: its imports looked up in the schema."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.errors import Problem
from pc_rag.layout.schema_layout import ModuleLayout, RunItem, modules_in
from pc_rag.pml.nodes import Import, Text
from pc_rag.types import CHAT_ROLES, Role, Span, TokenIds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.layout.schema_layout import Item, SchemaLayout
    from pc_rag.layout.tokenize import TextEncoder
    from pc_rag.pml.nodes import Location, Prompt, PromptChild

_NUM_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class RunStep:
    """A run of the schema, or a part of one.

    Attributes:
        index: Of the run.
        rows: Which of its tokens.
    """

    index: int
    rows: Span


@dataclass(frozen=True, slots=True)
class TextStep:
    """Tokens of this request only; at least one."""

    token_ids: TokenIds


Step: TypeAlias = RunStep | TextStep


@dataclass(frozen=True, slots=True)
class Resolved:
    """A prompt against its schema.

    Attributes:
        steps: Everything the model reads, in order.
        problems: Everything that does not fit; ``steps`` is only what fits then.
    """

    steps: tuple[Step, ...]
    problems: tuple[Problem, ...]


def resolve(layout: SchemaLayout, prompt: Prompt, encoder: TextEncoder) -> Resolved:
    """Look up the imports of a prompt.

    Every anonymous run is a step, and every run of an imported module. Text goes right behind the
    import before it, within the same enclosing import; text in front of the first import goes right
    before that module; text of a block without imports goes to the end of the block. Text that
    ends up outside of every turn of a schema with turns becomes a user turn.
    """
    resolver = _Resolver(layout, encoder)
    if prompt.schema != layout.name:
        resolver.report(
            prompt.location,
            f"the prompt is for schema {prompt.schema!r}, but was given schema {layout.name!r}",
        )
    resolver.root_block(prompt.children)
    return Resolved(tuple(resolver.steps), tuple(sorted(resolver.problems)))


class _Block:
    """The state of one enclosing import (or of the prompt) while its children are looked up.

    Attributes:
        cursor: Index of the first item whose runs have no steps yet.
        taken: The import that took an item, by index of the item.
        is_in_role: The place of the next text lies in a turn.
    """

    def __init__(self, items: tuple[Item, ...], path: str, *, is_in_role: bool) -> None:
        self.items = items
        self.path = path
        self.modules = {module.name: (index, module) for index, module in modules_in(items)}
        self.cursor = 0
        self.taken: dict[int, Import] = {}
        self.is_in_role = is_in_role


class _Resolver:
    def __init__(self, layout: SchemaLayout, encoder: TextEncoder) -> None:
        self._layout = layout
        self._encoder = encoder
        self.steps: list[Step] = []
        self.problems: list[Problem] = []

    def report(self, location: Location, message: str) -> None:
        self.problems.append(Problem(location.line, location.column, message))

    def root_block(self, children: tuple[PromptChild, ...]) -> None:
        block = _Block(self._layout.items, "", is_in_role=self._layout.ends_in_user_turn)
        waiting = self._add_children(block, children)
        self._add_runs(block, len(block.items))
        num_steps = len(self.steps)
        for text in waiting:
            self._add_text(text, is_in_role=block.is_in_role)
        if len(self.steps) > num_steps:
            self._move_closing_tokens(num_steps - 1)
        if self._layout.uses_roles:
            self._add_tokens(self._encoder.generation_prompt())

    def _move_closing_tokens(self, last_run: int) -> None:
        """Move what closes a last user turn from the last run to behind the text added to it."""
        num_closing = self._layout.num_closing_tokens
        step = self.steps[last_run] if num_closing else None
        if isinstance(step, RunStep):
            cut = step.rows.end - num_closing
            kept = (RunStep(step.index, Span(0, cut)),) if cut else ()
            self.steps[last_run : last_run + 1] = kept
            self.steps.append(RunStep(step.index, Span(cut, step.rows.end)))

    def _module_block(self, module: ModuleLayout, children: tuple[PromptChild, ...]) -> None:
        block = _Block(module.items, module.path, is_in_role=module.is_in_role)
        waiting = self._add_children(block, children)
        self._add_runs(block, len(block.items))
        for text in waiting:
            self._add_text(text, is_in_role=module.is_in_role)

    def _add_children(self, block: _Block, children: tuple[PromptChild, ...]) -> list[Text]:
        """Add steps up to the last import; return the text that no import came before or behind."""
        waiting: list[Text] = []
        for child in children:
            if isinstance(child, Text):
                if block.taken:
                    self._add_text(child, is_in_role=block.is_in_role)
                else:
                    waiting.append(child)
            elif isinstance(child, Import) and self._add_import(block, child, waiting):
                waiting = []
        return waiting

    def _add_import(self, block: _Block, node: Import, waiting: list[Text]) -> bool:
        """Add the steps of an import and of the text in front of it; whether it fits."""
        found = block.modules.get(node.name)
        if found is None:
            self.report(node.location, self._unknown(node, block))
            return False
        index, module = found
        conflict = _conflict(block, node, index)
        if conflict:
            self.report(node.location, conflict)
            num_steps = len(self.steps)
            self._module_block(module, node.children)
            del self.steps[num_steps:]
            return False
        self._add_runs(block, index)
        for text in waiting:
            self._add_text(text, is_in_role=module.is_in_role)
        block.taken[index] = node
        block.is_in_role = module.is_in_role
        self._module_block(module, node.children)
        return True

    def _add_runs(self, block: _Block, end: int) -> None:
        for item in block.items[block.cursor : end]:
            if isinstance(item, RunItem):
                self.steps.append(RunStep(item.index, Span(0, len(item.span))))
        block.cursor = end

    def _add_text(self, text: Text, *, is_in_role: bool) -> None:
        token_ids = self._encoder.encode_text(text.text)
        if token_ids and self._layout.uses_roles and not is_in_role:
            token_ids = (
                *self._encoder.role_open(Role.USER, is_first=False),
                *token_ids,
                *self._encoder.role_close(Role.USER),
            )
        self._add_tokens(token_ids)

    def _add_tokens(self, token_ids: TokenIds) -> None:
        if token_ids:
            self.steps.append(TextStep(token_ids))

    def _unknown(self, node: Import, block: _Block) -> str:
        where = f"module {block.path!r}" if block.path else f"schema {self._layout.name!r}"
        message = f"{where} has no module {node.name!r}"
        if node.name in CHAT_ROLES:
            return f"{message}; turns in prompts are not supported by this version of pc-rag"
        paths = [names for names in _paths(self._layout.items, ()) if names[-1] == node.name]
        if paths:
            opened = "".join(f"<{name}>" for name in paths[0][:-1])
            closed = "".join(f"</{name}>" for name in reversed(paths[0][:-1]))
            return f"{message}; write {opened}<{node.name}/>{closed} at the top of the prompt"
        close = get_close_matches(node.name, block.modules, n=1)
        if close:
            return f"{message}; did you mean <{close[0]}/>?"
        names = ", ".join(list(block.modules)[:_NUM_NAMES_SHOWN])
        more = ", ..." if len(block.modules) > _NUM_NAMES_SHOWN else ""
        return f"{message}; it has {names}{more}" if names else f"{message}; it has none"


def _conflict(block: _Block, node: Import, index: int) -> str:
    """Why an item cannot be imported now; empty where it can."""
    first = block.taken.get(index)
    if first is not None:
        place = f"line {first.location.line}, column {first.location.column}"
        if first.name == node.name:
            return f"module {node.name!r} is already imported at {place}; remove one"
        return (
            f"modules {first.name!r} and {node.name!r} are members of one union, of which a prompt "
            f"imports at most one; {first.name!r} is imported at {place}"
        )
    if index < block.cursor:
        behind = max(block.taken)
        return (
            f"module {node.name!r} is imported behind {block.taken[behind].name!r}, but the schema "
            "declares it before; import modules in the order of the schema"
        )
    return ""


def _paths(items: tuple[Item, ...], names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for _, module in modules_in(items):
        path = (*names, module.name)
        yield path
        yield from _paths(module.items, path)
