"""From a schema to spans: which tokens every module has, and which position IDs it reserves.

The rule is the paper's (arXiv 2311.04934, section 3.3): a module starts where all text before it
ends, the members of a union share their start, and the union reserves as much as its longest
member::

    <module A> 50 </module> <module B> 60 </module> <union> C 30 | D 45 </union>  text 5
    |0        50|          |50      110|                   |110-140
                                                           |110-----155|        |155   160|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.errors import LayoutError
from pc_rag.pml.nodes import Module, RoleBlock, Text, Union
from pc_rag.types import Role, Span, TokenIds, Visibility

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pc_rag.layout.tokenize import TextEncoder
    from pc_rag.pml.nodes import Schema, SchemaChild

ANONYMOUS_LABEL = "(anonymous)"
"""Label of always-included text; no module can have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One contiguous piece of text, stored as one entry.

    Attributes:
        label: Path of its module, or ``ANONYMOUS_LABEL``.
        token_ids: Its tokens; as many as ``span`` holds, at least one.
        span: Position IDs it is encoded at.
        context: Indexes of the runs it attends besides itself, rising.
    """

    label: str
    token_ids: TokenIds
    span: Span
    context: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunItem:
    """The place of a run among the items of its module.

    Attributes:
        index: Of the run in ``SchemaLayout.runs``.
        span: Position IDs it reserves.
    """

    index: int
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """A module with its place.

    Attributes:
        name: Its name within the enclosing module.
        path: Names from the outermost module to this one, joined by dots.
        span: Position IDs it reserves, nested modules included.
        items: What it holds, in order.
        is_in_role: It lies in a role block.
    """

    name: str
    path: str
    span: Span
    items: tuple[Item, ...]
    is_in_role: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionLayout:
    """Alternatives with one start.

    Attributes:
        span: Position IDs it reserves: those of its longest member.
        members: The alternatives, in document order.
    """

    span: Span
    members: tuple[ModuleLayout, ...]


Item: TypeAlias = RunItem | ModuleLayout | UnionLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaLayout:
    """A schema as tokens and spans.

    Attributes:
        name: The schema's name.
        items: Its runs, modules and unions, in order.
        runs: Every run of the schema and of all modules, in document order.
        span: Position IDs that the schema reserves.
        visibility: What modules attend when they are encoded.
        uses_roles: It has role blocks, so a prompt ends by opening the assistant's turn.
        ends_in_user_turn: Its last child is a user turn; prompt text without an import joins it.
        num_closing_tokens: Tokens at the end of the last run that close that turn; 0 without one.
    """

    name: str
    items: tuple[Item, ...]
    runs: tuple[Run, ...]
    span: Span
    visibility: Visibility
    uses_roles: bool
    ends_in_user_turn: bool
    num_closing_tokens: int

    def context_of(self, index: int) -> tuple[TokenIds, tuple[int, ...]]:
        """Token ids and position IDs of everything a run attends besides itself."""
        context = [self.runs[i] for i in self.runs[index].context]
        token_ids = tuple(token_id for run in context for token_id in run.token_ids)
        position_ids = tuple(i for run in context for i in range(run.span.start, run.span.end))
        return token_ids, position_ids


def lay_out(schema: Schema, encoder: TextEncoder, *, visibility: Visibility) -> SchemaLayout:
    """Give every module of a schema its tokens and its span.

    Args:
        schema: A parsed schema.
        encoder: The tokenizer and chat template of the model.
        visibility: ``module``: a run attends the earlier runs of the same module. ``prefix``: also
            the always-included text before it, and the earlier runs of the modules around its own,
            which are present whenever it is.

    Raises:
        LayoutError: ``visibility`` is ``scaffold``, which a schema as a whole cannot have.
    """
    if visibility is Visibility.SCAFFOLD:
        raise LayoutError(
            f"schema {schema.name!r}: a schema is laid out with visibility 'module' or 'prefix', "
            "not 'scaffold'"
        )
    builder = _LayoutBuilder(encoder, visibility)
    root = _Scope(path="", is_in_role=False, inherited=())
    root.pending += encoder.beginning()
    builder.add_children(root, schema.children)
    builder.flush(root)
    last = schema.children[-1] if schema.children else None
    ends_in_user = isinstance(last, RoleBlock) and last.role is Role.USER
    return SchemaLayout(
        name=schema.name,
        items=tuple(root.items),
        runs=tuple(builder.runs),
        span=Span(0, root.cursor),
        visibility=visibility,
        uses_roles=builder.uses_roles,
        ends_in_user_turn=ends_in_user,
        num_closing_tokens=len(encoder.role_close(Role.USER)) if ends_in_user else 0,
    )


class _Scope:
    """The module (or the schema) whose children are being laid out.

    Attributes:
        cursor: The next free position ID.
        pending: Tokens of the run that is being gathered: adjacent text and turns are one run.
        own_runs: Indexes of its finished runs.
        inherited: Indexes of earlier runs of the scopes around it.
    """

    def __init__(
        self, *, path: str, is_in_role: bool, inherited: tuple[int, ...], cursor: int = 0
    ) -> None:
        self.path = path
        self.is_in_role = is_in_role
        self.inherited = inherited
        self.start = cursor
        self.cursor = cursor
        self.items: list[Item] = []
        self.pending: list[int] = []
        self.own_runs: list[int] = []


class _LayoutBuilder:
    def __init__(self, encoder: TextEncoder, visibility: Visibility) -> None:
        self._encoder = encoder
        self._visibility = visibility
        self.runs: list[Run] = []
        self.uses_roles = False

    def add_children(self, scope: _Scope, children: tuple[SchemaChild, ...]) -> None:
        for child in children:
            match child:
                case Text(text=text):
                    scope.pending += self._encoder.encode_text(text)
                case RoleBlock():
                    self._add_role_block(scope, child)
                case Module():
                    self.flush(scope)
                    module = self._module(scope, child)
                    scope.items.append(module)
                    scope.cursor = module.span.end
                case Union(members=members):
                    self.flush(scope)
                    placed = tuple(self._module(scope, member) for member in members)
                    span = Span(scope.cursor, max(member.span.end for member in placed))
                    scope.items.append(UnionLayout(span=span, members=placed))
                    scope.cursor = span.end

    def flush(self, scope: _Scope) -> None:
        """Make a run of the tokens gathered so far."""
        if not scope.pending:
            return
        span = Span(scope.cursor, scope.cursor + len(scope.pending))
        is_prefix = self._visibility is Visibility.PREFIX
        context = (*(scope.inherited if is_prefix else ()), *scope.own_runs)
        index = len(self.runs)
        self.runs.append(
            Run(
                label=scope.path or ANONYMOUS_LABEL,
                token_ids=tuple(scope.pending),
                span=span,
                context=context,
            )
        )
        scope.items.append(RunItem(index, span))
        scope.own_runs.append(index)
        scope.cursor = span.end
        scope.pending.clear()

    def _add_role_block(self, scope: _Scope, block: RoleBlock) -> None:
        scope.pending += self._encoder.role_open(block.role, is_first=not self.uses_roles)
        self.uses_roles = True
        scope.is_in_role = True
        self.add_children(scope, block.children)
        scope.is_in_role = False
        scope.pending += self._encoder.role_close(block.role)

    def _module(self, outer: _Scope, module: Module) -> ModuleLayout:
        scope = _Scope(
            path=f"{outer.path}.{module.name}" if outer.path else module.name,
            is_in_role=outer.is_in_role,
            inherited=(*outer.inherited, *outer.own_runs),
            cursor=outer.cursor,
        )
        self.add_children(scope, module.children)
        self.flush(scope)
        return ModuleLayout(
            name=module.name,
            path=scope.path,
            span=Span(scope.start, scope.cursor),
            items=tuple(scope.items),
            is_in_role=outer.is_in_role,
        )


def modules_in(items: tuple[Item, ...]) -> Iterator[tuple[int, ModuleLayout]]:
    """Every module that an import among these items can name, with the index of its item."""
    for index, item in enumerate(items):
        if isinstance(item, ModuleLayout):
            yield index, item
        elif isinstance(item, UnionLayout):
            for member in item.members:
                yield index, member
