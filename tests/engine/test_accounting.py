"""Metrics of real requests: every token once, every module with its reason, times that add up."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pc_rag.config import EngineConfig
from pc_rag.engine import PromptCache, accounting
from pc_rag.layout import (
    Cached,
    EntryPiece,
    Fresh,
    FreshKind,
    RequestPlan,
    TextPiece,
    apply_repair,
    parse_repair,
    plan_chunks,
)
from pc_rag.layout.reuse import with_reused
from pc_rag.metrics import TokenKind
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import HitKind, MissReason, PositionPolicy, Span, Tier
from tests.support.engines import (
    CHUNKS,
    PREFIX,
    PREFIX_LABEL,
    chunk_request,
    ingest,
    misses,
    scripted,
    tiny_engine,
)

SHORT = GenerationConfig(max_new_tokens=6)
OFF = EngineConfig(prefix_cache_bytes=0)


def parts_of(metrics):
    return (metrics.num_cached_tokens, metrics.num_repaired_tokens, metrics.num_fresh_tokens)


@pytest.mark.parametrize("repair", ["none", "link:3", "link:40", "link:1000"])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("labels", ["", "a", "abc", "aab"])
def test_every_token_is_counted_once(repair, reuse, labels):
    """Tokens are cached, repaired or fresh; link:n repairs n of every chunk but the first."""
    engine = tiny_engine(config=OFF)
    request = chunk_request(engine, labels, repair=repair)
    sizes = [len(CHUNKS[label]) for label in labels]
    num_link = 0 if repair == "none" else int(repair.removeprefix("link:"))
    repaired = sum(min(size, num_link) for size in sizes[1:])
    text = len(labels) + len("\nWho sat?")
    total = len(PREFIX) + sum(sizes) + text
    metrics = engine.generate(request, SHORT, reuse=reuse).metrics
    assert metrics.prompt_tokens == total == sum(parts_of(metrics))
    assert metrics.num_repaired_tokens == (repaired if reuse else 0)
    if reuse:
        assert metrics.num_fresh_tokens == text
    else:
        assert metrics.num_cached_tokens == metrics.num_reused_tokens == 0
    assert [use.label for use in metrics.modules] == [PREFIX_LABEL, *labels]
    assert [use.num_tokens for use in metrics.modules] == [len(PREFIX), *sizes]


def test_modules_stay_in_the_metrics_when_the_prefix_cache_holds_their_repaired_tokens():
    """The second of two like requests reuses them, and tells of the same modules and tokens."""
    engine = tiny_engine()
    first, second = (
        engine.generate(chunk_request(engine, "abc", repair="link:400"), SHORT).metrics
        for _ in range(2)
    )
    assert second.num_reused_tokens > 0
    assert [(use.label, use.num_tokens) for use in second.modules] == [
        (use.label, use.num_tokens) for use in first.modules
    ]


@pytest.mark.parametrize("reuse", [True, False])
def test_chunks_are_told_apart_when_each_is_repaired_whole_beside_its_like(reuse):
    """Three of one chunk without a text between them are three modules in both arms."""
    engine = tiny_engine(config=EngineConfig())
    request = chunk_request(engine, "aaa", separator="", repair="link:1000")
    sizes = [len(CHUNKS["a"])] * 3
    for _ in range(2):  # then from the exact prefix cache
        modules = engine.generate(request, SHORT, reuse=reuse).metrics.modules
        assert [use.num_tokens for use in modules if use.label == "a"] == sizes


def test_tokens_are_timed_by_forward_passes_when_the_end_of_sequence_is_one():
    """The pass that gave the end-of-sequence token took time too."""
    engine = tiny_engine()
    with scripted(engine, "ab"):
        metrics = engine.generate("x", GenerationConfig(max_new_tokens=9)).metrics
    assert metrics.num_generated_tokens == metrics.num_decode_steps == 2
    assert metrics.tpot_seconds == metrics.decode_seconds / 2


def test_held_back_text_is_not_charged_to_assembly():
    """A first token that might begin a stop string waits for others to be decoded."""
    engine = tiny_engine()
    config = GenerationConfig(max_new_tokens=9, stop=("stop",))
    with scripted(engine, "stoa"):
        metrics = engine.generate("x", config).metrics
    assert 0 < metrics.held_back_seconds <= metrics.decode_seconds
    assert metrics.assembly_seconds < metrics.ttft_seconds - metrics.held_back_seconds


def test_hit_kinds_tell_exact_from_composed():
    """Prefix and first chunk are exact, later chunks composed."""
    engine = tiny_engine(config=OFF)
    request = chunk_request(engine, "abc")
    ingest(engine, request)
    modules = engine.generate(request, SHORT).metrics.modules
    kinds = [HitKind.EXACT, HitKind.EXACT, HitKind.COMPOSED, HitKind.COMPOSED]
    assert [use.hit_kind for use in modules] == kinds
    assert {use.tier for use in modules} == {Tier.HOST}
    assert {use.num_encoded_tokens for use in modules} == {0}


def test_miss_reasons_tell_repaired_from_switched_off():
    """A chunk that repair recomputes whole, and the uncached arm, are misses with their reasons."""
    engine = tiny_engine(config=OFF)
    request = chunk_request(engine, "ab", repair="link:1000")
    ingest(engine, request)
    metrics = engine.generate(request, SHORT).metrics
    assert misses(metrics) == {PREFIX_LABEL: None, "a": None, "b": MissReason.REPAIRED}
    uncached = engine.generate(chunk_request(engine, "ab"), SHORT, reuse=False).metrics
    assert set(misses(uncached).values()) == {MissReason.REUSE_OFF}


def test_remarks_qualify_hits():
    """A hit that could have been better says why."""
    engine = tiny_engine(config=OFF)
    request = chunk_request(engine, "ab")
    ingest(engine, request)
    remarked = type(request)(
        plan=request.plan, recipes=request.recipes, remarks={"b": MissReason.OTHER_PREFIX}
    )
    modules = engine.generate(remarked, SHORT).metrics.modules
    assert [use.miss_reason for use in modules] == [None, None, MissReason.OTHER_PREFIX]
    assert all(use.is_hit for use in modules)
    total = engine.stats.snapshot().total
    assert total.qualified_hits[MissReason.OTHER_PREFIX] == 1


def test_tokens_are_creation_first_and_read_later():
    """The first request creates what the second reads; usage metadata is made of these."""
    engine = tiny_engine(config=OFF)
    request = chunk_request(engine, "ab", repair="link:4")
    stored = len(PREFIX) + len(CHUNKS["a"]) + len(CHUNKS["b"]) - 4
    first = engine.generate(request, SHORT).metrics
    assert (first.num_cache_creation_tokens, first.num_cache_read_tokens) == (stored, 0)
    again = engine.generate(request, SHORT).metrics
    assert (again.num_cache_creation_tokens, again.num_cache_read_tokens) == (0, stored)


def test_stats_are_kept_by_template():
    """Requests of two corpora, a text and a failure-free total."""
    engine = tiny_engine(config=EngineConfig(tenant="t"))
    for template, labels in (("x", "a"), ("y", "ab"), ("x", "c")):
        engine.generate(chunk_request(engine, labels, template=template), SHORT)
    engine.generate("text", SHORT)
    snapshot = engine.stats.snapshot()
    assert [(g.template, g.tenant, g.num_requests) for g in snapshot.groups] == [
        ("x", "t", 2),
        ("y", "t", 1),
        ("text", "t", 1),
    ]
    x, y, text = snapshot.groups
    assert x.module_misses[MissReason.NOT_STORED] == 3
    assert (y.module_hits[HitKind.EXACT], y.module_misses[MissReason.NOT_STORED]) == (2, 1)
    assert text.num_prompt_tokens == text.prompt_tokens[TokenKind.FRESH] == 4
    assert snapshot.total.num_generated_tokens == 24
    assert snapshot.total.ttft.count == 4


@pytest.mark.parametrize("max_new_tokens", [1, 3, 12])
@pytest.mark.parametrize("is_stored", [True, False])
def test_parts_of_ttft_sum_to_at_most_the_whole(max_new_tokens, is_stored, tmp_path):
    """Phases are disjoint and lie inside TTFT, also with loading and encoding in between."""
    with tiny_engine(store=tmp_path) as engine:
        if is_stored:
            ingest(engine, chunk_request(engine, "abc"))
    with tiny_engine(store=tmp_path, only_ascii=False) as engine:
        request = chunk_request(engine, "abc")
        metrics = engine.generate(request, GenerationConfig(max_new_tokens=max_new_tokens)).metrics
    assert metrics.ttft_seconds is not None
    assert metrics.unattributed_seconds >= 0
    assert sum(metrics._parts().values()) <= metrics.ttft_seconds + 1e-9
    assert (metrics.encode_seconds > 0) is not is_stored
    assert (metrics.load_seconds.get(Tier.DISK, 0) > 0) is is_stored
    assert min(metrics.prefill_seconds, metrics.lookup_seconds, metrics.plan_seconds) > 0
    assert (metrics.decode_seconds > 0) is (max_new_tokens > 1)


def test_time_of_a_slow_consumer_is_not_decoding():
    """The watch stands still while the consumer holds a piece."""
    engine = tiny_engine(only_ascii=True)
    with engine.stream(chunk_request(engine, "a"), SHORT) as stream:
        for _ in stream:
            time.sleep(0.05)
    metrics = stream.completion.metrics
    assert metrics.decode_seconds < 0.25
    assert metrics.tpot_seconds < 0.05


LONG = "x" * 300


def test_prefill_rate_is_learned_when_a_long_prompt_was_computed():
    """The engine times the passes it runs anyway; the request itself knows the rate already."""
    engine = tiny_engine(config=OFF)
    assert engine.generate("short", SHORT).metrics.prefill_tokens_per_second is None
    first = engine.generate(LONG, SHORT).metrics
    assert first.prefill_tokens_per_second > 0
    assert first.saved_seconds == 0
    again = engine.generate("short", SHORT).metrics
    assert again.prefill_tokens_per_second == first.prefill_tokens_per_second
    assert engine.stats.snapshot().total.num_unknown_savings == 0  # none of them read anything


def test_prefill_rate_is_learned_when_ingestion_encoded():
    """Encoding is prefill too, so a corpus knows the rate before its first question."""
    engine = tiny_engine(config=OFF)
    for prefix in (PREFIX, LONG):
        request = chunk_request(engine, "abc", prefix=prefix)
        ingest(engine, request)
    metrics = engine.generate(request, SHORT).metrics
    assert metrics.num_cache_read_tokens > 0
    read = metrics.num_cache_read_tokens / metrics.prefill_tokens_per_second
    assert metrics.saved_seconds < read


def test_prefill_rate_is_not_learned_when_most_of_a_prompt_was_stored():
    """Its own tokens are slower than those it saved were: the saving would be overstated."""
    engine = tiny_engine(config=OFF)
    request = chunk_request(engine, "abc", prefix=LONG, question=LONG)
    ingest(engine, request)
    warm = PromptCache(engine.loaded, engine.store, OFF)
    for _ in range(3):
        metrics = warm.generate(request, SHORT).metrics
        assert metrics.num_fresh_tokens >= len(LONG)
        assert metrics.num_cache_read_tokens > len(LONG)
        assert metrics.prefill_tokens_per_second is None
        assert metrics.saved_seconds is None


def test_prefill_rate_is_not_learned_when_the_model_failed():
    """A pass that raised has no speed."""
    engine = tiny_engine(config=OFF)
    with scripted(engine, "a", fail_at=0), pytest.raises(ZeroDivisionError):
        engine.generate(LONG, SHORT)
    assert engine.generate("short", SHORT).metrics.prefill_tokens_per_second is None


def part_request(engine, *, repair="none", num_read=20):
    """Prefix, chunk a, the head of b, the tail of c, and b whole."""
    request = chunk_request(engine, "abcb")
    encode = engine.loaded.tokenizer.encode_text
    pieces = []
    for part in request.plan.parts:
        if not isinstance(part, Cached):
            pieces.append(TextPiece(part.token_ids))
            continue
        entry = EntryPiece(
            label=part.label,
            key=part.key,
            token_ids=part.token_ids,
            encoded_start=part.encoded_start,
            context_is_prefix=True,
            is_prefix=part.label == PREFIX_LABEL,
        )
        is_head = part.label == "b" and not any(p.label == "b" for p in pieces)
        pieces.append(replace(entry, num_read=num_read) if is_head else entry)
    tail = TextPiece(encode(CHUNKS["c"][-30:]), label="c")
    pieces = [tail if piece.label == "c" else piece for piece in pieces]
    plan = plan_chunks(pieces, policy=PositionPolicy.PACKED)
    plan = apply_repair(plan, parse_repair(repair), lambda part: part.label in CHUNKS)
    return replace(request, plan=plan, remarks=dict.fromkeys(CHUNKS, MissReason.OTHER_PREFIX))


def uses_of(metrics):
    return [(use.label, use.num_tokens, use.hit_kind, use.miss_reason) for use in metrics.modules]


def test_parts_are_counted_with_their_reason_when_a_prompt_holds_some():
    """Pitfall 38: a head is a partial hit, a tail a miss of fresh tokens; both say ``split``."""
    engine = tiny_engine(config=OFF)
    request = part_request(engine)
    ingest(engine, request)
    metrics = engine.generate(request, SHORT).metrics
    a, b = len(CHUNKS["a"]), len(CHUNKS["b"])
    assert uses_of(metrics) == [
        (PREFIX_LABEL, len(PREFIX), HitKind.EXACT, None),
        ("a", a, HitKind.EXACT, MissReason.OTHER_PREFIX),
        ("b", 20, HitKind.PARTIAL, MissReason.SPLIT),
        ("c", 30, None, MissReason.SPLIT),
        ("b", b, HitKind.COMPOSED, MissReason.OTHER_PREFIX),
    ]
    assert metrics.num_cached_tokens == len(PREFIX) + a + 20 + b
    assert metrics.num_fresh_tokens == 30 + 4 + len("\nWho sat?")
    assert metrics.prompt_tokens == sum(parts_of(metrics))
    assert metrics.modules[2].tier is Tier.HOST
    total = engine.stats.snapshot().total
    assert total.module_hits[HitKind.PARTIAL] == 1
    assert total.qualified_hits[MissReason.SPLIT] == total.module_misses[MissReason.SPLIT] == 1


def test_head_is_a_miss_like_any_other_when_its_entry_is_not_stored():
    """Only its own tokens count as created; the next request reads them."""
    engine = tiny_engine(config=OFF)
    request = part_request(engine)
    first, again = (engine.generate(request, SHORT).metrics for _ in range(2))
    assert uses_of(first)[2] == ("b", 20, None, MissReason.NOT_STORED)
    assert first.modules[2].num_encoded_tokens == 20
    assert uses_of(first)[3] == ("c", 30, None, MissReason.SPLIT)
    assert uses_of(again)[2] == ("b", 20, HitKind.PARTIAL, MissReason.SPLIT)
    assert first.num_cached_tokens == first.num_cache_creation_tokens == again.num_cached_tokens


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("repair", ["none", "link:3", "link:1000"])
def test_parts_keep_their_places_when_repair_and_both_arms_run(repair, reuse):
    """Labels and tokens are the same whatever is recomputed, and every token is counted once."""
    engine = tiny_engine(config=OFF)
    metrics = engine.generate(part_request(engine, repair=repair), SHORT, reuse=reuse).metrics
    a, b = len(CHUNKS["a"]), len(CHUNKS["b"])
    assert [use[:2] for use in uses_of(metrics)] == [
        (PREFIX_LABEL, len(PREFIX)), ("a", a), ("b", 20), ("c", 30), ("b", b),
    ]  # fmt: skip
    assert metrics.prompt_tokens == sum(parts_of(metrics))
    expected = {"none": 0, "link:3": 6, "link:1000": 20 + b}[repair] if reuse else 0
    assert metrics.num_repaired_tokens == expected
    reasons = misses(metrics)
    assert reasons["c"] is MissReason.SPLIT, "it is computed in any case"
    assert reuse or reasons["a"] is MissReason.REUSE_OFF


def test_parts_stay_in_the_metrics_when_the_prefix_cache_holds_them():
    """The second of two like requests reuses the tail, and tells of the same parts."""
    engine = tiny_engine()
    first, second = (engine.generate(part_request(engine), SHORT).metrics for _ in range(2))
    assert second.num_reused_tokens > 30
    assert [use[:2] for use in uses_of(second)] == [use[:2] for use in uses_of(first)]
    assert uses_of(second)[2][2:] == (HitKind.PARTIAL, MissReason.SPLIT)
    longer = part_request(engine, num_read=21)
    assert engine.generate(longer, SHORT).metrics.modules[2].num_tokens == 21


@pytest.mark.parametrize("num_held", range(12))
def test_tail_is_one_module_when_the_prefix_cache_holds_some_of_it(num_held):
    """What is reused of it and what is computed belong together; a neighbour stays apart."""
    tail, head = FreshKind.PART, FreshKind.REPAIR
    parts = [
        Fresh(token_ids=(1, 2, 3), span=Span(0, 3), kind=tail, label="a"),
        Fresh(token_ids=(4, 5, 6), span=Span(3, 6), kind=head, label="a"),
        Fresh(token_ids=(7, 8, 9), span=Span(6, 9), kind=tail, label="a"),
        Fresh(token_ids=(1, 2, 3), span=Span(9, 12), kind=tail, label="b"),
    ]
    plan = with_reused(RequestPlan(tuple(parts)), num_held)
    found = [(each.label, each.num_tokens) for each in accounting._occurrences(plan)]
    assert found == [("a", 3), ("a", 3), ("a", 3), ("b", 3)]
