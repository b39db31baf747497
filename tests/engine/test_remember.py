"""The exact prefix cache at the engine: earlier turns, composed prompts, bounds, and its switch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pc_rag.config import EngineConfig
from pc_rag.layout.plan import Cached, Fresh, RequestPlan
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import PositionPolicy, Role, Span
from tests.support.engines import (
    CHUNKS,
    PREFIX,
    chunk_request,
    ingest,
    reference_ids,
    scripted,
    tiny_engine,
)

SHORT = GenerationConfig(max_new_tokens=10)
OFF = EngineConfig(prefix_cache_bytes=0)
FOLLOW_UP = "\nWho sat?\nAnd why?"


def turns(*texts):
    """A conversation whose first message is the system's."""
    roles = [Role.SYSTEM, *([Role.USER, Role.ASSISTANT] * len(texts))]
    return [ChatMessage(role, text) for role, text in zip(roles, texts, strict=False)]


def test_second_turn_reuses_the_first_and_its_answer():
    """Multi-turn chat: everything up to the new question comes from turn one, answer included."""
    engine, plain = (tiny_engine(only_ascii=True, config=c) for c in (EngineConfig(), OFF))
    first = turns("Be brief.", "Hello there?")
    answer = engine.generate(first, SHORT)
    prompt_ids = engine.plan(first).plan.token_ids
    second = [*first, ChatMessage(Role.ASSISTANT, answer.text), ChatMessage(Role.USER, "Why?")]
    reply = engine.generate(second, SHORT)
    # The last token of the answer was never computed: it ended the generation.
    assert reply.metrics.num_reused_tokens == len(prompt_ids) + len(answer.token_ids) - 1
    assert reply.token_ids == plain.generate(second, SHORT).token_ids
    third = [*second, ChatMessage(Role.ASSISTANT, reply.text), ChatMessage(Role.USER, "Sure?")]
    last = engine.generate(third, SHORT)
    assert last.metrics.num_reused_tokens > reply.metrics.prompt_tokens
    assert last.token_ids == plain.generate(third, SHORT).token_ids
    assert plain.generate(third, SHORT).metrics.num_reused_tokens == 0


@pytest.mark.parametrize("max_new_tokens", [1, 3, 12])
def test_the_same_prompt_again_computes_one_token(max_new_tokens):
    """All but the last token are reused, settled or not, and the answer is the same."""
    engine = tiny_engine()
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    first = engine.generate("What is the moon?", config)
    again = engine.generate("What is the moon?", config)
    assert again.token_ids == first.token_ids
    assert again.metrics.num_fresh_tokens == 1
    assert again.metrics.num_reused_tokens == len("What is the moon?") - 1


@pytest.mark.parametrize("repair", ["none", "link:4"])
def test_follow_up_question_behind_the_same_chunks_reuses_what_was_computed(repair):
    """A composed prefix: separators, repaired tokens and the first question are reused."""
    engine = tiny_engine()
    engine.generate(chunk_request(engine, "abc", repair=repair), SHORT)
    request = chunk_request(engine, "abc", question=FOLLOW_UP, repair=repair)
    answer = engine.generate(request, SHORT)
    num_repaired = 0 if repair == "none" else 8
    assert answer.metrics.num_reused_tokens == 3 + num_repaired + len("\nWho sat?")
    assert answer.metrics.num_repaired_tokens == 0
    assert answer.token_ids == reference_ids(engine, request, 10)
    assert all(use.is_hit for use in answer.metrics.modules)


@pytest.mark.parametrize("labels", ["acb", "bac", "ab", "abcc"])
def test_other_chunks_reuse_only_what_stands_before_the_difference(labels):
    """What was computed behind other chunks, or in another order, is not served."""
    engine = tiny_engine()
    engine.generate(chunk_request(engine, "abc"), SHORT)
    request = chunk_request(engine, labels)
    answer = engine.generate(request, SHORT)
    num_shared = sum(1 for ours, theirs in zip(labels, "abc", strict=False) if ours == theirs)
    num_shared = num_shared if labels.startswith("a") else 0
    num_shared = 1 if labels == "acb" else num_shared  # only the separator behind chunk a
    # Behind the shared separators, "ab" goes on with the newline of its question.
    assert answer.metrics.num_reused_tokens == num_shared
    assert answer.token_ids == reference_ids(engine, request, 10)


def test_rows_of_an_entry_are_told_from_the_whole_entry():
    """Text that looks like a chunk's repaired start is not served what stands behind that chunk.

    Under reserved positions both prompts continue at the same position ID.
    """
    engine = tiny_engine()
    options = {"policy": PositionPolicy.RESERVED, "slot_tokens": 100, "separator": ""}
    repaired = chunk_request(engine, "abc", repair="link:8", **options)
    engine.generate(repaired, SHORT)
    lookalike = chunk_request(engine, "ab", **options)
    start = CHUNKS["b"][:8]
    parts = _shifted(lookalike, repaired, start)
    answer = engine.generate(parts, SHORT)
    assert answer.token_ids == reference_ids(engine, parts, 10)
    assert answer.metrics.num_reused_tokens <= 8


def _shifted(plain, repaired, start):
    """``repaired`` with its cached rest of chunk b replaced by the whole chunk b."""
    whole = next(p for p in plain.plan.parts if isinstance(p, Cached) and p.label == "b")
    parts = []
    for part in repaired.plan.parts:
        if part.span.start >= 225 and not isinstance(part, Fresh):
            continue
        if isinstance(part, Cached) and part.label == "b":
            begin = part.span.start
            part = replace(whole, span=Span(begin, begin + len(whole.span)))  # noqa: PLW2901
        parts.append(part)
    assert any(isinstance(p, Fresh) and p.token_ids == tuple(start.encode()) for p in parts)
    return replace(repaired, plan=RequestPlan(tuple(parts)))


def test_uncached_arm_neither_reads_nor_writes_the_prefix_cache():
    """Baselines measure what they say."""
    engine = tiny_engine()
    engine.generate("What is the moon?", SHORT, reuse=False)
    assert engine.prefix_tree.stats().num_nodes == 0
    assert engine.prefix_tree.stats().num_matches == 0
    engine.generate("What is the moon?", SHORT)
    answer = engine.generate("What is the moon?", SHORT, reuse=False)
    assert answer.metrics.num_reused_tokens == 0
    assert answer.metrics.num_fresh_tokens == answer.metrics.prompt_tokens
    assert engine.prefix_tree.stats().num_matches == 1


def test_prefix_cache_stays_within_its_bytes():
    """Bounded: many prompts, also larger than the cache, and every answer is right."""
    plain = tiny_engine(config=OFF)
    capacity = plain.runner.shape.bytes_per_token(plain.runner.dtype) * 60
    engine = tiny_engine(config=EngineConfig(prefix_cache_bytes=capacity))
    prompts = ["Tell me about cats.", "Tell me about dogs.", "Sing!", "x" * 90, "Tell me more."]
    for prompt in prompts * 2:
        answer = engine.generate(prompt, SHORT)
        assert answer.token_ids == plain.generate(prompt, SHORT).token_ids
        assert engine.prefix_tree.stats().resident_bytes <= capacity
    assert engine.prefix_tree.stats().num_evictions > 0


@pytest.mark.parametrize("max_new_tokens", [3, 20])
def test_stream_ends_well_when_others_fill_the_prefix_cache_meanwhile(max_new_tokens):
    """What a running request reuses is not evicted before it has added its own answer."""
    plain = tiny_engine(config=OFF, only_ascii=True)
    capacity = plain.runner.shape.bytes_per_token(plain.runner.dtype) * 60
    config = EngineConfig(prefix_cache_bytes=capacity)
    engine = tiny_engine(config=config, only_ascii=True)
    prompt, limit = "Tell me about cats.", GenerationConfig(max_new_tokens=max_new_tokens)
    engine.generate(prompt, SHORT)
    stream = engine.stream(prompt, limit)
    pieces = [next(stream), next(stream)]
    for other in ("Sing a long song now!", "Or do not sing at all.", "Dance?"):
        engine.generate(other, SHORT)
    pieces += list(stream)
    assert "".join(pieces) == plain.generate(prompt, limit).text
    assert stream.completion.metrics.num_reused_tokens == len(prompt) - 1
    assert engine.prefix_tree.stats().resident_bytes <= capacity


def test_closed_stream_is_remembered_as_far_as_it_went():
    """A cancelled request leaves its prompt and the tokens it computed."""
    engine = tiny_engine(only_ascii=True)
    with scripted(engine, "abcdefgh"), engine.stream("Count.", SHORT) as stream:
        assert [next(stream) for _ in range(4)] == list("abcd")
    answer = engine.generate("Count.abcz", SHORT)
    assert answer.metrics.num_reused_tokens == len("Count.abc")
    assert answer.token_ids == tiny_engine(only_ascii=True).generate("Count.abcz", SHORT).token_ids


def test_tenants_and_models_share_no_prefix():
    """The namespace is the model and the tenant; each engine has a tree of its own anyway."""
    first, second = (tiny_engine(config=EngineConfig(tenant=tenant)) for tenant in "ab")
    other = tiny_engine(seed=1)
    spaces = {each._machinery.namespace for each in (first, second, other)}
    assert len(spaces) == 3


def test_prefix_text_that_is_stored_and_prefix_text_that_is_not_do_not_mix():
    """The same text as plain tokens and as an entry are two paths; both answers are right."""
    engine = tiny_engine()
    request = chunk_request(engine, "a", separator="")
    ingest(engine, request)
    text = PREFIX + CHUNKS["a"] + "\nWho sat?"
    plain = engine.generate(text, SHORT)
    composed = engine.generate(request, SHORT)
    assert composed.metrics.num_reused_tokens == 0
    assert composed.token_ids == plain.token_ids


def test_answer_is_given_and_counted_when_it_cannot_be_remembered(monkeypatch):
    """The exact prefix cache only saves time: a failure there costs no answer."""
    engine = tiny_engine()
    request = chunk_request(engine, "a")
    expected = engine.generate(request, GenerationConfig(max_new_tokens=3)).token_ids

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(engine.prefix_tree, "insert", fail)
    completion = engine.generate(request, GenerationConfig(max_new_tokens=3))
    assert completion.token_ids == expected
    assert engine.stats.snapshot().total.num_requests == 2
