"""Arguments, scaffolds and modules that are not stored, end to end on tiny models."""

from __future__ import annotations

import pytest

from pc_rag.config import EngineConfig
from pc_rag.errors import PromptError, SchemaError
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import parse_prompt
from pc_rag.types import Span
from tests.support.engines import SpyStore, reference_ids, tiny_engine
from tests.support.schemas import CITIES, config_of, policies

SHORT = GenerationConfig(max_new_tokens=8)

TRIP = """
<schema name="trip">
  <system>You plan trips for <param name="who" len="12" default="somebody"/>.</system>
  <user>
    <scaffold name="facts">
      <module name="visa">No visa is needed.</module>
      <module name="money">Cards are taken in <param name="where" len="8" pad="space"/>.</module>
    </scaffold>
    <module name="plan">
      Plan <param name="days" len="6"/> days.
      <module name="pace">Slowly.</module>
    </module>
    <module name="name"><param name="is" len="9"/></module>
    <module name="news" cache="false">It rains in <param name="city" len="8"/>.</module>
  </user>
</schema>
"""
TRIP_PROMPTS = [
    '<facts><money where="Rome"/></facts><plan days="three"/>Go!',
    '<visa/><plan days=""><pace/></plan><name is="Anna"/>Go!',
    '<money where="Florence"/><name is=""/><news city="Rome"/>Go!',
    "<plan.pace/>Go!",
    '<visa/>Hm. <money where="Bari"/><news city=""/>',
]


def trip(body, **arguments):
    given = "".join(f' {name}="{text}"' for name, text in arguments.items())
    if "plan.pace" in body:
        body = '<plan days="two"/>' + body
    return parse_prompt(f'<prompt schema="trip"{given}>{body}</prompt>')


@policies
@pytest.mark.parametrize("body", TRIP_PROMPTS)
def test_whole_pml_gives_the_reference_under_every_policy(policy, visibility, body):
    """E2 through the engine: arguments, scaffolds, modules that are not stored, from stored KV."""
    engine = tiny_engine(config=config_of(policy, visibility))
    engine.add_schema(TRIP)
    parsed = trip(body, who="my friends")
    answer = engine.generate(parsed, SHORT)
    assert all(use.is_hit for use in answer.metrics.modules)
    assert answer.token_ids == reference_ids(engine, engine.plan(parsed), 8)


@pytest.mark.parametrize("repair", ["none", "link:3", "link:1000"])
@pytest.mark.parametrize("body", TRIP_PROMPTS)
def test_arms_tell_of_the_same_modules_when_arguments_split_them(body, repair):
    """A module with parameters is one, with its stored tokens; both arms read the same tokens."""
    engine = tiny_engine(config=EngineConfig(prefix_cache_bytes=0, repair=repair))
    layout = engine.add_schema(TRIP)
    prompt = trip(body)
    cached, uncached = (
        engine.generate(prompt, SHORT, reuse=reuse).metrics for reuse in (True, False)
    )
    assert cached.prompt_tokens == uncached.prompt_tokens
    assert uncached.num_cached_tokens == 0
    told = [[(u.label, u.num_tokens) for u in m.modules] for m in (cached, uncached)]
    assert told[0] == told[1]
    sizes: dict[str, list[int]] = {}
    for run in layout.runs:
        sizes.setdefault(run.label, []).append(sum(map(len, run.text_rows)))
    assert all(num_tokens in sizes[label] for label, num_tokens in told[0])
    assert sum(num_tokens for _, num_tokens in told[0]) == (
        cached.num_cached_tokens + cached.num_repaired_tokens
    )


def test_entries_are_made_of_what_requests_read_when_a_schema_is_added():
    """A scaffold of two costs three; bare parameters and unstored modules cost nothing."""
    engine = tiny_engine(store=SpyStore())
    layout = engine.add_schema(TRIP)
    entries = [run for run in layout.runs if run.is_entry]
    assert engine.store.calls["put"] == len(entries)
    assert [run.label for run in entries] == [
        "(anonymous)", "visa", "money", "facts", "plan", "plan.pace", "(anonymous)",
    ]  # fmt: skip
    for body in TRIP_PROMPTS:
        engine.generate(trip(body), SHORT)
    assert engine.store.calls["put"] == len(entries), "requests found all they read"
    news = next(run for run in layout.runs if run.label == "news")
    texts = [recipe.address.token_ids for recipe in engine.plan(trip("Go!")).recipes.values()]
    assert news.token_ids not in texts


def test_run_of_bare_parameters_is_encoded_when_others_attend_it():
    """It is a context like any other, and no request reads it."""
    engine = tiny_engine(store=SpyStore())
    layout = engine.add_schema(
        '<schema name="s"><param name="p" len="4"/><module name="m">text</module></schema>'
    )
    assert [run.is_entry for run in layout.runs] == [False, True]
    prompt = parse_prompt('<prompt schema="s" p="hi"><m/>?</prompt>')
    assert [part.label for part in engine.plan(prompt).plan.cached] == ["m"]
    assert engine.generate(prompt, SHORT).token_ids == reference_ids(engine, engine.plan(prompt), 8)


def test_placeholders_are_read_by_no_prompt_when_they_stand_in_an_entry():
    """Spaces, because this tokenizer writes every byte; prompts read the rows beside them."""
    engine = tiny_engine()
    layout = engine.add_schema(TRIP)
    plan_run = next(run for run in layout.runs if run.label == "plan")
    assert plan_run.token_ids == (*b"Plan ", *6 * b" ", *b" days.\n")
    read = [
        part.rows
        for body in TRIP_PROMPTS
        for part in engine.plan(trip(body)).plan.cached
        if part.label == "plan"
    ]
    assert set(read) == {Span(0, 5), Span(11, 18)}


def test_every_problem_is_reported_when_arguments_do_not_fit_either():
    """Pitfall 9: two members, unknown and missing arguments, one too long, context overflow."""
    engine = tiny_engine(config=EngineConfig(context_limit=700))
    engine.add_schema(TRIP)
    engine.add_schema(CITIES)
    with pytest.raises(PromptError) as caught:
        engine.plan(
            trip('<plan days="sevenths" day="1"/><money/><nope/>' + 700 * "x", who=13 * "x")
        )
    messages = [problem.message for problem in caught.value.problems]
    wanted = ("context overflow", "has 13 tokens", "no parameter 'day'", "has 8 tokens",
              "'where' of module 'money' has no argument", "imported behind 'plan'",
              "has no module 'nope'")  # fmt: skip
    assert len(messages) == len(wanted)
    assert all(any(each in message for message in messages) for each in wanted)


def test_defaults_are_refused_with_their_counts_when_they_are_too_long():
    """Only the model's tokenizer knows; the schema stays unknown."""
    engine = tiny_engine()
    with pytest.raises(SchemaError, match=r"column 18: default='toolong' .* has 7 tokens"):
        engine.add_schema('<schema name="s"><param name="p" len="6" default="toolong"/></schema>')
    with pytest.raises(PromptError, match="known: none"):
        engine.plan(parse_prompt('<prompt schema="s"/>'))
