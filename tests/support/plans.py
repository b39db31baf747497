"""Prompts planned over one token a character, and plans as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pc_rag.errors import PromptError
from pc_rag.layout import Cached, lay_out, plan_prompt
from pc_rag.pml import Prompt, Schema, parse_prompt, parse_schema
from pc_rag.types import ModuleKey, PositionPolicy, Visibility
from tests.support.char_encoder import CharEncoder, decode

if TYPE_CHECKING:
    from pc_rag.errors import Problem
    from pc_rag.layout import RequestPlan


def plan_of(
    schema: Schema | str,
    body: Prompt | str,
    *,
    policy: PositionPolicy = PositionPolicy.PACKED,
    visibility: Visibility = Visibility.PREFIX,
    max_position: int | None = None,
    encoder: CharEncoder | None = None,
    name: str = "s",
) -> RequestPlan:
    """The plan of a prompt; the key of run ``i`` is ``key i``.

    Args:
        schema: Nodes or PML.
        body: Nodes, or what stands in ``<prompt>``.
        policy: As for ``plan_prompt``.
        visibility: As for ``lay_out``.
        max_position: As for ``plan_prompt``.
        encoder: Without BOS by default.
        name: Of the schema, in the prompt.
    """
    encoder = encoder or CharEncoder(has_bos=False)
    schema = parse_schema(schema) if isinstance(schema, str) else schema
    if isinstance(body, str):
        body = parse_prompt(f'<prompt schema="{name}">{body}</prompt>', source="p.xml")
    return plan_prompt(
        lay_out(schema, encoder, visibility=visibility),
        body,
        encoder,
        policy=policy,
        entry_key=lambda index: ModuleKey(f"key {index}"),
        max_position=max_position,
    )


def shown(plan: RequestPlan) -> list[tuple[str, str, int]]:
    """Parts as (kind, text, first position)."""
    return [
        (
            str(part.hit_kind) if isinstance(part, Cached) else str(part.kind),
            decode(part.token_ids),
            part.span.start,
        )
        for part in plan.parts
    ]


def text_of(plan: RequestPlan) -> str:
    """What the model reads."""
    return decode(plan.token_ids)


def problems_of(schema: Schema | str, body: Prompt | str, **options: object) -> tuple[Problem, ...]:
    """The problems that a prompt is refused for."""
    with pytest.raises(PromptError) as caught:
        plan_of(schema, body, **options)  # type: ignore[arg-type]
    return caught.value.problems
