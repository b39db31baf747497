"""Models whose positions are distances: entries stand anywhere as they are, without gaps."""

from __future__ import annotations

import pytest

from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import parse_prompt
from pc_rag.types import PositionPolicy, Visibility
from tests.support.engines import reference_ids, tiny_engine
from tests.support.schemas import config_of

SHORT = GenerationConfig(max_new_tokens=6)
BODY = '<note by="me"/><end/>What now?'
SCHEMA = """
<schema name="notes">Read this first.
  <module name="note">A note by <param name="by" len="40"/> of yesterday.</module>
  <module name="end">That was all of it.</module>
</schema>
"""


def asked(family, policy):
    engine = tiny_engine(family, config=config_of(policy, Visibility.PREFIX))
    engine.add_schema(SCHEMA)
    return engine, parse_prompt(f'<prompt schema="notes">{BODY}</prompt>')


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon-rw"])
@pytest.mark.parametrize("policy", list(PositionPolicy))
def test_e2_short_argument_leaves_no_gap_under_packed(family, policy):
    """Bias by logical distance under ``packed``, by position ID under ``reserved``."""
    engine, prompt = asked(family, policy)
    plan = engine.plan(prompt).plan
    is_packed = policy is PositionPolicy.PACKED
    assert (plan.position_ids == tuple(range(plan.num_tokens))) is is_packed
    answer = engine.generate(prompt, SHORT)
    assert answer.token_ids == reference_ids(engine, engine.plan(prompt), 6)
    assert [use.label for use in answer.metrics.modules] == ["(anonymous)", "note", "end"]
    uncached = engine.generate(prompt, SHORT, reuse=False)
    assert [use.label for use in uncached.metrics.modules] == ["(anonymous)", "note", "end"]


def test_gap_stays_when_positions_are_rotated():
    """The model sees the distance that its entries were encoded with."""
    engine, prompt = asked("llama", PositionPolicy.PACKED)
    plan = engine.plan(prompt).plan
    assert plan.end == plan.num_tokens + 38
