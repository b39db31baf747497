"""Which runs and texts a prompt is made of, in order: its imports looked up in the schema."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.errors import Problem
from pc_rag.layout.arguments import check_arguments
from pc_rag.layout.import_block import Block, conflict, paths_by_name, unknown
from pc_rag.layout.import_paths import nest_paths
from pc_rag.layout.schema_layout import ANONYMOUS_LABEL, ModuleLayout, RunItem, ScaffoldLayout
from pc_rag.layout.steps import ArgumentStep, RunStep, Step, TextStep, finish_steps
from pc_rag.pml.nodes import Import, Text, Turn
from pc_rag.types import Role, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pc_rag.layout.schema_layout import Item, Run, SchemaLayout
    from pc_rag.layout.tokenize import TextEncoder
    from pc_rag.pml.nodes import Location, Prompt, PromptChild
    from pc_rag.types import TokenIds


@dataclass(frozen=True, slots=True)
class Resolved:
    """A prompt against its schema.

    Attributes:
        steps: Everything the model reads, in order.
        problems: Everything that does not fit; ``steps`` is only what fits then.
    """

    steps: tuple[Step, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Opening:
    """The beginning of a turn that waits for its first import, to stand right before it."""

    turn: Turn


_NUM_PROBLEMS_WITH_CLOSE_NAMES = 20
"""Problems up to which an unknown import is told what it may have meant."""

_Waiting: TypeAlias = Text | Turn | _Opening


def resolve(layout: SchemaLayout, prompt: Prompt, encoder: TextEncoder) -> Resolved:
    """Look up the imports of a prompt.

    Every anonymous run is a step, and every run of an imported module. Text goes right behind the
    import before it, within the same enclosing import; text in front of the first import goes right
    before that module; text of a block without imports goes to the end of the block. Turns go where
    their text and imports go. Text that ends up outside of every turn becomes a user turn, where
    the schema or the prompt has turns.
    """
    resolver = _Resolver(
        layout, encoder, uses_turns=layout.uses_roles or _has_turns(prompt.children)
    )
    if prompt.schema != layout.name:
        resolver.report(
            prompt.location,
            f"the prompt is for schema {prompt.schema!r}, but was given schema {layout.name!r}",
        )
    resolver.root_block(prompt)
    steps = finish_steps(resolver.steps, layout, encoder, joints=resolver.joints)
    return Resolved(steps, tuple(sorted(resolver.problems)))


class _Resolver:
    """Gathers the steps of one prompt.

    Attributes:
        steps: So far; turns are still to be opened.
        joints: As ``finish_steps`` takes them.
        problems: So far.
    """

    def __init__(self, layout: SchemaLayout, encoder: TextEncoder, *, uses_turns: bool) -> None:
        self._layout = layout
        self._encoder = encoder
        self._uses_turns = uses_turns
        self._turn: Turn | None = None  # of the prompt, that was opened and not closed yet
        self._blamed: Text | Turn | None = None  # the last turn that was reported
        self._paths: dict[str, tuple[str, ...]] | None = None  # once an import is unknown
        self.steps: list[Step] = []
        self.joints: dict[int, tuple[int, int]] = {}
        self.problems: list[Problem] = []

    def report(self, location: Location, message: str) -> None:
        self.problems.append(Problem(location.line, location.column, message))

    def _blame(self, turn: Text | Turn, message: str) -> None:
        """Report a turn that lies wrongly, once."""
        if turn is not self._blamed:
            self.report(turn.location, message)
        self._blamed = turn

    def root_block(self, prompt: Prompt) -> None:
        holder, place = f"schema {self._layout.name!r}", prompt.location
        block = Block(
            self._layout.items,
            holder,
            location=place,
            is_in_role=self._layout.ends_in_user_turn,
            starts_in_role=False,
            arguments=self._arguments(self._layout.items, prompt.arguments, holder, place),
        )
        waiting = self._add_children(block, prompt.children)
        self._finish_items(block)
        joining = list(takewhile(lambda each: isinstance(each, Text), waiting))
        num_steps = len(self.steps)
        self._add_waiting(joining, is_in_role=self._layout.ends_in_user_turn)
        if len(self.steps) > num_steps:
            self._move_closing_tokens(num_steps - 1)
        self._add_waiting([*waiting[len(joining) :], *block.trailing], is_in_role=False)
        if self._uses_turns:
            self._add_tokens(self._encoder.generation_prompt())

    def _move_closing_tokens(self, last_run: int) -> None:
        """Move what closes a last user turn from the last run to behind the text added to it."""
        num_closing = self._layout.num_closing_tokens
        step = self.steps[last_run] if num_closing else None
        if isinstance(step, RunStep):
            index, rows, label = step.index, step.rows, step.label
            cut = rows.end - num_closing
            kept = RunStep(index=index, rows=Span(rows.start, cut), label=label)
            self.steps[last_run : last_run + 1] = [kept] if rows.start < cut else []
            self.steps.append(RunStep(index=index, rows=Span(cut, rows.end), label=label))

    def _module_block(
        self,
        module: ModuleLayout,
        children: tuple[PromptChild, ...],
        arguments: Mapping[str, str],
        location: Location,
    ) -> None:
        holder = f"module {module.path!r}"
        block = Block(
            module.items,
            holder,
            location=location,
            is_in_role=module.is_in_role,
            starts_in_role=module.is_in_role,
            arguments=self._arguments(module.items, arguments, holder, location),
        )
        self._whole_block(block, children)

    def _scaffold_block(self, scaffold: ScaffoldLayout, node: Import) -> None:
        is_in_role = scaffold.members[0].is_in_role
        holder = f"scaffold {scaffold.path!r}"
        block = Block(
            scaffold.members,
            holder,
            location=node.location,
            is_in_role=is_in_role,
            starts_in_role=is_in_role,
            arguments=self._arguments((), node.arguments, holder, node.location),
            imports_all=True,
        )
        self._whole_block(block, node.children)

    def _whole_block(self, block: Block, children: tuple[PromptChild, ...]) -> None:
        waiting = self._add_children(block, children)
        self._finish_items(block)
        self._add_waiting([*waiting, *block.trailing], is_in_role=block.starts_in_role)

    def _add_children(self, block: Block, children: tuple[PromptChild, ...]) -> list[_Waiting]:
        """Add steps up to the last import; return what no import came before or behind."""
        waiting: list[_Waiting] = []
        for child in nest_paths(children, block.targets):
            match child:
                case Import():
                    self._check_trailing(block)
                    self._add_import(block, child, waiting)
                case Turn() if _has_imports(child):
                    self._check_trailing(block)
                    self._add_turn(block, child, waiting)
                case _ if not block.taken:
                    waiting.append(child)
                case _ if block.trailing or (
                    isinstance(child, Turn) and block.is_in_role and not block.starts_in_role
                ):
                    block.trailing.append(child)
                case _:
                    self._add_waiting([child], is_in_role=block.is_in_role)
        return waiting

    def _check_trailing(self, block: Block) -> None:
        if block.trailing:
            turn = block.trailing[0]
            self._blame(turn, _in_turn("this turn", "move it behind the last import"))
            block.trailing.clear()

    def _add_turn(self, block: Block, turn: Turn, waiting: list[_Waiting]) -> None:
        """Add a turn that holds imports: it begins where its first text or import goes."""
        if self._turn is not None:
            self._blame(turn, _in_turn("this turn", "close the one around it first"))
        around = self._turn
        opening = _Opening(turn)
        waiting.append(opening)
        for child in nest_paths(turn.children, block.targets):
            match child:
                case Import():
                    self._add_import(block, child, waiting)
                case Turn():
                    self._blame(child, _in_turn("this turn", "close the one around it"))
                case Text() if block.taken:
                    if opening in waiting and block.is_in_role:
                        self._blame(turn, _in_turn("this turn", "move its text out of it"))
                    self._add_waiting([*waiting, child], is_in_role=True)
                    waiting.clear()
                case Text():
                    waiting.append(child)
        self._turn = around
        if opening in waiting:  # none of its imports fits
            waiting.remove(opening)
        else:
            self._add_tokens(self._encoder.role_close(turn.role))

    def _add_import(self, block: Block, node: Import, waiting: list[_Waiting]) -> None:
        """Add the steps of an import, and of what waits to stand in front of it."""
        target = block.targets.get(node.name)
        if target is None:
            self._report_unknown(block, node)
            return
        problem = conflict(block, node, target)
        if problem:
            self.report(node.location, problem)
            num_steps = len(self.steps)
            self._add_inside(target.node, node)
            del self.steps[num_steps:]
            return
        is_in_role = (
            target.node if isinstance(target.node, ModuleLayout) else target.node.members[0]
        ).is_in_role
        self._add_items(block, target.places[0][0])
        self._add_waiting(waiting, is_in_role=is_in_role)
        waiting.clear()
        if self._turn is not None and is_in_role:
            what = f"module {node.name!r}"
            self.report(node.location, _in_turn(what, "import it outside of the prompt's turns"))
        block.taken |= dict.fromkeys(target.places, node)
        block.is_in_role = is_in_role
        self._add_inside(target.node, node)

    def _report_unknown(self, block: Block, node: Import) -> None:
        if self._paths is None:
            self._paths = paths_by_name(self._layout)
        is_early = len(self.problems) < _NUM_PROBLEMS_WITH_CLOSE_NAMES
        self.report(node.location, unknown(block, node, self._paths, looks_for_close=is_early))

    def _add_inside(self, target: ModuleLayout | ScaffoldLayout, node: Import) -> None:
        if isinstance(target, ModuleLayout):
            self._module_block(target, node.children, node.arguments, node.location)
        else:
            self._scaffold_block(target, node)

    def _finish_items(self, block: Block) -> None:
        self._add_items(block, len(block.items))
        for scaffold in block.whole_scaffolds():
            if scaffold.joint_index is None:
                continue
            for member in scaffold.members:
                for item in member.items:
                    if isinstance(item, RunItem):
                        row = item.span.start - scaffold.span.start
                        self.joints[item.index] = (scaffold.joint_index, row)

    def _add_items(self, block: Block, end: int) -> None:
        """Add what is included without an import, up to an item."""
        for index in range(block.cursor, end):
            item = block.items[index]
            if isinstance(item, RunItem):
                self._add_run(block, item.index)
            elif isinstance(item, ModuleLayout) and block.imports_all and not block.has(index):
                self._module_block(item, (), {}, block.location)
        block.cursor = end

    def _add_run(self, block: Block, index: int) -> None:
        run = self._layout.runs[index]
        if self._turn is not None and run.has_turns:
            is_anonymous = run.label == ANONYMOUS_LABEL
            what = "text of the schema inside this turn" if is_anonymous else block.holder
            self._blame(
                self._turn,
                f"{what} has turns of its own, and no turn lies inside another; close this turn "
                "before it",
            )
        pieces: list[Step] = [
            RunStep(index=index, rows=rows, label=run.label) for rows in run.text_rows
        ]
        pieces += _argument_steps(run, index, block.arguments)
        self.steps += sorted(pieces, key=lambda step: step.rows.start)  # type: ignore[union-attr]

    def _add_waiting(self, waiting: list[_Waiting], *, is_in_role: bool) -> None:
        for each in waiting:
            is_inside = is_in_role or self._turn is not None
            match each:
                case Text(text=text):
                    self._add_text(text, is_in_role=is_inside)
                case _Opening(turn=turn):
                    self.steps.append(TextStep((), opens=turn.role))
                    self._turn = turn
                case Turn():
                    self._add_text_turn(each, is_in_role=is_inside)

    def _add_text_turn(self, turn: Turn, *, is_in_role: bool) -> None:
        if is_in_role:
            self._blame(turn, _in_turn("this turn", "move it behind the last import"))
        texts = [child.text for child in turn.children if isinstance(child, Text)]
        token_ids = tuple(i for text in texts for i in self._encoder.encode_text(text))
        self._add_whole_turn(turn.role, token_ids)

    def _add_text(self, text: str, *, is_in_role: bool) -> None:
        token_ids = self._encoder.encode_text(text)
        if token_ids and self._uses_turns and not is_in_role:
            self._add_whole_turn(Role.USER, token_ids)
        else:
            self._add_tokens(token_ids)

    def _add_whole_turn(self, role: Role, token_ids: TokenIds) -> None:
        self.steps.append(TextStep(token_ids + self._encoder.role_close(role), opens=role))

    def _add_tokens(self, token_ids: TokenIds) -> None:
        if token_ids:
            self.steps.append(TextStep(token_ids))

    def _arguments(
        self,
        items: tuple[Item, ...],
        arguments: Mapping[str, str],
        holder: str,
        location: Location,
    ) -> dict[str, TokenIds]:
        runs = [self._layout.runs[item.index] for item in items if isinstance(item, RunItem)]
        parameters = [parameter for run in runs for parameter in run.parameters]
        found, problems = check_arguments(parameters, arguments, self._encoder, holder=holder)
        for problem in problems:
            self.report(location, problem)
        return found


def _argument_steps(
    run: Run, index: int, arguments: Mapping[str, TokenIds]
) -> Iterable[ArgumentStep]:
    for each in run.parameters:
        token_ids = arguments[each.parameter.name]
        yield ArgumentStep(index=index, rows=each.rows, label=run.label, token_ids=token_ids)


def _in_turn(what: str, advice: str) -> str:
    return f"{what} lies in a turn already, and no turn lies inside another; {advice}"


def _has_imports(turn: Turn) -> bool:
    return any(isinstance(child, Import | Turn) for child in turn.children)


def _has_turns(children: tuple[PromptChild, ...]) -> bool:
    return any(
        isinstance(child, Turn) or (isinstance(child, Import) and _has_turns(child.children))
        for child in children
    )
