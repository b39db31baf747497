"""Pitfall 38: callers split chunks over prompts; the parts are read, counted and said."""

from __future__ import annotations

import pytest

from pc_rag.corpus import Document
from pc_rag.corpus.part_table import least_part
from pc_rag.layout import Cached
from pc_rag.metrics.text import REASONS, stats_text
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.loading import wrap_model
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import FinishReason, HitKind, MissReason, Role
from tests.support.corpora import (
    CAT,
    DOG,
    SHORT,
    chunk_uses,
    loaded_model,
    named,
    opened,
    same_in_both_arms,
)
from tests.support.engines import reference_ids
from tests.support.tiny_models import tiny_model

WAIT_SECONDS = 60
LONG = (
    "The lighthouse on the northern cape was built of grey stone in the year of the great storm, "
    "and its keeper climbed two hundred steps every evening to trim the lamp. Ships that came "
    "home from the fishing grounds steered by its light, and nobody in the village could recall a "
    "night on which it had been dark. \U0001f642 In winter the waves reached the lowest of "
    "its windows, and sang."
)
TEMPLATE = "Context information is below.\n-----\n{}\n-----\nQuestion: why?\nAnswer: "


def split(text, size):
    """Cut a text into windows with an overlap of a tenth, as a splitter of tokens does."""
    starts = range(0, max(1, len(text) - size // 10), size - size // 10)
    return [text[start : start + size].strip() for start in starts]


def split_prompts(texts, size):
    """The prompts of a caller that joins chunks, splits them, and asks with each piece."""
    return [TEMPLATE.format(piece) for piece in split("\n\n".join(texts), size)]


@pytest.fixture
def corpus():
    with opened(chunk_tokens=500) as corpus:
        corpus.add([CAT, DOG, LONG])
        assert corpus.stats().catalog.num_chunks == 3
        yield corpus


def described(result):
    """Tokens, hit kind and reason of every chunk, in prompt order."""
    return [(use.num_tokens, use.hit_kind, use.miss_reason) for use in chunk_uses(result)]


def test_parts_are_partial_and_say_so_when_a_chunk_is_split_between_two_prompts(corpus):
    """Pitfall 38: the first call reads the head, the second one tells of the tail."""
    first, second = split_prompts([CAT, DOG, LONG], 335)
    one, two = (corpus.generate(prompt, SHORT) for prompt in (first, second))
    cat, dog, head = described(one)
    assert cat == (len(CAT), HitKind.COMPOSED, MissReason.OTHER_PREFIX)
    assert dog[1] is HitKind.COMPOSED
    num_head = len(first.partition(LONG[:20])[2].partition("\n-----")[0]) + 20
    assert least_part(len(LONG)) <= num_head < len(LONG)
    assert head == (num_head, HitKind.PARTIAL, MissReason.SPLIT)
    ((num_tail, kind, reason),) = described(two)
    assert LONG.encode()[-num_tail:].decode() in second
    assert (kind, reason) == (None, MissReason.SPLIT)
    assert two.metrics.num_cached_tokens == 0
    assert one.metrics.num_cached_tokens == len(CAT) + len(DOG) + num_head
    total = corpus.engine.stats.snapshot().total
    assert total.module_hits[HitKind.PARTIAL] == 1
    assert total.module_misses[MissReason.SPLIT] == total.qualified_hits[MissReason.SPLIT] == 1
    text = stats_text(corpus.engine.stats.snapshot())
    assert text.count(f"1  split: {REASONS[MissReason.SPLIT]}") == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repair": "link:5"},
        {"repair": "link:1000"},
        {"position_policy": "reserved", "slot_tokens": 500},
        {"visibility": "module"},
        {"prefix_cache_bytes": 10**8},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_output_equals_the_reference_when_prompts_hold_parts(settings):
    """Greedy tokens are the oracle's, the first time and when all is stored."""
    with opened(**{"chunk_tokens": 500} | settings) as corpus:
        corpus.add([CAT, DOG, LONG])
        prompts = [*split_prompts([CAT, DOG, LONG], 335), f"{LONG[:200]}|{DOG}", f"{LONG[:210]}"]
        for prompt in prompts:
            request = corpus.plan(prompt)
            expected = reference_ids(corpus.engine, request, SHORT.max_new_tokens)
            for _ in range(1 + ("prefix_cache_bytes" in settings)):
                completion = corpus.generate(prompt, SHORT)
                length = len(completion.token_ids)
                assert completion.token_ids == expected[:length]
                assert length == len(expected) or completion.finish_reason is FinishReason.STOP
            bare = request.plan.without_reuse()
            assert (
                bare.token_ids
                == request.plan.token_ids
                == corpus.engine.plan(prompt).plan.token_ids
            )
            off = corpus.generate(prompt, SHORT, reuse=False).metrics
            assert off.num_cached_tokens == 0
            on = corpus.generate(prompt, SHORT).metrics
            assert [use.label for use in off.modules] == [use.label for use in on.modules]


def test_head_gives_the_tokens_of_a_full_prefill_when_it_stands_behind_its_prefix(corpus):
    """Where it was encoded, right behind what it attended, nothing is approximated."""
    corpus.adopt_prefix("Read this: ").result(WAIT_SECONDS)
    prompt = f"Read this: {LONG[:250]}| Why?"
    config = GenerationConfig(max_new_tokens=16)
    (part,) = [p for p in corpus.plan(prompt).plan.cached if p.hit_kind is HitKind.PARTIAL]
    assert part.shift == 0
    assert same_in_both_arms(lambda reuse: corpus.generate(prompt, config, reuse=reuse))


def test_head_is_read_to_its_last_whole_character_when_the_tokens_are_bytes(corpus):
    """What a token cannot stand for becomes text, and no character is cut."""
    for end in range(LONG.index("\U0001f642") - 1, LONG.index("\U0001f642") + 3):
        plan = corpus.plan(f"x {LONG[:end]}| y").plan
        (part,) = plan.cached
        assert bytes(part.token_ids).decode() == LONG[:end]
        assert plan.token_ids == tuple(f"x {LONG[:end]}| y".encode())


def test_head_is_encoded_whole_when_its_entry_is_not_stored(corpus):
    """As for whole chunks: the next prompt has a hit, of any length."""
    prompt = f"x {LONG[:200]}| y"
    (part,) = corpus.plan(prompt).plan.cached
    corpus.engine.store.remove(part.key)
    (use,) = chunk_uses(corpus.generate(prompt, SHORT))
    assert (use.miss_reason, use.num_encoded_tokens) == (MissReason.NOT_STORED, 200)
    (use,) = chunk_uses(corpus.generate(f"x {LONG} y", SHORT))
    assert use.is_hit


def test_head_is_computed_when_it_is_a_small_part_of_a_long_chunk():
    """A quotation does not have a whole long document loaded, or encoded; an eighth does."""
    loaded = wrap_model(*tiny_model("llama", max_position_embeddings=4096))
    book = " ".join(f"line {number}: {LONG[number : number + 60]}" for number in range(40))[:2400]
    with opened(loaded=loaded) as corpus:
        corpus.add([Document(book, id="book", is_whole=True)])
        quoted, more = (f"x {book[:num_chars]}| y" for num_chars in (299, 300))
        assert described(corpus.generate(quoted, SHORT)) == [(299, None, MissReason.SPLIT)]
        assert described(corpus.generate(more, SHORT)) == [(300, HitKind.PARTIAL, MissReason.SPLIT)]
        warmed = [corpus.warm([prompt]).result(WAIT_SECONDS) for prompt in (quoted, more)]
        assert warmed == [0, 1]


def test_head_stays_text_when_its_chunk_goes_meanwhile(corpus, monkeypatch):
    """It is told of all the same, and nothing vanishes."""
    prompt = f"x {LONG[:200]}| y"
    assert corpus.plan(prompt).plan.cached
    monkeypatch.setattr(corpus._catalog, "chunk", lambda _: None)
    completion = corpus.generate(prompt, SHORT)
    assert described(completion) == [(200, None, MissReason.SPLIT)]
    assert corpus.plan(prompt).plan.token_ids == tuple(prompt.encode())


def test_parts_are_found_in_messages_when_a_conversation_holds_them(corpus):
    """In what a message says, but not in the words of the template around it."""
    message = ChatMessage(Role.USER, f"{LONG[:200]}|{DOG}|{LONG[-200:]}")
    kinds = [kind for _, kind, _ in described(corpus.generate([message], SHORT))]
    assert kinds == [HitKind.PARTIAL, HitKind.COMPOSED, None]


def test_parts_are_found_beside_named_chunks(corpus):
    """A named text that was cut is passed over, and found as the part that stands there."""
    message = ChatMessage(Role.USER, f"{LONG[:200]}|{DOG}| why?", chunks=(LONG, DOG))
    request = corpus.plan([message])
    parts = [p for p in request.plan.parts if isinstance(p, Cached)]
    assert [part.hit_kind for part in parts] == [HitKind.PARTIAL, HitKind.COMPOSED]
    assert request.plan.token_ids == corpus.engine.plan([message]).plan.token_ids


def test_no_prefix_is_learned_when_only_parts_stand_in_a_prompt(corpus):
    """A part may be a quotation; beside a whole chunk its place is where the head ends."""
    assert corpus.learn_prefix(f"A head: {LONG[:200]}| why?") is None
    assert corpus.learn_prefix(f"A head: {LONG[-200:]}| why?") is None
    assert corpus.learn_prefix(f"A head: {LONG[-200:]}| {DOG}").result(WAIT_SECONDS) == 3
    assert "A head: " in corpus.prefixes


def test_chunk_has_no_remark_when_only_a_tail_stands_between_it_and_its_prefix(corpus):
    """What it attended is the prefix of the prompt; another prefix would not serve it better."""
    corpus.adopt_prefix("A head: ").result(WAIT_SECONDS)
    tail, dog = described(corpus.generate(f"A head: {LONG[-200:]}|{DOG}|", SHORT))
    assert tail == (len(LONG[-200:].lstrip().encode()), None, MissReason.SPLIT)
    assert dog == (len(DOG), HitKind.COMPOSED, None)


def test_chunk_is_linked_to_a_tail_when_that_is_all_before_it():
    """A tail is text of a chunk: the chunk behind it is not the first one."""
    with opened(chunk_tokens=500, repair="link:5") as corpus:
        corpus.add([DOG, LONG])
        plan = corpus.plan(f"{LONG[-250:]}|{DOG}|").plan
        assert plan.num_repaired_tokens == 5
        assert [part.rows.start for part in plan.cached] == [5]
        assert corpus.plan(f"why?|{DOG}|").plan.num_repaired_tokens == 0


def test_heads_are_warmed_and_tails_are_not(corpus):
    """Only what a prompt would read is brought near; a missing entry is encoded whole."""
    for part in corpus.plan(f"{CAT}|{LONG}|").plan.cached:
        corpus.engine.store.remove(part.key)
    assert corpus.warm([f"x {LONG[-200:]}"]).result(WAIT_SECONDS) == 0
    assert corpus.warm([f"{CAT}|{LONG[:200]}|"]).result(WAIT_SECONDS) == 2
    assert [use.is_hit for use in chunk_uses(corpus.generate(f"{CAT}|{LONG}|", SHORT))] == [
        True
    ] * 2


def test_tokens_are_stored_as_they_are_when_another_tokenizer_made_a_chunk(tmp_path):
    """A head never has a part of a text noted as the tokens of its chunk."""
    with opened(tmp_path, chunk_tokens=500) as corpus:
        corpus.add([LONG])
    with opened(tmp_path, loaded=loaded_model(add_bos=True), chunk_tokens=500) as corpus:
        (use,) = chunk_uses(corpus.generate(f"x {LONG[:200]}|", SHORT))
        assert use.num_tokens == 200
        (use,) = chunk_uses(corpus.generate(f"x {LONG}|", SHORT))
        assert (use.num_tokens, use.is_hit) == (len(LONG.encode()), True)


def test_removed_chunk_is_found_in_no_part(corpus):
    """Its document is gone; the prompt is text."""
    corpus.add(named(other=f"{LONG[100:]} And nobody knew why."))
    prompt = f"{LONG[100:320]}|"
    assert described(corpus.generate(prompt, SHORT)) == [
        (len(prompt.encode()) - 1, HitKind.PARTIAL, MissReason.SPLIT)
    ]
    corpus.remove("other")
    assert described(corpus.generate(prompt, SHORT)) == []
