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
from pc_rag.types import HitKind, MissReason, Tier, Visibility
from tests.support.engines import SpyStore, misses, reference_ids, tiny_engine
from tests.support.schemas import CITIES, config_of, policies

SHORT = GenerationConfig(max_new_tokens=8)

PLAIN = """
<schema name="plain">Read this first.
  <module name="one">The first text.</module>
  and then
  <module name="two">The second text, which is longer.</module>
</schema>
"""


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
