"""From a schema to spans: which tokens every module has, and which position IDs it reserves.

The rule is the paper's (arXiv 2311.04934, section 3.3): a module starts where all text before it
ends, the members of a union share their start, and the union reserves as much as its longest
member::

    <module A> 50 </module> <module B> 60 </module> <union> C 30 | D 45 </union>  text 5
    |0        50|          |50      110|                   |110-140
                                                           |110-----155|        |155   160|
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.errors import LayoutError, Problem, SchemaError
from pc_rag.layout.reserved import check_reserved
from pc_rag.layout.schema_layout import (
    ANONYMOUS_LABEL,
    Item,
    ModuleLayout,
    ParameterLayout,
    Run,
    RunItem,
    ScaffoldLayout,
    SchemaLayout,
    UnionLayout,
)
from pc_rag.pml.names import shorten
from pc_rag.pml.nodes import Module, Parameter, RoleBlock, Scaffold, Text, Union
from pc_rag.types import Role, Span, TokenIds, Visibility

if TYPE_CHECKING:
    from pc_rag.layout.tokenize import TextEncoder
    from pc_rag.pml.nodes import Schema, SchemaChild


def lay_out(
    schema: Schema,
    encoder: TextEncoder,
    *,
    visibility: Visibility,
    max_position: int | None = None,
) -> SchemaLayout:
    """Give every module of a schema its tokens and its span.

    Args:
        schema: A parsed schema.
        encoder: The tokenizer and chat template of the model.
        visibility: ``module``: a run attends the earlier runs of the same module. ``prefix``: also
            the always-included text before it, and the earlier runs of the modules around its own,
            which are present whenever it is. Under both, the member that a union names as its
            scaffold counts as always included for what stands behind the union.
        max_position: Position IDs that the model has; ``None`` where it sets no limit.

    Raises:
        LayoutError: ``visibility`` is ``scaffold``, which a schema as a whole cannot have; or it
            reserves more position IDs than the model has, or its parameters more tokens than any
            schema may have. What parameters reserve is checked before a token is made.
        SchemaError: Defaults or scaffold texts have more tokens than their parameters hold.
    """
    if visibility is Visibility.SCAFFOLD:
        raise LayoutError(
            f"schema {schema.name!r}: a schema is laid out with visibility 'module' or 'prefix', "
            "not 'scaffold'"
        )
    check_reserved(schema, max_position)
    builder = _LayoutBuilder(encoder, visibility)
    root = _Scope(path="", is_in_role=False, is_stored=True, inherited=())
    root.pending += encoder.beginning()
    builder.add_children(root, schema.children)
    builder.flush(root)
    if builder.problems:
        raise SchemaError(tuple(sorted(builder.problems)), schema.source)
    if max_position is not None and root.cursor > max_position:
        raise LayoutError(
            f"schema {schema.name!r} reserves {root.cursor:,} position IDs, the model has "
            f"{max_position:,}; shorten its modules, or make alternatives a union"
        )
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
        first_turn_indexes=frozenset(builder.first_turn_indexes),
    )


class _Scope:
    """The module (or the schema) whose children are being laid out.

    Attributes:
        cursor: The next free position ID.
        pending: Tokens of the run that is being gathered: adjacent text, parameters and turns are
            one run.
        parameters: Those that lie in it.
        has_turns: It opens or closes turns.
        opens_first_turn: It opens a turn that none stands before.
        own_runs: Indexes of its finished runs, and of those of scaffold members of its unions.
        inherited: Indexes of earlier runs of the scopes around it.
    """

    def __init__(
        self,
        *,
        path: str,
        is_in_role: bool,
        is_stored: bool,
        inherited: tuple[int, ...],
        cursor: int = 0,
    ) -> None:
        self.path = path
        self.is_in_role = is_in_role
        self.is_stored = is_stored
        self.inherited = inherited
        self.start = cursor
        self.cursor = cursor
        self.items: list[Item] = []
        self.pending: list[int] = []
        self.parameters: list[ParameterLayout] = []
        self.has_turns = False
        self.opens_first_turn = False
        self.own_runs: list[int] = []


class _LayoutBuilder:
    def __init__(self, encoder: TextEncoder, visibility: Visibility) -> None:
        self._encoder = encoder
        self._is_prefix = visibility is Visibility.PREFIX
        self.runs: list[Run] = []
        self.problems: list[Problem] = []
        self.uses_roles = False
        self.first_turn_indexes: list[int] = []

    def add_children(self, scope: _Scope, children: tuple[SchemaChild, ...]) -> None:
        for child in children:
            match child:
                case Text(text=text):
                    scope.pending += self._encoder.encode_text(text)
                case Parameter():
                    self._add_parameter(scope, child)
                case RoleBlock():
                    self._add_role_block(scope, child)
                case _:
                    self.flush(scope)
                    item = self._item(scope, child)
                    scope.items.append(item)
                    scope.cursor = item.span.end

    def flush(self, scope: _Scope) -> None:
        """Make a run of the tokens gathered so far."""
        if not scope.pending:
            return
        span = Span(scope.cursor, scope.cursor + len(scope.pending))
        index = len(self.runs)
        self.runs.append(
            Run(
                label=scope.path or ANONYMOUS_LABEL,
                token_ids=tuple(scope.pending),
                span=span,
                context=(*(scope.inherited if self._is_prefix else ()), *scope.own_runs),
                parameters=tuple(scope.parameters),
                is_stored=scope.is_stored,
                has_turns=scope.has_turns,
            )
        )
        if scope.opens_first_turn:
            self.first_turn_indexes.append(index)
        scope.items.append(RunItem(index, span))
        scope.own_runs.append(index)
        scope.cursor = span.end
        scope.pending.clear()
        scope.parameters.clear()
        scope.has_turns = scope.opens_first_turn = False

    def _add_parameter(self, scope: _Scope, parameter: Parameter) -> None:
        start, length = len(scope.pending), parameter.max_tokens
        standing = self._fitting(parameter, "scaffold", parameter.scaffold) or ()
        if len(standing) < length:
            standing += (self._encoder.placeholder_id(),) * (length - len(standing))
        scope.pending += standing
        scope.parameters.append(
            ParameterLayout(
                parameter=parameter,
                rows=Span(start, start + length),
                default_ids=self._fitting(parameter, "default", parameter.default),
            )
        )

    def _fitting(self, parameter: Parameter, what: str, text: str | None) -> TokenIds | None:
        """The tokens of a text of a parameter; too long ones are reported and cut."""
        if text is None:
            return None
        token_ids = self._encoder.encode_text(text)
        if len(token_ids) > parameter.max_tokens:
            message = (
                f"{what}={shorten(text)!r} of parameter {parameter.name!r} has {len(token_ids)} "
                f"tokens, the parameter holds {parameter.max_tokens}; shorten it, or raise the "
                "length"
            )
            place = parameter.location
            self.problems.append(Problem(place.line, place.column, message))
        return token_ids[: parameter.max_tokens]

    def _add_role_block(self, scope: _Scope, block: RoleBlock) -> None:
        is_first = not self.uses_roles
        scope.pending += self._encoder.role_open(block.role, is_first=is_first)
        scope.opens_first_turn = scope.opens_first_turn or is_first
        self.uses_roles = scope.has_turns = scope.is_in_role = True
        self.add_children(scope, block.children)
        scope.is_in_role = False
        scope.pending += self._encoder.role_close(block.role)
        scope.has_turns = True

    def _item(self, scope: _Scope, child: Module | Union | Scaffold) -> Item:
        match child:
            case Module():
                return self._module(scope, child)[0]
            case Union():
                return self._union(scope, child)
            case Scaffold():
                return self._scaffold(scope, child)

    def _module(self, outer: _Scope, module: Module) -> tuple[ModuleLayout, list[int]]:
        """A module, and the runs that what is read behind it could attend."""
        scope = _Scope(
            path=_path_of(outer, module.name),
            is_in_role=outer.is_in_role,
            is_stored=outer.is_stored and module.is_cached,
            inherited=(*outer.inherited, *outer.own_runs),
            cursor=outer.cursor,
        )
        self.add_children(scope, module.children)
        self.flush(scope)
        placed = ModuleLayout(
            name=module.name,
            path=scope.path,
            span=Span(scope.start, scope.cursor),
            items=tuple(scope.items),
            is_in_role=outer.is_in_role,
        )
        return placed, scope.own_runs

    def _union(self, scope: _Scope, union: Union) -> UnionLayout:
        members: list[ModuleLayout] = []
        seen: list[int] = []
        used_roles, uses_roles = self.uses_roles, False
        for member in union.members:
            self.uses_roles = used_roles  # no turn of another member stands before one of it
            placed, own_runs = self._module(scope, member)
            uses_roles = uses_roles or self.uses_roles
            members.append(placed)
            if member.name == union.scaffold:
                seen = own_runs
        self.uses_roles = uses_roles
        # What is not stored must not live on in KV that is.
        scope.own_runs += (i for i in seen if self.runs[i].is_stored or not scope.is_stored)
        return UnionLayout(
            span=Span(scope.cursor, max(member.span.end for member in members)),
            members=tuple(members),
        )

    def _scaffold(self, outer: _Scope, scaffold: Scaffold) -> ScaffoldLayout:
        first, start = len(self.runs), outer.cursor
        members: list[ModuleLayout] = []
        for member in scaffold.members:
            members.append(self._module(outer, member)[0])
            outer.cursor = members[-1].span.end
        span = Span(start, outer.cursor)
        path, runs = _path_of(outer, scaffold.name), self.runs[first:]
        joint_index = None
        if runs and all(run.is_stored for run in runs):
            joint_index = len(self.runs)
            self.runs.append(_joint_run(path, span, runs))
        return ScaffoldLayout(
            name=scaffold.name,
            path=path,
            span=span,
            members=tuple(members),
            joint_index=joint_index,
        )


def _path_of(outer: _Scope, name: str) -> str:
    return f"{outer.path}.{name}" if outer.path else name


def _joint_run(path: str, span: Span, runs: list[Run]) -> Run:
    """All tokens of a scaffold's members, attending what its first member attends.

    A member has one run, because it holds no modules, so the runs follow each other.
    """
    parameters = tuple(
        ParameterLayout(
            parameter=each.parameter,
            rows=Span(
                run.span.start - span.start + each.rows.start,
                run.span.start - span.start + each.rows.end,
            ),
            default_ids=each.default_ids,
        )
        for run in runs
        for each in run.parameters
    )
    return Run(
        label=path,
        token_ids=tuple(token_id for run in runs for token_id in run.token_ids),
        span=span,
        context=runs[0].context,
        parameters=parameters,
        has_turns=any(run.has_turns for run in runs),
    )
