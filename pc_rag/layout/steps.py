"""What a prompt is made of, in order, once its imports have been looked up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.types import Role, Span, TokenIds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pc_rag.layout.schema_layout import SchemaLayout
    from pc_rag.layout.tokenize import TextEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Rows of a run of the schema; at least one, none of a parameter.

    Attributes:
        index: Of the run.
        rows: Which of its tokens.
        label: Path of the module that they belong to, or ``ANONYMOUS_LABEL``.
    """

    index: int
    rows: Span
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentStep:
    """An argument in the place of a parameter.

    Attributes:
        index: Of the run that the parameter lies in.
        rows: Rows of the run that are reserved for it.
        label: Path of the module that declares it, or ``ANONYMOUS_LABEL``.
        token_ids: The argument; at most as many tokens as there are rows, and perhaps none.
    """

    index: int
    rows: Span
    label: str
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class TextStep:
    """Tokens of this request only.

    Attributes:
        token_ids: The tokens; at least one once the steps are finished.
        opens: The turn that they open: what does so comes before them.
    """

    token_ids: TokenIds
    opens: Role | None = None


Step: TypeAlias = RunStep | ArgumentStep | TextStep


def finish_steps(
    steps: Iterable[Step],
    layout: SchemaLayout,
    encoder: TextEncoder,
    *,
    joints: Mapping[int, tuple[int, int]],
) -> tuple[Step, ...]:
    """Settle what only the whole prompt can tell.

    Args:
        steps: The steps in order.
        layout: Of the schema.
        encoder: The one that the layout was made with.
        joints: By index of a scaffold member's run: the joint run that is read instead of it,
            because every member is imported, and the row at which the member begins in it.

    Returns:
        Steps without turns to open: the first one of the prompt is opened as such, if the schema's
        own first turn is not in the prompt.
    """
    steps = tuple(steps)
    has_turn = any(
        not isinstance(step, TextStep) and step.index in layout.first_turn_indexes for step in steps
    )
    finished: list[Step] = []
    for step in steps:
        if isinstance(step, TextStep):
            token_ids = step.token_ids
            if step.opens is not None:
                token_ids = encoder.role_open(step.opens, is_first=not has_turn) + token_ids
                has_turn = True
            if token_ids:
                finished.append(TextStep(token_ids))
            continue
        has_turn = has_turn or layout.runs[step.index].has_turns
        if step.index in joints:
            index, offset = joints[step.index]
            rows = Span(step.rows.start + offset, step.rows.end + offset)
            step = replace(step, index=index, rows=rows)  # noqa: PLW2901 - the same step, elsewhere
        finished.append(step)
    return tuple(finished)
