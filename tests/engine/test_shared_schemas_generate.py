"""The schemas that the authors of Prompt Cache published, from their files to generated text."""

from __future__ import annotations

import pytest

from pc_rag.config import EngineConfig
from pc_rag.engine import PromptCache
from pc_rag.layout.plan import FreshKind
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import parse_prompt
from pc_rag.types import HitKind, PositionPolicy
from tests.support.engines import tiny_engine
from tests.support.shared_schemas import BOOKSTORE, PARAMETERIZED, PERSONA

SHORT = GenerationConfig(max_new_tokens=8)
RESERVED = EngineConfig(prefix_cache_bytes=0, position_policy=PositionPolicy.RESERVED)

NAMES = {
    BOOKSTORE: "code-generation-bookstore",
    PERSONA: "persona",
    PARAMETERIZED: "travel",
}
TRAITS = """
<age><senior/></age><residence><seaside/></residence><education><doctorate/></education>
<occupation><arts/></occupation><martial-status><widowed/></martial-status>
<personality><creative/></personality>Who is it?"""
EXACT, COMPOSED = HitKind.EXACT, HitKind.COMPOSED


@pytest.fixture
def engine():
    """One that has room for a schema of one token a byte."""
    with tiny_engine(config=RESERVED, max_position_embeddings=8192) as engine:
        yield engine


def hits(completion):
    return [(use.label, use.hit_kind) for use in completion.metrics.modules if use.is_hit]


@pytest.mark.parametrize("name", NAMES)
def test_answer_equals_the_uncached_arm_when_nothing_is_imported(engine, shared_schema, name):
    """Always-included text lies where it was encoded, behind just what it attended."""
    engine.add_schema(shared_schema(name))
    prompt = parse_prompt(f'<prompt schema="{NAMES[name]}"/>')
    cached = engine.generate(prompt, SHORT)
    assert {kind for _, kind in hits(cached)} == {EXACT}
    assert cached.metrics.num_fresh_tokens < 40
    assert cached.token_ids == engine.generate(prompt, SHORT, reuse=False).token_ids


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        (
            BOOKSTORE,
            "<book.py/><store.py/>Write a test.",
            [("(anonymous)", EXACT), ("book.py", EXACT), ("store.py", COMPOSED)],
        ),
        (
            PERSONA,
            TRAITS,
            [
                ("(anonymous)", EXACT),
                ("age.senior", EXACT),
                ("residence.seaside", COMPOSED),
                ("education.doctorate", COMPOSED),
                ("occupation.arts", COMPOSED),
                ("martial-status.widowed", COMPOSED),
                ("personality.creative", COMPOSED),
            ],
        ),
        (
            PARAMETERIZED,
            '<travel-plan duration="2 d"><domestic city="Lisbon"/></travel-plan>Where to?',
            [("(anonymous)", EXACT), ("travel-plan", COMPOSED), ("travel-plan.domestic", COMPOSED)],
        ),
        (
            PARAMETERIZED,
            '<travel-plan duration="2 d"><overseas><rome/></overseas></travel-plan>Where to?',
            [
                ("(anonymous)", EXACT),
                ("travel-plan", COMPOSED),
                ("travel-plan.overseas", COMPOSED),
                ("travel-plan.overseas.rome", COMPOSED),
            ],
        ),
    ],
    ids=["bookstore", "persona", "domestic", "overseas"],
)
def test_modules_hit_when_they_are_imported(engine, shared_schema, name, body, expected):
    """All of them, and the same request gives the same tokens."""
    engine.add_schema(shared_schema(name))
    prompt = parse_prompt(f'<prompt schema="{NAMES[name]}">{body}</prompt>')
    first, again = (engine.generate(prompt, SHORT) for _ in range(2))
    assert hits(first) == expected
    assert first.token_ids == again.token_ids
    assert len(first.token_ids) > 0
    uncached = engine.generate(prompt, SHORT, reuse=False)
    assert uncached.metrics.prompt_tokens == first.metrics.prompt_tokens


def text_of(engine, part):
    return engine.loaded.tokenizer.decode(part.token_ids)


@pytest.mark.slow
def test_real_model_reads_the_arguments_when_a_trip_is_planned(shared_schema):
    """Fresh text at reserved positions between stored text; twice the same answer."""
    prompt = parse_prompt(
        '<prompt schema="travel"><travel-plan duration=" three days">'
        '<domestic city=" Lisbon"/></travel-plan>What should I see first?</prompt>'
    )
    with PromptCache.from_pretrained("smollm2", config=RESERVED) as engine:
        engine.add_schema(shared_schema(PARAMETERIZED))
        plan = engine.plan(prompt).plan
        arguments = [part for part in plan.fresh if part.kind is FreshKind.ARGUMENT]
        assert [text_of(engine, part) for part in arguments] == [" three days", " Lisbon"]
        read = engine.loaded.tokenizer.decode(plan.token_ids)
        assert "for the duration of three days." in read
        assert "<unk>" not in read
        first, again = (engine.generate(prompt, SHORT) for _ in range(2))
        assert [label for label, _ in hits(first)] == [
            "(anonymous)",
            "travel-plan",
            "travel-plan.domestic",
        ]
        assert first.token_ids == again.token_ids
        assert first.text.strip()
        nothing_imported = parse_prompt('<prompt schema="travel"/>')
        cached, uncached = (
            engine.generate(nothing_imported, SHORT, reuse=reuse) for reuse in (True, False)
        )
        assert {kind for _, kind in hits(cached)} == {EXACT}
        assert cached.token_ids == uncached.token_ids
