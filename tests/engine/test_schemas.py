"""PML end to end on tiny models: roles, unions, both position policies, both visibilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pc_rag.config import EngineConfig
from pc_rag.engine import PromptCache
from pc_rag.errors import PromptError, SchemaError, StoreFull
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.tiered_store import TieredStore
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import Module, Text, parse_prompt, parse_schema
from pc_rag.types import HitKind, MissReason, PositionPolicy, Span, Tier, Visibility
from tests.support.engines import SpyStore, misses, reference_ids, tiny_engine

SHORT = GenerationConfig(max_new_tokens=8)

CITIES = """
<schema name="cities">
  <system>You know cities.</system>
  <user>
    Plan a trip.
    <module name="city">We go to Rome by train.</module>
    <union>
      <module name="short">Three days.</module>
      <module name="long">Two weeks, with a day at the sea, and museums.</module>
    </union>
    <module name="budget">Spend little.</module>
  </user>
</schema>
"""
PLAIN = """
<schema name="plain">Read this first.
  <module name="one">The first text.</module>
  and then
  <module name="two">The second text, which is longer.</module>
</schema>
"""


def config_of(policy, visibility, **changes):
    changes = {"prefix_cache_bytes": 0} | changes
    return EngineConfig(position_policy=policy, visibility=visibility, **changes)


def policies(test):
    test = pytest.mark.parametrize("policy", list(PositionPolicy))(test)
    return pytest.mark.parametrize("visibility", [Visibility.PREFIX, Visibility.MODULE])(test)


@policies
@pytest.mark.parametrize(
    ("schema", "prompt"),
    [
        (CITIES, '<prompt schema="cities"><city/><short/>Go!</prompt>'),
        (CITIES, '<prompt schema="cities"><long/><budget/>What now?</prompt>'),
        (CITIES, '<prompt schema="cities">What now?</prompt>'),
        (PLAIN, '<prompt schema="plain"><one/>Hm. <two/>So?</prompt>'),
        (PLAIN, '<prompt schema="plain"><two/></prompt>'),
    ],
)
def test_prompt_gives_the_reference_under_every_policy(policy, visibility, schema, prompt):
    """E2 through the engine: roles, unions, gaps and moved runs, from stored KV."""
    engine = tiny_engine(config=config_of(policy, visibility))
    engine.add_schema(schema)
    parsed = parse_prompt(prompt)
    answer = engine.generate(parsed, SHORT)
    request = engine.plan(parsed)
    assert all(use.is_hit for use in answer.metrics.modules)
    assert answer.metrics.template == parsed.schema
    assert all(part.token_ids for part in request.plan.parts)
    assert answer.token_ids == reference_ids(engine, request, 8)


@policies
def test_cached_equals_uncached_when_every_module_is_exact(policy, visibility):
    """Where the metrics say exact, the uncached arm gives the very same tokens."""
    engine = tiny_engine(config=config_of(policy, visibility))
    engine.add_schema(PLAIN)
    prompt = parse_prompt('<prompt schema="plain"><one/>So what?</prompt>')
    cached = engine.generate(prompt, SHORT)
    uncached = engine.generate(prompt, SHORT, reuse=False)
    kinds = [use.hit_kind for use in cached.metrics.modules]
    if visibility is Visibility.PREFIX:
        assert kinds[:2] == [HitKind.EXACT] * 2
    prefix_only = parse_prompt('<prompt schema="plain">So what?</prompt>')
    first = engine.generate(prefix_only, SHORT)
    assert first.metrics.modules[0].hit_kind is HitKind.EXACT
    if all(kind is HitKind.EXACT for kind in kinds):
        assert cached.token_ids == uncached.token_ids
    assert uncached.metrics.prompt_tokens == cached.metrics.prompt_tokens


def test_exact_prompt_equals_the_uncached_arm_and_generate():
    """E1 through the engine: anonymous text, one module, question; equals ``model.generate``."""
    engine = tiny_engine(config=EngineConfig(prefix_cache_bytes=0))
    engine.add_schema('<schema name="s">Read this.<module name="m">A text.</module></schema>')
    prompt = parse_prompt('<prompt schema="s"><m/>So what?</prompt>')
    cached = engine.generate(prompt, SHORT)
    assert {use.hit_kind for use in cached.metrics.modules} == {HitKind.EXACT}
    ids = engine.plan(prompt).plan.token_ids
    expected = engine.loaded.model.generate(
        torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0
    )[0, len(ids) :]
    assert cached.token_ids == tuple(i for i in expected.tolist() if i != 259)
    assert cached.token_ids == engine.generate(prompt, SHORT, reuse=False).token_ids


def test_roles_make_the_control_tokens_of_the_template():
    """Turns come from the chat template; markup-like text inside a module stays text."""
    engine = tiny_engine()
    engine.add_schema(
        '<schema name="s"><system>Be kind.</system>'
        '<user><module name="m">say &lt;|im_end|&gt;</module></user></schema>'
    )
    request = engine.plan(parse_prompt('<prompt schema="s"><m/>now</prompt>'))
    ids = request.plan.token_ids
    assert [ids.count(258), ids.count(259)] == [3, 2]  # three turns opened, two closed
    assert b"say <|im_end|>" in bytes(i for i in ids if i < 256)


def test_schema_added_again_encodes_nothing():
    """Registering what is stored costs lookups only; a changed module costs itself only."""
    engine = tiny_engine(store=SpyStore())
    layout = engine.add_schema(PLAIN)
    assert engine.store.calls["put"] == len(layout.runs) == 4
    assert engine.add_schema(PLAIN) == layout
    assert engine.store.calls["put"] == 4
    engine.add_schema(PLAIN.replace("which is longer", "which is larger"))
    assert engine.store.calls["put"] == 5
    other_name = PLAIN.replace('name="plain"', 'name="other"')
    engine.add_schema(other_name.replace("which is longer", "which is larger"))
    assert engine.store.calls["put"] == 5
    assert engine.store.num_leased == 0


def test_schema_added_after_a_restart_encodes_nothing(tmp_path):
    """A new engine over the same folder: full hits from disk, the same answer."""
    prompt = parse_prompt('<prompt schema="cities"><city/><long/>Go!</prompt>')

    def run():
        spy = SpyStore(TieredStore([MemoryTier(1 << 26), DiskTier(tmp_path)]))
        with tiny_engine(store=spy) as engine:
            engine.add_schema(CITIES)
            return engine.generate(prompt, SHORT), spy.calls["put"]

    first, num_encoded = run()
    again, num_encoded_again = run()
    assert num_encoded > 0
    assert num_encoded_again == 0
    assert again.token_ids == first.token_ids
    assert {use.tier for use in again.metrics.modules} == {Tier.DISK}


def test_evicted_module_is_encoded_again_with_its_context():
    """A run whose context is gone, too, is computed in the request, and told."""
    engine = tiny_engine(config=EngineConfig(prefix_cache_bytes=0))
    engine.add_schema(CITIES)
    prompt = parse_prompt('<prompt schema="cities"><city/><short/>Go!</prompt>')
    expected = engine.generate(prompt, SHORT).token_ids
    for key in engine.plan(prompt).recipes:
        engine.store.remove(key)
    answer = engine.generate(prompt, SHORT)
    assert answer.token_ids == expected
    assert set(misses(answer.metrics).values()) == {MissReason.NOT_STORED}


def test_schema_may_come_as_text_file_or_parsed(tmp_path):
    """A path is read, text is parsed."""
    path = Path(tmp_path) / "plain.pml"
    path.write_text(PLAIN, encoding="utf-8")
    engine = tiny_engine()
    assert engine.add_schema(path) == engine.add_schema(PLAIN)


def test_prompt_is_refused_when_its_schema_is_unknown():
    """The message names what is known."""
    engine = tiny_engine()
    engine.add_schema(PLAIN)
    with pytest.raises(PromptError, match=r"'nope' is not known; known: plain"):
        engine.generate(parse_prompt('<prompt schema="nope">Hi</prompt>'))


def test_two_members_of_a_union_and_an_unknown_module_are_reported_together():
    """Pitfall 9: one error with every problem."""
    engine = tiny_engine()
    engine.add_schema(CITIES)
    with pytest.raises(PromptError) as caught:
        engine.plan(parse_prompt('<prompt schema="cities"><short/><long/><nope/>Go</prompt>'))
    assert len(caught.value.problems) == 2


def test_schema_stays_unknown_when_it_cannot_be_stored_or_parsed():
    """A schema that failed to register is not half there."""
    engine = tiny_engine(store=SpyStore(is_full=True))
    with pytest.raises(StoreFull):
        engine.add_schema(PLAIN)
    with pytest.raises(SchemaError):
        engine.add_schema('<schema name="x"><module name="m">a</module><module name="m"/></schema>')
    with pytest.raises(PromptError, match="known: none"):
        engine.generate(parse_prompt('<prompt schema="plain">Hi</prompt>'))


def test_later_schema_of_the_same_name_takes_its_place():
    """Prompts follow the schema that was added last."""
    engine = tiny_engine()
    engine.add_schema('<schema name="s"><module name="m">old</module></schema>')
    engine.add_schema('<schema name="s"><module name="m">newer</module></schema>')
    plan = engine.plan(parse_prompt('<prompt schema="s"><m/>?</prompt>')).plan
    assert plan.token_ids == tuple(b"newer?")


def test_schema_works_over_a_store_that_is_shared_between_engines(tmp_path):
    """Two tenants over one folder: the same schema is encoded for each."""
    counts = []
    for tenant in ("a", "b", "a"):
        spy = SpyStore(DiskTier(tmp_path))
        engine = PromptCache(tiny_engine().loaded, spy, EngineConfig(tenant=tenant))
        engine.add_schema(PLAIN)
        counts.append(spy.calls["put"])
        engine.close()
    assert counts == [4, 4, 0]


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


def test_entries_differ_when_what_they_attended_attended_something_else():
    """E6: under ``module`` a union's member has not seen the text in front, a second text has."""
    head, member, tail = "Head text.", "The member text.", "Tail text here."
    first = (
        f'<schema name="first">{head}<union scaffold="m"><module name="m">{member}</module></union>'
        f"{tail}</schema>"
    )
    second = (
        f'<schema name="second">{head}<module name="x"/>{member}<module name="y"/>{tail}</schema>'
    )
    prompt = parse_prompt('<prompt schema="second">Go!</prompt>')
    found = []
    for schemas in ((first, second), (second,)):
        # In two layers nothing of what was attended twice removed reaches keys and values.
        engine = tiny_engine(config=EngineConfig(visibility=Visibility.MODULE), num_hidden_layers=3)
        for schema in schemas:
            engine.add_schema(schema)
        request = engine.plan(prompt)
        key = request.plan.cached[2].key
        with engine.source.acquire([key], request.recipes) as acquired:
            found.append(acquired.entries[key].values.clone())
    assert torch.allclose(*found, atol=1e-5)


def test_entries_differ_when_what_they_attended_lies_elsewhere():
    """E6: the same text at the same place, behind the same text in front of or behind a module."""
    engine = tiny_engine()
    module, text = '<module name="x">123</module>', "AB"
    keys = []
    for name, before in (("first", text + module), ("second", module + text)):
        engine.add_schema(f'<schema name="{name}">{before}<module name="m">own</module></schema>')
        plan = engine.plan(parse_prompt(f'<prompt schema="{name}"><m/>?</prompt>')).plan
        keys += [part.key for part in plan.cached if part.label == "m"]
    assert len(set(keys)) == 2


@pytest.mark.parametrize("name", ["m", "user"])
def test_schema_is_checked_when_a_parsed_one_was_added_to(name):
    """Nodes built in Python are checked wherever they stand: no module hides another."""
    parsed = parse_schema('<schema name="s"><module name="m">text</module></schema>')
    changed = replace(parsed, children=(*parsed.children, Module(name, (Text("other"),))))
    with pytest.raises(SchemaError, match=name):
        tiny_engine().add_schema(changed)


@pytest.mark.parametrize("is_file", [True, False])
def test_files_are_modules_when_their_root_is_given(tmp_path, is_file):
    """``src_root`` reaches the parser, for text and for files."""
    (tmp_path / "a.txt").write_text("from <a> file", encoding="utf-8")
    schema = '<schema name="s"><module name="m" src="a.txt"/></schema>'
    if is_file:
        path = tmp_path / "s.pml"
        path.write_text(schema, encoding="utf-8")
        schema = path
    engine = tiny_engine()
    with pytest.raises(SchemaError, match="src_root"):
        engine.add_schema(schema)
    engine.add_schema(schema, src_root=tmp_path)
    plan = engine.plan(parse_prompt('<prompt schema="s"><m/>?</prompt>')).plan
    assert plan.token_ids == tuple(b"from <a> file?")
