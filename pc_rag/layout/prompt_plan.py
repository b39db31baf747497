"""From a PML prompt and the layout of its schema to the plan of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.errors import LayoutError, Problem, PromptError
from pc_rag.layout.plan import Cached, Fresh, FreshKind, Occurrence, RequestPlan
from pc_rag.layout.repair import with_fresh_end
from pc_rag.layout.resolve import resolve
from pc_rag.layout.schema_layout import ANONYMOUS_LABEL
from pc_rag.layout.steps import ArgumentStep, TextStep
from pc_rag.types import HitKind, PositionPolicy, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pc_rag.layout.plan import Part
    from pc_rag.layout.schema_layout import Run, SchemaLayout
    from pc_rag.layout.steps import RunStep, Step
    from pc_rag.layout.tokenize import TextEncoder
    from pc_rag.pml.nodes import Prompt
    from pc_rag.types import ModuleKey, TokenIds


def plan_prompt(
    layout: SchemaLayout,
    prompt: Prompt,
    encoder: TextEncoder,
    *,
    policy: PositionPolicy,
    entry_key: Callable[[int], ModuleKey],
    max_position: int | None,
    closes_gaps: bool = False,
) -> RequestPlan:
    """Decide which tokens of a prompt are cached and which fresh, and where each lies.

    Runs are cached; text of the prompt is fresh, and so are modules that are not stored. Always-
    included runs behind the first text of the prompt are fresh too, as they must see it, and so is
    what opens the assistant's turn. The last token is always fresh.

    An argument is fresh at the position IDs that its parameter reserves; behind a shorter one they
    stay empty under both policies, so that what follows lies as it was encoded::

        run        |text    |placeholders|text   |
        request    |rows    |argument|   |rows   |

    Under ``packed`` spans follow each other. Under ``reserved`` every run keeps its reserved start
    and gaps stay; text that does not fit into the gap behind it pushes the following runs back, as
    far as it is too long and until a gap takes it up::

        reserved   |run A |      gap      |run B  |
        packed     |run A |text|run B  |
        reserved   |run A |text|   gap    |run B  |
        reserved   |run A |text too long for the gap|run B  |

    Where positions are distances only, ``closes_gaps`` lets ``packed`` close the gaps behind short
    arguments too.

    Args:
        layout: Of the schema that the prompt names.
        prompt: A parsed prompt.
        encoder: The one that the layout was made with.
        policy: How spans are given out.
        entry_key: The key of a run's entry, by index of the run.
        max_position: Position IDs that the model has; ``None`` where it sets no limit.
        closes_gaps: Whether no gap stays under ``packed``; see ``RequestPlan.without_gaps``.

    Raises:
        PromptError: The prompt does not fit the schema; lists every problem.
        LayoutError: The prompt needs more position IDs than the model has.
    """
    resolved = resolve(layout, prompt, encoder)
    placer = _Placer(layout.runs, policy, entry_key)
    for step in resolved.steps:
        placer.place(step)
    plan = RequestPlan(tuple(placer.parts))
    if closes_gaps and policy is PositionPolicy.PACKED:
        plan = plan.without_gaps()
    _check(plan, prompt, resolved.problems, max_position)
    return with_fresh_end(plan)


def _check(
    plan: RequestPlan, prompt: Prompt, problems: Sequence[Problem], max_position: int | None
) -> None:
    """Refuse a prompt with problems, one that is too long, and one that says nothing."""
    overflow = _overflow(plan, max_position)
    place = prompt.location
    if problems:
        too_long = (Problem(place.line, place.column, overflow),) if overflow else ()
        raise PromptError(tuple(sorted((*problems, *too_long))), prompt.source)
    if overflow:
        raise LayoutError(f"{prompt.source}: {overflow}")
    if not plan.num_tokens:
        message = "the prompt has no token; give it text, or import a module that has some"
        raise PromptError((Problem(place.line, place.column, message),), prompt.source)


def _overflow(plan: RequestPlan, max_position: int | None) -> str:
    if max_position is None or plan.end <= max_position:
        return ""
    return (
        f"context overflow: the prompt has {plan.num_tokens} tokens and needs position IDs up to "
        f"{plan.end}, the model has {max_position}; import less, or shorten the text by "
        f"{plan.end - max_position} tokens"
    )


class _Placer:
    """Gives spans to steps, one after the other.

    Attributes:
        parts: What has been placed.
    """

    def __init__(
        self,
        runs: tuple[Run, ...],
        policy: PositionPolicy,
        entry_key: Callable[[int], ModuleKey],
    ) -> None:
        self._runs = runs
        self._policy = policy
        self._entry_key = entry_key
        self._cursor = 0
        self._has_text = False
        self._exact: list[int] | None = []  # runs so far, while all of them are exact
        self.parts: list[Part] = []

    def place(self, step: Step) -> None:
        if isinstance(step, TextStep):
            self._add_fresh(step.token_ids, self._cursor)
            self._has_text = True
            self._exact = None
        elif isinstance(step, ArgumentStep):
            self._place_argument(step)
        else:
            self._place_run(step)

    def _start_of(self, step: RunStep | ArgumentStep) -> int:
        """Where the rows of a step go: one behind the other, or not before where they belong."""
        if self._policy is PositionPolicy.RESERVED:
            return max(self._cursor, self._runs[step.index].span.start + step.rows.start)
        return self._cursor

    def _place_argument(self, step: ArgumentStep) -> None:
        start = self._start_of(step)
        if step.token_ids:
            occurrence = None
            if self._runs[step.index].is_entry:
                occurrence = Occurrence(self._entry_key(step.index), start - step.rows.start)
            self._add_fresh(
                step.token_ids,
                start,
                label=step.label,
                kind=FreshKind.ARGUMENT,
                occurrence=occurrence,
            )
        # The rest of the reserved positions stays empty: what follows lies as it was encoded.
        self._cursor = start + len(step.rows)
        self._exact = None

    def _place_run(self, step: RunStep) -> None:
        run = self._runs[step.index]
        token_ids = run.token_ids[step.rows.start : step.rows.end]
        start = self._start_of(step)
        if not run.is_stored or (self._has_text and run.label == ANONYMOUS_LABEL):
            occurrence = None
            if run.is_stored:  # where it stands is where entries that attend it find it
                occurrence = Occurrence(self._entry_key(step.index), start - step.rows.start)
            self._add_fresh(token_ids, start, label=step.label, occurrence=occurrence)
            self._exact = None
            return
        part = Cached(
            label=step.label,
            key=self._entry_key(step.index),
            token_ids=token_ids,
            span=Span(start, start + len(token_ids)),
            rows=step.rows,
            encoded_start=run.span.start,
            hit_kind=self._hit_kind(step.index, start - step.rows.start),
        )
        self.parts.append(part)
        self._cursor = part.span.end

    def _hit_kind(self, index: int, start: int) -> HitKind:
        """Exact where all before is exact, is just what the run attended, and nothing moved.

        Rows of the run that is the last of what is before go on with it: members of a scaffold.
        """
        run = self._runs[index]
        if self._exact is not None and start == run.span.start:
            if self._exact[-1:] == [index]:
                return HitKind.EXACT
            if tuple(self._exact) == run.context:
                self._exact.append(index)
                return HitKind.EXACT
        self._exact = None
        return HitKind.COMPOSED

    def _add_fresh(
        self,
        token_ids: TokenIds,
        start: int,
        *,
        label: str = "",
        kind: FreshKind = FreshKind.TEXT,
        occurrence: Occurrence | None = None,
    ) -> None:
        span = Span(start, start + len(token_ids))
        self.parts.append(
            Fresh(token_ids=token_ids, span=span, kind=kind, label=label, occurrence=occurrence)
        )
        self._cursor = span.end
