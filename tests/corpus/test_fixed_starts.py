"""Corpora of models with learned positions: an entry for each start a chunk is asked for at."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pc_rag.cli.survey import survey
from pc_rag.corpus import PromptFormat, chunk_id_of
from pc_rag.corpus.garbage import collect_garbage
from pc_rag.errors import LayoutError
from pc_rag.model.loading import wrap_model
from pc_rag.types import HitKind, MissReason, Tier
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    TEXTS,
    chunk_uses,
    loaded_model,
    named,
    opened,
    request_of,
    same_in_both_arms,
)
from tests.support.engines import reference_ids
from tests.support.scaffolds import CAT_ID, DOG_ID, FISH_ID, prompt
from tests.support.tiny_models import tiny_model

QUESTIONS = ("Where did the cat sit?", "Which dog barked?", "What swims in the lake?")
SLOT = 120


def fixed(folder=None, *, family="gpt2", **settings):
    return opened(folder, loaded=loaded_model(family), **settings)


def num_entries(corpus):
    return corpus.engine.store.stats()[-1].num_entries


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neo"])
@pytest.mark.parametrize("settings", [{}, {"position_policy": "reserved", "slot_tokens": SLOT}])
def test_answer_is_the_reference_when_chunks_stand_elsewhere(family, settings):
    """E2 through a corpus; asked again, every chunk is read."""
    with fixed(family=family, **settings) as corpus:
        corpus.add(TEXTS)
        for question in QUESTIONS[:2]:
            first = corpus.answer(question, 3, config=SHORT)
            again = corpus.answer(question, 3, config=SHORT)
            assert all(use.is_hit for use in chunk_uses(again))
            kinds = [use.hit_kind for use in chunk_uses(again)]
            assert kinds == [HitKind.EXACT, HitKind.COMPOSED, HitKind.COMPOSED]
            request = request_of(corpus, question, 3)
            expected = reference_ids(corpus.engine, request, 8)
            assert first.completion.token_ids == again.completion.token_ids == expected
        assert same_in_both_arms(
            lambda reuse: corpus.answer(QUESTIONS[0], 1, config=SHORT, reuse=reuse)
        )


def test_starts_of_a_chunk_are_those_of_its_slots_under_reserved():
    """At ingestion the first slot's; one for each slot it was asked for at, and no more."""
    with fixed(position_policy="reserved", slot_tokens=SLOT) as corpus:
        corpus.add(TEXTS)
        prefix = len(corpus.engine.loaded.tokenizer.encode_text(corpus.prefix))
        ids = (CAT_ID, DOG_ID, FISH_ID)
        first = {corpus.starts(id_) for id_ in ids}
        assert len(first) == 1
        assert first <= {(start,) for start in range(prefix + 1)}
        texts = (CAT, DOG, FISH, CAT, DOG, FISH)
        for turn in range(3):
            for _ in range(2):
                corpus.generate(prompt(corpus, *texts[turn : turn + 3]), SHORT)
        slots = {corpus.starts(id_) for id_ in ids}
        assert len(slots) == 1
        (starts,) = slots
        assert len(starts) == 3
        assert all(SLOT <= b - a <= SLOT + 2 for a, b in pairwise(starts))
        assert corpus.starts(chunk_id_of("nobody has this")) == ()


def test_stats_count_starts_when_chunks_have_several(tmp_path):
    """Texts, entries, most starts of one and their mean, from the files alone."""
    with fixed(tmp_path) as corpus:
        corpus.add(TEXTS)
        for texts in ((CAT, DOG), (FISH, DOG), (DOG, CAT)):
            corpus.generate(prompt(corpus, *texts), SHORT)
        starts = [len(corpus.starts(id_)) for id_ in (CAT_ID, DOG_ID, FISH_ID)]
        assert starts == [2, 3, 1]
    (entries,) = survey(tmp_path / "kv").models
    assert (entries.num_texts, entries.num_entries) == (4, 7)  # the prefix is one of them
    assert (entries.num_starts, entries.most_starts, entries.mean_starts) == (7, 3, 7 / 4)


def test_chunks_hit_at_every_start_when_the_store_is_reopened(tmp_path):
    """Entries made on demand are durable, and recorded."""
    asked = []
    for _ in range(2):
        with fixed(tmp_path) as corpus:
            corpus.add(TEXTS)
            asked.append(corpus.generate(prompt(corpus, CAT, DOG, FISH), SHORT))
    assert misses_of(asked[0]) == [None, MissReason.NOT_STORED, MissReason.NOT_STORED]
    assert [use.tier for use in chunk_uses(asked[1])] == [Tier.DISK] * 3
    assert asked[0].token_ids == asked[1].token_ids


def misses_of(completion):
    return [use.miss_reason for use in chunk_uses(completion)]


@pytest.mark.parametrize("knows_model", [True, False])
def test_gc_reclaims_every_start_when_the_document_is_gone(tmp_path, knows_model):
    """With the model at hand and without it, as the command line does it."""
    with fixed(tmp_path) as corpus:
        corpus.add(named(cat=CAT, dog=DOG))
        for texts in ((CAT, DOG), (DOG, CAT), (CAT, DOG, CAT)):
            corpus.generate(prompt(corpus, *texts), SHORT)
        assert len(corpus.starts(CAT_ID)) == 3
        held = num_entries(corpus)
        corpus.remove("cat")
        if knows_model:
            report = corpus.gc()
        else:
            report = collect_garbage(corpus._catalog, corpus.engine.store)
        assert report.num_entries == 3
        assert num_entries(corpus) == held - 3
        assert corpus.starts(CAT_ID) == ()
        assert len(corpus.starts(DOG_ID)) == 2


def test_gc_reclaims_every_start_when_the_document_came_back_meanwhile():
    """A start that was noted and reclaimed is noted again when it is made again."""
    with fixed() as corpus:
        for _ in range(2):
            corpus.add(named(cat=CAT, dog=DOG))
            corpus.generate(prompt(corpus, DOG, CAT), SHORT)
            corpus.remove("cat")
            collect_garbage(corpus._catalog, corpus.engine.store)
            assert num_entries(corpus) == 2  # the prefix, and the dog at one start
        corpus.remove("dog")
        corpus.gc()
        assert num_entries(corpus) == 1


def test_forgotten_prefix_takes_its_starts_along():
    """Entries behind an adopted prefix go with it, wherever they stood."""
    with fixed() as corpus:
        corpus.add(TEXTS)
        before = num_entries(corpus)
        head = "You are told this, and nothing else: "
        corpus.adopt_prefix(head).result()
        corpus.generate(f"{head}{CAT} {DOG} Who sat?", SHORT)
        assert num_entries(corpus) == before + 1 + 3 + 1
        corpus.forget_prefix(corpus.prefixes[1])
        assert num_entries(corpus) == before


def test_chunk_is_computed_when_its_prefix_would_not_end_before_it():
    """A drop-in prompt with a short head: computed, with the reason; with a long one it is read."""
    with fixed(prompt_format=PromptFormat(prefix="Read what follows with care.")) as corpus:
        corpus.add(TEXTS)
        near = corpus.generate(f"Read: {CAT} Who sat?", SHORT)
        assert misses_of(near) == [MissReason.UNPLACED]
        far = [corpus.generate(f"{'Hm, ' * 90} {CAT} Who sat?", SHORT) for _ in range(2)]
        assert [misses_of(each) for each in far] == [
            [MissReason.NOT_STORED],
            [MissReason.OTHER_PREFIX],
        ]


def test_chunks_are_encoded_where_the_first_stands_under_module():
    """They attend nothing, and stand behind the prefix all the same."""
    with fixed(visibility="module") as corpus:
        corpus.add(TEXTS)
        answer = corpus.answer(QUESTIONS[0], 1, config=SHORT)
        assert [use.is_hit for use in chunk_uses(answer)] == [True]
        assert len(corpus.starts(CAT_ID)) == 1


def test_e1_chunk_is_not_exact_under_module_when_it_stands_where_it_was_encoded():
    """It never attended the prefix before it; the exact prefix cache must not take it for text."""
    with fixed(visibility="module", prefix_cache_bytes=1 << 26) as corpus:
        corpus.add(TEXTS)
        answers = [
            corpus.generate(prompt(corpus, CAT), SHORT, reuse=reuse)
            for reuse in (False, True, True, False)
        ]
        assert answers[0].token_ids == answers[3].token_ids
        assert answers[1].token_ids == answers[2].token_ids != answers[0].token_ids
        assert chunk_uses(answers[1])[0].hit_kind is HitKind.COMPOSED


def test_scaffold_is_read_where_it_stands_and_reclaimed_everywhere():
    """Chunks that were encoded together are encoded together again, at another start."""
    with fixed() as corpus:
        corpus.add(TEXTS)
        before = num_entries(corpus)
        corpus.scaffold([CAT_ID, DOG_ID])
        for _ in range(2):
            answer = corpus.generate(prompt(corpus, FISH, CAT, DOG), SHORT)
        assert all(use.is_hit for use in chunk_uses(answer))
        request = corpus.plan(prompt(corpus, FISH, CAT, DOG))
        assert answer.token_ids == reference_ids(corpus.engine, request, 8)
        assert num_entries(corpus) == before + 2
        corpus.unscaffold([CAT_ID, DOG_ID])
        assert num_entries(corpus) == before


def test_batch_of_questions_gives_what_each_gives_alone():
    """Requests of a corpus side by side."""
    with fixed() as corpus:
        corpus.add(TEXTS)
        requests = [request_of(corpus, question, 3) for question in QUESTIONS]
        together = corpus.engine.generate_batch(requests, SHORT)
        for question, answer in zip(QUESTIONS, together, strict=True):
            alone = corpus.answer(question, 3, config=SHORT)
            assert alone.completion.token_ids == answer.token_ids


def test_warmed_chunks_hit_when_they_stand_first():
    """Warming brings what was ingested; other starts are made when they are asked for."""
    with fixed() as corpus:
        corpus.add(TEXTS)
        assert corpus.warm([CAT, DOG]).result() == 2
        assert misses_of(corpus.generate(prompt(corpus, CAT), SHORT)) == [None]


def positions(limit):
    return wrap_model(*tiny_model("gpt2", max_position_embeddings=limit))


def test_chunk_is_refused_with_numbers_when_it_cannot_stand_behind_the_prefix():
    """At the limit it is taken in and can be asked for; one position less and it is refused."""
    with fixed() as corpus:
        corpus.add([CAT])
        (start,) = corpus.starts(CAT_ID)
        needed = start + len(CAT.encode()) + 1
    with opened(loaded=positions(needed)) as corpus:
        corpus.add([CAT])
        assert corpus.starts(CAT_ID) == (start,)
    with opened(loaded=positions(needed - 1)) as corpus:
        refusal = rf"{len(CAT)} tokens.* ends at {needed - 1}.*chunk_tokens.*shorter prefix"
        with pytest.raises(LayoutError, match=refusal):
            corpus.add([CAT])
        assert num_entries(corpus) == 0


def test_document_is_refused_whole_when_a_chunk_of_it_fits_no_prompt():
    """Positions that move count BOS only. What came before it stays; nothing of it is left."""
    limited = wrap_model(*tiny_model("bloom", max_position_embeddings=200))
    with opened(loaded=limited, chunk_tokens=400) as corpus:
        long = " ".join([DOG] * 4)
        with pytest.raises(LayoutError, match=r"'b'.* needs 1 for others.*\(chunk_tokens\)$"):
            corpus.add(named(a=CAT, b=long, c=FISH))
        assert [each.id for each in corpus.documents()] == ["a"]
        assert num_entries(corpus) == 2  # the prefix and the first document's chunk


def test_chunk_is_left_out_when_it_cannot_stand_behind_an_adopted_prefix():
    """No prompt can hold it there; the others are encoded."""
    with fixed() as corpus:
        corpus.add([CAT])
        (start,) = corpus.starts(CAT_ID)
    limit = start + len(CAT) + 1
    with opened(loaded=positions(limit)) as corpus:
        corpus.add([CAT, DOG])
        head = "x" * (limit - len(DOG) - 1)
        assert len(DOG) < len(CAT)
        corpus.adopt_prefix(head).result()
        assert [len(corpus.starts(id_)) for id_ in (CAT_ID, DOG_ID)] == [1, 2]


def test_question_is_refused_with_numbers_when_it_does_not_fit():
    """The plan counts position IDs, gaps of slots included."""
    with opened(
        loaded=positions(300), position_policy="reserved", slot_tokens=SLOT, chunk_tokens=SLOT
    ) as corpus:
        corpus.add(TEXTS)
        corpus.answer(QUESTIONS[0], 1, config=SHORT)
        with pytest.raises(LayoutError, match="the model has 300"):
            corpus.answer(QUESTIONS[0], 3, config=SHORT)
