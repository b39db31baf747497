"""Cache points: what is kept of a prompt gives full prefill's logits (E1), and is never changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pc_rag.corpus import PromptFormat
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.conversation import CachePoint, ChatMessage
from pc_rag.types import HitKind, MissReason, PositionPolicy, Role, Tier, Visibility
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    TEXTS,
    loaded_model,
    opened,
    same_in_both_arms,
)
from tests.support.engines import reference_ids, stored_bytes
from tests.support.processes import run_script
from tests.support.reference import full_logits
from tests.support.tiny_models import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
RULES = "You answer from the report below, in one short sentence."
REPORT = f"The report says: {CAT} It says no more than that, and nobody has asked about it since."


def conversation(question="Who sat?", *, num_points=2, behind=""):
    """Rules and a report, both kept, or the latter only; then what comes behind."""
    points = (CachePoint(len(RULES)),) if num_points > 1 else ()
    return (
        ChatMessage(Role.SYSTEM, RULES, cache_points=points),
        ChatMessage(
            Role.USER, f"{REPORT}{behind}\n{question}", cache_points=(CachePoint(len(REPORT)),)
        ),
    )


def logits_of(engine, request):
    """Logits behind a request, by the engine's own source and runner."""
    plan = request.plan
    with engine.source.acquire([part.key for part in plan.cached], request.recipes) as acquired:
        view = assemble(plan, acquired.entries, engine.runner, num_new_tokens=1)
        return engine.runner.prefill(view, *fresh_tokens(plan))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_points", [1, 2])
def test_e1_kept_text_and_question_equal_full_prefill(family, num_points):
    """E1: entries of one and of two points give full prefill's logits, made and read alike."""
    with opened(loaded=loaded_model(family)) as corpus:
        corpus.add(TEXTS)
        request = corpus.plan(conversation(num_points=num_points))
        assert [part.hit_kind for part in request.plan.cached] == [HitKind.EXACT] * num_points
        plan = request.plan
        expected = full_logits(corpus.engine.loaded.model, plan.token_ids, plan.position_ids)
        for _ in range(2):  # encoded for this request, then read
            torch.testing.assert_close(logits_of(corpus.engine, request), expected, **TOLERANCE)
        other = corpus.plan(conversation("What is the weather like today?", num_points=num_points))
        assert (logits_of(corpus.engine, other) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("num_points", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"visibility": Visibility.MODULE},
        {"position_policy": PositionPolicy.RESERVED, "slot_tokens": 100},
        {"repair": "link:4"},
    ],
)
def test_chunks_behind_kept_text_equal_the_reference(num_points, settings):
    """E2: chunks are recognised behind the last point, and before it they are part of the text."""
    with opened(**settings) as corpus:
        corpus.add(TEXTS)
        behind = conversation(num_points=num_points, behind=f"\n\n{DOG}\n\n{FISH}")
        request = corpus.plan(behind)
        kinds = [part.hit_kind for part in request.plan.cached]
        assert kinds == [HitKind.EXACT] * num_points + [HitKind.COMPOSED] * 2
        texts = [bytes(part.token_ids).decode() for part in request.plan.cached[num_points:]]
        num_repaired = 4 if "repair" in settings else 0
        assert texts == [DOG, FISH[num_repaired:]]
        answer = corpus.generate(behind, SHORT)
        assert answer.token_ids == reference_ids(corpus.engine, request, len(answer.token_ids))


def test_kept_text_is_read_when_it_is_asked_for_again():
    """The first call makes entries and says so; the next reads them, with another question too."""
    with opened() as corpus:
        first = corpus.generate(conversation(), SHORT).metrics
        again = corpus.generate(conversation("Is it raining?"), SHORT).metrics
    assert [use.label for use in first.modules] == ["(cache point 1)", "(cache point 2)"]
    assert {use.miss_reason for use in first.modules} == {MissReason.NOT_STORED}
    kept = sum(use.num_tokens for use in first.modules)
    assert first.num_cache_creation_tokens == again.num_cache_read_tokens == kept
    assert [use.hit_kind for use in again.modules] == [HitKind.EXACT] * 2
    assert again.num_cache_creation_tokens == 0


def test_e5_kept_entries_do_not_change_when_they_are_read():
    """E5 and pitfall 1: the same request twice gives the same tokens and leaves the same bytes."""
    with opened() as corpus:
        request = corpus.plan(conversation())
        first = corpus.generate(conversation(), SHORT)
        before = stored_bytes(corpus.engine, _chain_only(request))
        second = corpus.generate(conversation(), SHORT)
        after = stored_bytes(corpus.engine, _chain_only(request))
    assert first.token_ids == second.token_ids
    for key, tensors in before.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, after[key], strict=True))


def _chain_only(request):
    """A request without the recipes of prefixes that it does not read."""
    keys = {part.key for part in request.plan.cached}
    return type(request)(
        plan=request.plan, recipes={k: r for k, r in request.recipes.items() if k in keys}
    )


def test_uncached_arm_computes_the_same_prompt():
    """``reuse=False``: the same token ids, none of them cached, and the same answer."""
    with opened() as corpus:
        assert same_in_both_arms(lambda reuse: corpus.generate(conversation(), SHORT, reuse=reuse))
        metrics = corpus.generate(conversation(), SHORT, reuse=False).metrics
        plan = corpus.plan(conversation()).plan
    assert (metrics.num_cached_tokens, metrics.prompt_tokens) == (0, plan.num_tokens)
    assert plan.without_reuse().token_ids == plan.token_ids


RESTART = """
import json, sys
from pathlib import Path
from tests.equivalence.test_kept_prompts import conversation
from tests.support.corpora import SHORT, TEXTS, opened

with opened(Path(sys.argv[1])) as corpus:
    answer = corpus.generate(conversation(), SHORT)
    print(json.dumps({
        "hash": hash("x"),
        "tiers": [use.tier for use in answer.metrics.modules],
        "tokens": answer.token_ids,
    }))
"""


def test_kept_text_hits_when_a_new_process_with_another_hash_seed_asks(tmp_path):
    """Pitfall 43: kept entries are on disk, under keys that come from content."""
    first, second = run_script(RESTART, tmp_path, seed="1"), run_script(RESTART, tmp_path, seed="2")
    assert first["hash"] != second["hash"]
    assert (first["tiers"], second["tiers"]) == ([None, None], [Tier.DISK, Tier.DISK])
    assert first["tokens"] == second["tokens"]


def test_e6_kept_text_of_another_model_is_never_read(tmp_path):
    """E6 and pitfall 3: same shapes, other weights, one folder."""
    with opened(tmp_path) as corpus:
        corpus.generate(conversation(), SHORT)
    with opened(tmp_path, loaded=loaded_model(seed=1)) as other:
        first = other.generate(conversation(), SHORT)
        assert first.metrics.modules[0].miss_reason is MissReason.FINGERPRINT
        uncached = other.generate(conversation(), SHORT, reuse=False)
        assert first.token_ids == uncached.token_ids


def test_first_chunk_stays_exact_when_the_point_ends_the_prefix():
    """What a prefix of the corpus holds is read from there: its chunks stay exact behind it."""
    with opened(prompt_format=PromptFormat(prefix=RULES)) as corpus:
        corpus.add(TEXTS)
        own = corpus.prompt_format.messages("Who?", [DOG, FISH])
        rules = ChatMessage(Role.SYSTEM, own[0].content, cache_points=(CachePoint(len(RULES)),))
        plain, kept = corpus.plan(own).plan, corpus.plan((rules, own[1])).plan
    assert [part.hit_kind for part in plain.cached][:2] == [HitKind.EXACT] * 2
    assert plain == kept


def test_kept_text_begins_with_the_entry_of_the_prefix_when_it_goes_on_behind_it():
    """Nothing that a prefix of the corpus holds is encoded or stored twice."""
    with opened(prompt_format=PromptFormat(prefix=RULES)) as corpus:
        corpus.add(TEXTS)
        rules, asked = corpus.prompt_format.messages("Who?", [DOG, FISH])
        point = CachePoint(asked.content.index(FISH))
        kept = (rules, ChatMessage(Role.USER, asked.content, cache_points=(point,)))
        answer = corpus.generate(kept, SHORT)
        request = corpus.plan(kept)
        num_shown = len(answer.token_ids)
        assert answer.token_ids == reference_ids(corpus.engine, request, num_shown)
    assert [use.label for use in answer.metrics.modules[:2]] == ["(prefix)", "(cache point)"]
    assert answer.metrics.modules[0].is_hit
    assert answer.metrics.num_cache_creation_tokens == len(DOG + "\n\n")
    assert [part.hit_kind for part in request.plan.cached[:2]] == [HitKind.EXACT] * 2


def test_entries_of_earlier_points_are_read_when_the_point_moves_on():
    """A conversation that grows, one point at its latest turn: only what came since is encoded."""
    with opened() as corpus:
        turns = [ChatMessage(Role.SYSTEM, RULES)]
        made = []
        for number in range(12):
            text = f"Question {number}: what does the report say about the weather?"
            asked = ChatMessage(Role.USER, text, cache_points=(CachePoint(len(text)),))
            request = corpus.plan((*turns, asked))
            answer = corpus.generate((*turns, asked), SHORT)
            made.append(answer.metrics.num_cache_creation_tokens)
            turns += [ChatMessage(Role.USER, text), ChatMessage(Role.ASSISTANT, "It is wet.")]
            assert len(request.plan.cached) <= 8
        logits = logits_of(corpus.engine, request)
        plan = request.plan
        expected = full_logits(corpus.engine.loaded.model, plan.token_ids, plan.position_ids)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    turn = made[2]
    assert made[1:8] == [turn] * 7, "every turn encodes itself only"
    assert made[8] > turn, "a chain that has grown long is encoded as one"
    assert made[9] < 2 * turn


def test_exact_prefix_cache_works_behind_kept_text():
    """What came behind a kept text is reused by the next prompt that goes on from there."""
    with opened(prefix_cache_bytes=1 << 24) as corpus:
        first = corpus.generate(conversation(), SHORT)
        again = corpus.generate(conversation("Who sat? And where?"), SHORT)
        assert again.metrics.num_reused_tokens > 0
        assert first.metrics.num_reused_tokens == 0
        assert same_in_both_arms(
            lambda reuse: corpus.generate(conversation("Who sat? And"), SHORT, reuse=reuse)
        )
