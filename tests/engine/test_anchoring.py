"""Models with learned positions: entries are read where they were encoded, or encoded there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pc_rag.config import EngineConfig
from pc_rag.engine import EntryRecipe, Request
from pc_rag.engine.anchoring import anchored
from pc_rag.errors import LayoutError
from pc_rag.layout.plan import Cached, Fresh, FreshKind, RequestPlan
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import parse_prompt
from pc_rag.types import HitKind, MissReason, PositionPolicy, Span, Tier, Visibility
from tests.support.engines import (
    CHUNKS,
    PREFIX,
    QUESTION,
    SpyStore,
    chunk_request,
    ingest,
    misses,
    reference_ids,
    tiny_engine,
)
from tests.support.kv import make_address
from tests.support.reference import Module, module_kv
from tests.support.schemas import config_of, policies

FIXED = ("gpt2", "opt", "gpt_neo")
SHORT = GenerationConfig(max_new_tokens=6)
NO_PREFIX_CACHE = EngineConfig(prefix_cache_bytes=0)

ROOMS = """
<schema name="rooms">Read this first.
  <union>
    <module name="hall">The hall is long, dark and full of doors.</module>
    <module name="shed">The shed is <param name="size" len="12"/> and dry.</module>
  </union>
  Then look around.
  <module name="key">The key lies under the mat.</module>
  <module name="lamp">The lamp is lit.</module>
</schema>
"""
"""The text behind the union is always there, and moves with the member that is imported."""


@pytest.fixture(scope="module")
def gpt2():
    return tiny_engine("gpt2", config=NO_PREFIX_CACHE)


def rooms(engine, body):
    return engine.plan(parse_prompt(f'<prompt schema="rooms">{body}</prompt>'))


def hits(completion):
    return [(use.label, use.hit_kind) for use in completion.metrics.modules]


@pytest.mark.parametrize("family", FIXED)
@pytest.mark.parametrize("policy", list(PositionPolicy))
def test_e2_moved_chunks_give_the_reference_at_their_new_starts(family, policy):
    """E2: every module as stock transformers encodes it where it stands in the prompt."""
    engine = tiny_engine(family, config=NO_PREFIX_CACHE)
    request = chunk_request(engine, ["a", "b", "c"], policy=policy, slot_tokens=80)
    here = anchored(request, max_position=engine.max_position)
    assert [part.shift for part in here.plan.cached] == [0] * 4
    assert (here.plan.token_ids, here.plan.position_ids) == (
        request.plan.token_ids,
        request.plan.position_ids,
    )
    answer = engine.generate(request, SHORT)
    assert answer.token_ids == reference_ids(engine, here, 6)


def test_e6_entry_is_the_one_that_is_encoded_there_directly(gpt2):
    """Its key is that of the address, and its KV what stock transformers computes at that start."""
    request = chunk_request(gpt2, ["a", "b"])
    here = anchored(request, max_position=gpt2.max_position)
    gpt2.generate(request, SHORT)
    part = here.plan.cached[-1]
    prefix = gpt2.loaded.tokenizer.encode_text(PREFIX)
    recipe = here.recipes[part.key]
    assert recipe.address == gpt2.address(
        part.token_ids, start=part.span.start, context=recipe.address.context
    )
    assert recipe.address.context == request.recipes[recipe.origin].address.context
    with gpt2.store.lease(recipe.address, gpt2.runner.device) as lease:
        keys, values = lease.entry.keys, lease.entry.values
    for start, is_same in ((part.span.start, True), (recipe.address.start - 1, False)):
        module = Module(part.token_ids, start, prefix, tuple(range(len(prefix))))
        expected_keys, expected_values = map(torch.stack, module_kv(gpt2.loaded.model, module))
        assert torch.allclose(keys, expected_keys, atol=1e-4) is is_same
        assert torch.allclose(values, expected_values, atol=1e-4) is is_same


def test_second_request_hits_when_a_chunk_stands_there_again():
    """The first one encodes and stores it, unpinned; another start is another entry."""
    store = SpyStore()
    engine = tiny_engine("gpt2", store=store, config=NO_PREFIX_CACHE)
    first = chunk_request(engine, ["a", "b"])
    ingest(engine, first)
    assert store.calls["put"] == 3
    missed = engine.generate(first, SHORT)
    assert misses(missed.metrics) == {"prefix": None, "a": None, "b": MissReason.NOT_STORED}
    again = engine.generate(first, SHORT)
    assert [use.tier for use in again.metrics.modules] == [Tier.HOST] * 3
    assert again.token_ids == missed.token_ids
    assert store.calls["put"] == 4
    engine.generate(chunk_request(engine, ["c", "b"]), SHORT)
    assert store.calls["put"] == 6  # c at the first place, b at its third start
    address = first.recipes[first.plan.cached[2].key].address
    assert len(engine.store.starts(address)) == 3


def test_chunk_is_read_at_both_starts_when_it_stands_twice(gpt2):
    """Two places are two entries of one text."""
    request = chunk_request(gpt2, ["a", "b", "a"])
    here = anchored(request, max_position=gpt2.max_position)
    first, last = (part for part in here.plan.cached if part.label == "a")
    assert first.key != last.key
    assert gpt2.generate(request, SHORT).token_ids == reference_ids(gpt2, here, 6)


@policies
@pytest.mark.parametrize(
    "body",
    [
        "<key/><lamp/>What now?",
        "<hall/><key/>What now?",
        '<shed size="small"/><key/>What now?',
        "<hall/>Hm, <key/> and <lamp/>?",
    ],
)
def test_e2_schema_gives_the_reference_when_runs_are_moved(policy, visibility, body):
    """E2: unions, arguments, always-included text that moves, and modules that attended it."""
    engine = tiny_engine("gpt2", config=config_of(policy, visibility))
    engine.add_schema(ROOMS)
    request = rooms(engine, body)
    assert not any(part.shift for part in request.plan.cached)
    assert engine.generate(request, SHORT).token_ids == reference_ids(engine, request, 6)
    uncached = engine.generate(request, SHORT, reuse=False)
    assert uncached.metrics.num_cached_tokens == 0
    if all(kind is HitKind.EXACT for _, kind in hits(engine.generate(request, SHORT))):
        assert uncached.token_ids == engine.generate(request, SHORT).token_ids


def test_module_is_exact_when_it_attended_all_that_stands_before_it():
    """Without the union, text and module close up, each right behind what it attended."""
    engine = tiny_engine("gpt2", config=NO_PREFIX_CACHE)
    engine.add_schema(ROOMS)
    request = rooms(engine, "<key/><lamp/>What now?")
    kinds = {part.label: part.hit_kind for part in request.plan.cached}
    assert kinds == {
        "(anonymous)": HitKind.EXACT,
        "key": HitKind.EXACT,
        "lamp": HitKind.COMPOSED,  # it never attended the key
    }
    alone = rooms(engine, "<key/>What now?")
    answers = [engine.generate(alone, SHORT, reuse=reuse) for reuse in (True, False)]
    assert answers[0].token_ids == answers[1].token_ids


def test_context_stands_where_it_stands_in_the_prompt():
    """Text before an always-included run moves it; what attended the run attends it there."""
    engine = tiny_engine("gpt2", config=NO_PREFIX_CACHE)
    layout = engine.add_schema(ROOMS)
    text = next(run for run in layout.runs if b"around" in bytes(run.token_ids))
    for body, is_read in (("<key/>What now?", True), ("<hall/>Hm. <key/>What now?", False)):
        request = rooms(engine, body)
        stands = next(p for p in request.plan.parts if p.token_ids == text.token_ids)
        key = next(part for part in request.plan.cached if part.label == "key")
        attended = request.recipes[request.recipes[key.key].context[-1]].address
        assert (attended.token_ids, attended.start) == (text.token_ids, stands.span.start)
        assert stands.occurrence.key == attended.key
        assert (stands in request.plan.cached) is is_read


def test_part_is_computed_when_its_context_cannot_stand_before_it():
    """Where its prefix is not in the prompt, and would not end before it; the metrics say so."""
    engine = tiny_engine("gpt2", config=NO_PREFIX_CACHE)
    known = chunk_request(engine, ["a", "b"])
    by = len(known.plan.parts[0].span)
    parts = known.plan.parts[1:]
    near = (replace(p, span=Span(p.span.start - by, p.span.end - by)) for p in parts)
    plan = RequestPlan(tuple(near))
    request = replace(known, plan=plan)
    here = anchored(request, max_position=engine.max_position)
    assert here.plan.fresh[0].kind is FreshKind.UNPLACED
    answer = engine.generate(request, SHORT)
    assert misses(answer.metrics)["a"] is MissReason.UNPLACED
    assert answer.token_ids == reference_ids(engine, here, 6)
    uncached = here.plan.without_reuse()
    assert (uncached.token_ids, uncached.position_ids) == (plan.token_ids, plan.position_ids)
    assert uncached.parts[0].kind is FreshKind.UNCACHED


def test_repaired_chunk_is_one_module_when_it_moved(gpt2):
    """Its recomputed first tokens and its entry at the new start are one use of one entry."""
    request = chunk_request(gpt2, ["a", "b", "c"], repair="link:4")
    for _ in range(2):
        answer = gpt2.generate(request, SHORT)
    assert [label for label, _ in hits(answer)] == ["prefix", "a", "b", "c"]
    here = anchored(request, max_position=gpt2.max_position)
    assert here.plan.num_repaired_tokens == 8
    assert answer.token_ids == reference_ids(gpt2, here, 6)
    assert gpt2.generate(request, SHORT, reuse=False).metrics.prompt_tokens == here.plan.num_tokens


@pytest.mark.parametrize("family", FIXED)
@pytest.mark.parametrize("share", [True, False])
def test_batch_gives_what_each_prompt_gives_alone(family, share):
    """Members that read a chunk at one start share its entry; others have their own."""
    engine = tiny_engine(family, config=NO_PREFIX_CACHE)
    labels = (["a", "b"], ["a", "c", "b"], ["b", "a"], ["a", "b", "b"])
    requests = [chunk_request(engine, each) for each in labels]
    together = engine.generate_batch(requests, SHORT, share=share)
    for request, answer in zip(requests, together, strict=True):
        assert answer.token_ids == engine.generate(request, SHORT).token_ids


def test_reopened_store_hits_at_every_start(tmp_path):
    """What was encoded on demand is as durable as what was ingested."""
    for round_ in range(2):
        with tiny_engine("opt", store=tmp_path, config=NO_PREFIX_CACHE) as engine:
            request = chunk_request(engine, ["a", "b", "a"])
            answer = engine.generate(request, SHORT)
            assert {use.tier for use in answer.metrics.modules} == {Tier.DISK if round_ else None}
            address = request.recipes[request.plan.cached[1].key].address
            here = anchored(request, max_position=engine.max_position)
            expected = [part.span.start for part in here.plan.cached if part.label == "a"]
            assert list(engine.store.starts(address)) == expected


def test_exact_prefix_cache_serves_moved_chunks_again():
    """It knows what stands where; the same prompt is read from it to its last token."""
    engine = tiny_engine("gpt2")
    request = chunk_request(engine, ["a", "b"])
    first, second = (engine.generate(request, SHORT) for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.metrics.num_reused_tokens > 0


@pytest.mark.parametrize("family", [*FIXED, "bloom"])
def test_prompt_ends_at_the_last_position_when_it_is_as_long_as_allowed(family):
    """A prompt of all positions but one has one token; one more is refused with the numbers."""
    engine = tiny_engine(family, config=NO_PREFIX_CACHE, max_position_embeddings=150)
    limit = engine.max_position
    text = "x" * (limit - 1)
    assert len(engine.generate(text, SHORT).token_ids) <= 1
    ends = engine.generate("x" * (limit - 4), GenerationConfig(max_new_tokens=50))
    assert len(ends.token_ids) <= 4
    for refuse in (engine.generate, lambda text: engine.generate_batch([text])):
        with pytest.raises(LayoutError, match=f"{limit}"):
            refuse(text + "x")
    schema = '<schema name="s"><module name="m">{}</module></schema>'
    engine.add_schema(schema.format("y" * (limit - 1)))
    engine.generate(parse_prompt('<prompt schema="s"><m/></prompt>'), SHORT)
    with pytest.raises(LayoutError, match=f"{limit}"):
        engine.add_schema(schema.format("y" * (limit + 1)))


def test_head_is_computed_when_its_whole_chunk_does_not_end_within_the_positions():
    """The entry of a chunk is encoded as a whole, and there are no positions for its rest."""
    engine = tiny_engine("gpt2", config=NO_PREFIX_CACHE)
    request = chunk_request(engine, ["a", "b", "c"])
    last = request.plan.cached[-1]
    for limit, num_unplaced in ((last.span.end, 0), (last.span.end - 1, 1)):
        here = anchored(request, max_position=limit)
        unplaced = [part for part in here.plan.fresh if part.kind is FreshKind.UNPLACED]
        assert len(unplaced) == num_unplaced


@pytest.mark.parametrize("family", FIXED)
def test_entry_is_refused_with_numbers_when_it_lies_beyond_the_positions(family):
    """It may end at the last position; behind that it would be read beyond the learned table."""
    end = len(PREFIX) + len(CHUNKS["c"])
    engine = tiny_engine(family, max_position_embeddings=end)
    ingest(engine, chunk_request(engine, ["b", "c"]))
    engine = tiny_engine(family, max_position_embeddings=end - 1)
    with pytest.raises(LayoutError, match=rf"60 tokens.* ID 25.* to {end}.* {end - 1}"):
        ingest(engine, chunk_request(engine, ["b", "c"]))


def test_nothing_changes_when_no_part_is_moved(gpt2):
    """The very same request, so that an anchored one can be anchored again."""
    request = chunk_request(gpt2, ["a"])
    assert anchored(request, max_position=gpt2.max_position) is request
    here = anchored(chunk_request(gpt2, ["a", "b"]), max_position=gpt2.max_position)
    assert anchored(here, max_position=gpt2.max_position) is here


def read_at(places):
    """A request that reads addresses, each at a start; behind them one token."""
    recipes, parts = {}, []
    for address, context, start in places:
        recipes[address.key] = EntryRecipe(address, context)
        if start is not None:
            parts.append(
                Cached(
                    label=str(address.token_ids[0]),
                    key=address.key,
                    token_ids=address.token_ids,
                    span=Span(start, start + 8),
                    rows=Span(0, 8),
                    encoded_start=address.start,
                )
            )
    end = parts[-1].span.end
    plan = RequestPlan((*parts, Fresh(token_ids=(9,), span=Span(end, end + 1))))
    return anchored(Request(plan=plan, recipes=recipes), max_position=100)


@pytest.mark.parametrize(("stands", "is_read"), [(2, True), (3, False)])
def test_part_is_computed_when_what_it_attended_would_overlap(stands, is_read):
    """What is read stands where it stands, and what is not where it was encoded: in that order."""
    seen, unseen, own = (make_address((n,) * 8, start=s) for n, s in ((1, 0), (2, 10), (3, 18)))
    places = [(seen, (), stands), (unseen, (), None), (own, (seen.key, unseen.key), 20)]
    here = read_at(places)
    assert [part.label for part in here.plan.cached] == (["1", "3"] if is_read else ["1"])
    if is_read:
        context = here.recipes[here.plan.cached[1].key].context
        assert [here.recipes[key].address.start for key in context] == [2, 10]


def test_e6_entries_differ_when_what_they_attended_stood_elsewhere():
    """One text at one start behind the same text at three starts: three entries."""
    seen, own = make_address((1,) * 8, start=0), make_address((3,) * 8, start=18)
    found = [read_at([(seen, (), at), (own, (seen.key,), 20)]).plan.cached[1] for at in (0, 1, 2)]
    assert len({part.key for part in found}) == 3


def test_module_visible_chunks_need_no_context(gpt2):
    """Under ``module`` a chunk can stand anywhere, whatever is before it."""
    request = chunk_request(gpt2, ["a", "b"], prefix="", question=QUESTION)
    here = anchored(request, max_position=gpt2.max_position)
    part = here.plan.cached[-1]
    assert here.recipes[part.key].address.context.visibility is Visibility.MODULE
    assert len(part.token_ids) == len(CHUNKS["b"])
    assert gpt2.generate(request, SHORT).token_ids == reference_ids(gpt2, here, 6)
