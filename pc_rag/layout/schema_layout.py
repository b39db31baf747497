"""A schema as tokens and spans: what ``lay_out`` makes and plans are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.types import Span, TokenIds

if TYPE_CHECKING:
    from pc_rag.pml.nodes import Parameter
    from pc_rag.types import Visibility

ANONYMOUS_LABEL = "(anonymous)"
"""Label of always-included text; no module can have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """A parameter with its place.

    Attributes:
        parameter: As the schema declares it.
        rows: Rows of its run that stand in its place: no request reads them.
        default_ids: Tokens of its default; ``None`` where a prompt must give an argument.
    """

    parameter: Parameter
    rows: Span
    default_ids: TokenIds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One contiguous piece of text, stored as one entry.

    Attributes:
        label: Path of its module, or ``ANONYMOUS_LABEL``; of a joint run, that of its scaffold.
        token_ids: Its tokens; as many as ``span`` holds, at least one.
        span: Position IDs it is encoded at.
        context: Indexes of the runs it attends besides itself, rising.
        parameters: Those that lie in it, in order; their rows are disjoint.
        is_stored: Its KV is stored; otherwise it is computed in every request.
        has_turns: It opens or closes turns.
    """

    label: str
    token_ids: TokenIds
    span: Span
    context: tuple[int, ...]
    parameters: tuple[ParameterLayout, ...] = ()
    is_stored: bool = True
    has_turns: bool = False

    @property
    def text_rows(self) -> tuple[Span, ...]:
        """The rows in front of, between and behind its parameters; none of them empty."""
        ends = [parameter.rows.start for parameter in self.parameters] + [len(self.token_ids)]
        starts = [0] + [parameter.rows.end for parameter in self.parameters]
        return tuple(
            Span(start, end) for start, end in zip(starts, ends, strict=True) if start < end
        )

    @property
    def is_entry(self) -> bool:
        """Whether requests read an entry of it: it is stored, and not all of it is parameters."""
        return self.is_stored and bool(self.text_rows)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldLayout:
    """Modules that are stored together, besides each on its own.

    ::

        runs of the members   |member a   |member b |member c|
        joint run             |all tokens, from span.start on|

    Attributes:
        name: Its name within the enclosing module.
        path: Names from the outermost module to this one, joined by dots.
        span: Position IDs it reserves; those of its members follow each other in it.
        members: The modules, in document order.
        joint_index: Of the run that holds all tokens of the members; ``None`` where one of them is
            not stored, or none has a token.
    """

    name: str
    path: str
    span: Span
    members: tuple[ModuleLayout, ...]
    joint_index: int | None


Item: TypeAlias = RunItem | ModuleLayout | UnionLayout | ScaffoldLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaLayout:
    """A schema as tokens and spans.

    Attributes:
        name: The schema's name.
        items: Its runs, modules, unions and scaffolds, in order.
        runs: Every run of the schema and of all modules, in document order; a scaffold's joint run
            stands behind those of its members.
        span: Position IDs that the schema reserves.
        visibility: What modules attend when they are encoded.
        uses_roles: It has role blocks, so a prompt ends by opening the assistant's turn.
        ends_in_user_turn: Its last child is a user turn; prompt text without an import joins it.
        num_closing_tokens: Tokens at the end of the last run that close that turn; 0 without one.
        first_turn_indexes: Of the runs that open a first turn: the schema's, and the first one of
            each member of a union that no turn stands before.
    """

    name: str
    items: tuple[Item, ...]
    runs: tuple[Run, ...]
    span: Span
    visibility: Visibility
    uses_roles: bool
    ends_in_user_turn: bool
    num_closing_tokens: int
    first_turn_indexes: frozenset[int]

    def context_of(self, index: int) -> tuple[TokenIds, tuple[int, ...]]:
        """Token ids and position IDs of everything a run attends besides itself."""
        context = [self.runs[i] for i in self.runs[index].context]
        token_ids = tuple(token_id for run in context for token_id in run.token_ids)
        position_ids = tuple(i for run in context for i in range(run.span.start, run.span.end))
        return token_ids, position_ids

    def chained_runs(self) -> frozenset[int]:
        """Indexes of the runs in whose context everything attended just what lies before it.

        Under ``module`` the member that a union names as its scaffold did not attend the text in
        front of the union, which is attended beside it by what stands behind.
        """
        chained: set[int] = set()
        for index, run in enumerate(self.runs):
            *before, last = run.context or (None,)
            if last is None or (last in chained and self.runs[last].context == tuple(before)):
                chained.add(index)
        return frozenset(chained)


@dataclass(frozen=True, slots=True)
class Target:
    """What an import can name.

    Attributes:
        node: The module or scaffold.
        places: What it takes of the items around it: index of the item, and the number of the
            member where that is a scaffold's. Members of a union take the same place, because a
            prompt imports at most one.
    """

    node: ModuleLayout | ScaffoldLayout
    places: tuple[tuple[int, int], ...]


def targets_in(items: tuple[Item, ...]) -> dict[str, Target]:
    """What imports among these items can name, in document order."""
    targets: dict[str, Target] = {}
    for index, item in enumerate(items):
        match item:
            case ModuleLayout():
                targets[item.name] = Target(item, ((index, 0),))
            case UnionLayout(members=members):
                targets |= {member.name: Target(member, ((index, 0),)) for member in members}
            case ScaffoldLayout(members=members):
                places = tuple((index, number) for number in range(len(members)))
                targets[item.name] = Target(item, places)
                for member, place in zip(members, places, strict=True):
                    targets[member.name] = Target(member, (place,))
            case RunItem():
                pass
    return targets
