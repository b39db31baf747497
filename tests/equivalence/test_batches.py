"""Batches give what single calls give: shared modules, moved ones, sampling, ends, and E5."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from pc_rag.config import EngineConfig
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.sampling import GenerationConfig
from pc_rag.pml import parse_prompt
from pc_rag.types import FinishReason, PositionPolicy, Role, Visibility
from tests.support.engines import chunk_request, stored_bytes, tiny_engine
from tests.support.tiny_models import FAMILIES

SHORT = GenerationConfig(max_new_tokens=8)
NO_PREFIX_CACHE = EngineConfig(prefix_cache_bytes=0)
SCHEMA = """
<schema name="trip">Plan it.
  <module name="city">We go to Rome by train.</module>
  <union>
    <module name="short">Three days.</module>
    <module name="long">Two weeks, with a day at the sea, and museums.</module>
  </union>
  <module name="budget">Spend little.</module>
</schema>
"""

WHOLE = """
<schema name="whole"><user>I am
  <union scaffold="young">
    <module name="old">old, <param name="years" len="4" pad="space"/> years.</module>
    <module name="young">young.</module>
  </union>
  <scaffold name="facts">
    <module name="visa">A visa for <param name="where" len="6" default="Rome"/> is cheap.</module>
    <module name="money">Cards are taken.</module>
  </scaffold>
  <module name="news" cache="false">Trains are late.</module>
  <union><module name="sun">I like sun.</module><module name="rain">And rain.</module></union>
</user></schema>
"""


def ids_of(completions):
    return [completion.token_ids for completion in completions]


def single(engine, prompts, config=SHORT, **options):
    configs = config if isinstance(config, list) else [config] * len(prompts)
    return ids_of(engine.generate(p, c, **options) for p, c in zip(prompts, configs, strict=True))


def mixed_requests(engine, **options):
    """Requests that share modules at one place, at several, or not at all."""
    found = [
        ("abc", "\nWho sat?"),
        ("ba", "\nWhat did the cat look at, and why?"),
        ("a", "?"),
        ("", "\nIs there anything?"),
        ("cab", "\nHow long?"),
        ("abc", "\nWho sat?"),
        ("c", "\nWhy not?"),
    ]
    return [chunk_request(engine, labels, question=text, **options) for labels, text in found]


@pytest.fixture(scope="module")
def engines():
    """One engine for each family, over stored modules."""
    return {family: tiny_engine(family, config=NO_PREFIX_CACHE) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("share", [True, False])
def test_batch_equals_single_calls_when_modules_are_shared(engines, family, count, share):
    """Different lengths, chunks at other places for each, and one prompt that shares nothing."""
    engine = engines[family]
    requests = mixed_requests(engine)[:count]
    expected = single(engine, requests)
    assert ids_of(engine.generate_batch(requests, SHORT, share=share)) == expected
    assert len(set(expected)) > count // 2, "answers that are all alike would show nothing"


@pytest.mark.parametrize("repair", ["link:3", "link:100"])
@pytest.mark.parametrize("share", [True, False])
def test_batch_equals_single_calls_when_chunks_are_repaired(engines, repair, share):
    """Requests that read different rows of one entry, and repaired tokens between them."""
    engine = engines["qwen3"]
    requests = mixed_requests(engine, repair=repair)
    expected = single(engine, requests)
    assert ids_of(engine.generate_batch(requests, SHORT, share=share)) == expected


def test_batch_equals_single_calls_when_a_module_stands_everywhere(engines):
    """One shared module at six places: queries of every sequence are turned by their own shift."""
    engine = engines["llama"]
    requests = [chunk_request(engine, labels) for labels in permutations("abc")]
    requests += [
        chunk_request(engine, "ab", policy=PositionPolicy.RESERVED, slot_tokens=slot)
        for slot in (64, 80)
    ]
    assert ids_of(engine.generate_batch(requests, SHORT)) == single(engine, requests)


def test_pitfall_2_batch_equals_single_calls_when_a_chunk_stands_twice_in_a_prompt(engines):
    """Pitfall 2: a token that sees a shared entry at two places sees two pieces."""
    engine = engines["llama"]
    requests = [chunk_request(engine, labels) for labels in ("aa", "aba", "a", "bb")]
    assert ids_of(engine.generate_batch(requests, SHORT)) == single(engine, requests)


@pytest.mark.parametrize("policy", PositionPolicy)
def test_batch_equals_single_calls_when_prompts_are_of_every_kind(policy):
    """PML with unions, text, conversations and requests of a corpus in one call."""
    config = EngineConfig(position_policy=policy, prefix_cache_bytes=0)
    engine = tiny_engine(config=config)
    engine.add_schema(SCHEMA)
    prompts = [
        parse_prompt('<prompt schema="trip"><city/><long/>Go!</prompt>'),
        "The quick brown fox",
        parse_prompt('<prompt schema="trip"><city/><short/><budget/>What now?</prompt>'),
        [ChatMessage(Role.USER, "Who are you?")],
        parse_prompt('<prompt schema="trip"><budget/></prompt>'),
        chunk_request(engine, "ab"),
    ]
    completions = engine.generate_batch(prompts, SHORT)
    assert ids_of(completions) == single(engine, prompts)
    templates = [completion.metrics.template for completion in completions]
    assert templates == ["trip", "text", "trip", "chat", "trip", "chunks"]


def test_batch_equals_single_calls_when_modules_have_parameters():
    """Arguments of different lengths in one shared module, whose other rows are read in place."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    engine.add_schema(
        '<schema name="s">Plan. <module name="trip">Stay <param name="days" len="8"/> days, eat '
        '<param name="food" len="12" default="fish"/> at noon.</module></schema>'
    )
    prompts = [
        parse_prompt(f'<prompt schema="s"><trip {arguments}/>Go!</prompt>')
        for arguments in ('days="3"', 'days="thirteen"', 'days="7" food="tomatoes"', 'days="3"')
    ]
    batch = engine.prepare_batch(prompts, SHORT)
    found = ids_of(batch.run())
    assert found == single(engine, prompts)
    assert len(set(found)) == 3
    assert batch.memory.shared_bytes > batch.memory.tail_bytes / 4


@pytest.mark.parametrize("visibility", [Visibility.PREFIX, Visibility.MODULE])
@pytest.mark.parametrize("policy", PositionPolicy)
def test_batch_equals_single_calls_when_prompts_use_the_whole_of_pml(policy, visibility):
    """Some read joint entries, others those of members; with arguments, and siblings warmed."""
    engine = tiny_engine(
        config=EngineConfig(
            position_policy=policy,
            visibility=visibility,
            prefetch_siblings=True,
            keep_siblings=True,
            prefix_cache_bytes=0,
        )
    )
    engine.add_schema(WHOLE)
    bodies = (
        '<old years="9"/><facts/><sun/>Go!',
        '<young/><visa where="Oslo"/><money/><news/><rain/>Now?',
        '<young/>Well,<facts><visa where="Bern"/></facts><sun/>',
        '<old years=""/><money/><news/>',
        "<facts/>",
    )
    prompts = [parse_prompt(f'<prompt schema="whole">{body}</prompt>') for body in bodies]
    for options in ({}, {"share": False}, {"max_batch_size": 2}):
        assert ids_of(engine.generate_batch(prompts, SHORT, **options)) == single(engine, prompts)
    engine.close()


def test_pitfall_24_batch_equals_single_calls_when_there_is_no_pad_token():
    """Pitfall 24: prompts of different lengths, and a tokenizer that cannot pad."""
    engine = tiny_engine()
    assert engine.loaded.tokenizer.hf_tokenizer.pad_token is None
    prompts = ["a", "a longer prompt"]
    assert ids_of(engine.generate_batch(prompts, SHORT)) == single(engine, prompts)


def test_uncached_batch_equals_uncached_single_calls(engines):
    """``reuse=False``: everything is computed, and nothing is shared."""
    engine = engines["llama"]
    requests = mixed_requests(engine, repair="link:3")
    batch = engine.prepare_batch(requests, SHORT, reuse=False)
    completions = batch.run()
    assert ids_of(completions) == single(engine, requests, reuse=False)
    assert [completion.metrics.num_cached_tokens for completion in completions] == [0] * 7
    assert batch.memory.shared_bytes == 0


def test_seeded_batch_equals_seeded_single_calls(engines):
    """Every sequence has a random state of its own, whatever runs beside it."""
    engine = engines["llama"]
    requests = mixed_requests(engine)
    one = GenerationConfig(max_new_tokens=8, temperature=0.9, top_p=0.9, seed=3)
    assert ids_of(engine.generate_batch(requests, one)) == single(engine, requests, one)
    many = [GenerationConfig(max_new_tokens=8, temperature=0.9, seed=seed) for seed in range(7)]
    sampled = ids_of(engine.generate_batch(requests, many))
    assert sampled == single(engine, requests, many)
    assert sampled[0] != sampled[5], "the same prompt under two seeds"


def test_repetition_penalty_sees_each_prompts_own_tokens(engines):
    """Of the whole prompt, shared tokens included, and of no other prompt."""
    engine = engines["llama"]
    requests = mixed_requests(engine)
    config = GenerationConfig(max_new_tokens=8, repetition_penalty=1.5)
    assert ids_of(engine.generate_batch(requests, config)) == single(engine, requests, config)


@pytest.mark.parametrize("lengths", [[1, 9, 4, 2, 30, 1, 5], [3, 1, 1, 1, 1, 1, 12]])
def test_batch_equals_single_calls_when_answers_end_at_different_times(engines, lengths):
    """Who has ended leaves the pass, from the middle of its block, too."""
    engine = engines["qwen3"]
    requests = mixed_requests(engine)
    configs = [GenerationConfig(max_new_tokens=length) for length in lengths]
    completions = engine.generate_batch(requests, configs)
    assert ids_of(completions) == single(engine, requests, configs)
    assert [len(ids) for ids in ids_of(completions)] == lengths


def test_batch_equals_single_calls_when_answers_stop(engines):
    """Stop strings and end-of-sequence tokens end a sequence as they end a single call."""
    engine = tiny_engine(config=NO_PREFIX_CACHE, only_ascii=True)
    requests = mixed_requests(engine)
    free = engine.generate_batch(requests, GenerationConfig(max_new_tokens=12))
    stops = [GenerationConfig(max_new_tokens=12, stop=(c.text[4:6], "@@")) for c in free[:-1]]
    configs = [*stops, GenerationConfig(max_new_tokens=12)]
    found = engine.generate_batch(requests, configs)
    expected = [engine.generate(r, c) for r, c in zip(requests, configs, strict=True)]
    assert [(c.text, c.token_ids, c.finish_reason) for c in found] == [
        (c.text, c.token_ids, c.finish_reason) for c in expected
    ]
    assert FinishReason.STOP in {c.finish_reason for c in found}


@pytest.mark.parametrize("early", [[0], [1], [1, 2], [0, 2, 4], [4]])
def test_batch_equals_single_calls_when_some_of_one_buffer_stop(early):
    """Prompts of one length lie side by side; who stops leaves a gap between the others' slots."""
    engine = tiny_engine(config=NO_PREFIX_CACHE, only_ascii=True)
    prompts = [f"What begins with {letter}?" for letter in "vwxyz"]
    config = GenerationConfig(max_new_tokens=12)
    texts = [engine.generate(prompt, config).text for prompt in prompts]
    assert len(set(texts)) == len(texts)
    configs = [
        GenerationConfig(max_new_tokens=12, stop=(text[1:3],)) if number in early else config
        for number, text in enumerate(texts)
    ]
    found = engine.generate_batch(prompts, configs)
    expected = [engine.generate(p, c) for p, c in zip(prompts, configs, strict=True)]
    assert [c.text for c in found] == [c.text for c in expected]
    assert [len(c.token_ids) < 12 for c in found] == [n in early for n in range(len(texts))]


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 100])
def test_order_is_kept_when_a_batch_is_split_into_groups(engines, max_batch_size):
    """Results come in the order of the prompts, however many run side by side."""
    engine = engines["llama"]
    requests = mixed_requests(engine)
    found = engine.generate_batch(requests, SHORT, max_batch_size=max_batch_size)
    assert ids_of(found) == single(engine, requests)


def test_batch_equals_single_calls_when_prompts_need_several_passes(engines, monkeypatch):
    """Prompts go through the model a few at a time; one that is too long for a pass goes alone."""
    monkeypatch.setattr("pc_rag.engine.batch_group._PASS_TOKENS", 30)
    engine = engines["llama"]
    requests = mixed_requests(engine)
    assert ids_of(engine.generate_batch(requests, SHORT)) == single(engine, requests)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_batch_equals_single_calls_when_entries_are_stored_narrower(storage):
    """Shared entries are converted once, as single calls convert theirs."""
    config = EngineConfig(prefix_cache_bytes=0, storage_dtype=storage)
    engine = tiny_engine(config=config)
    requests = mixed_requests(engine)
    single(engine, requests, GenerationConfig(max_new_tokens=1))  # stores what is missing
    assert ids_of(engine.generate_batch(requests, SHORT)) == single(engine, requests)


def test_bfloat16_batch_gives_the_first_tokens_of_single_calls():
    """A narrow compute dtype rounds piece by piece; the clear choices are the same."""
    engine = tiny_engine(dtype=torch.bfloat16, config=NO_PREFIX_CACHE)
    requests = mixed_requests(engine)
    config = GenerationConfig(max_new_tokens=2)
    assert ids_of(engine.generate_batch(requests, config)) == single(engine, requests, config)


def test_e5_stored_entries_are_as_they_were_when_a_batch_has_read_them():
    """E5: byte for byte, and the same batch twice gives the same tokens."""
    engine = tiny_engine(config=NO_PREFIX_CACHE)
    requests = mixed_requests(engine)
    first = ids_of(engine.generate_batch(requests, SHORT))
    before = stored_bytes(engine, requests[0])
    assert ids_of(engine.generate_batch(requests, SHORT)) == first
    for key, states in stored_bytes(engine, requests[0]).items():
        assert all(map(torch.equal, states, before[key]))
