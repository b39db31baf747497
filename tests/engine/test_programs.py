"""Programs run through an engine like any schema."""

from __future__ import annotations

from typing import Annotated

from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import MaxTokens, program
from pc_rag.types import Role
from tests.support.engines import reference_ids, tiny_engine


@program(role=Role.USER)
def trip(city: Annotated[str, MaxTokens(12)], overseas: bool = False):
    yield f"A trip to {city}."
    if overseas:
        yield f" Passports for {city}."
    else:
        yield " No papers."
    yield " Be brief."


def test_program_generates_when_its_schema_is_added():
    """No special case: the stored text is read, and the answer is that of the reference."""
    engine = tiny_engine()
    engine.add_schema(trip.schema)
    for overseas in (True, False):
        prompt = trip.prompt("Rome", overseas=overseas).with_text(" Plan three days.")
        answer = engine.generate(prompt, GenerationConfig(max_new_tokens=4))
        assert answer.metrics.num_cached_tokens > 0
        assert all(use.is_hit for use in answer.metrics.modules)
        assert answer.token_ids == reference_ids(engine, engine.plan(prompt), 4)
