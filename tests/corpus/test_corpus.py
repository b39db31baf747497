"""Documents in, answers out: the corpus as its users see it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from pc_rag.corpus import Corpus, Document, PromptFormat
from pc_rag.engine import PromptCache
from pc_rag.errors import ConfigError, MissingDependencyError, ModelError, StoreError
from pc_rag.layout.plan import Cached
from pc_rag.model.assembly import assemble, fresh_tokens
from pc_rag.model.builtin import find_default_gguf
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.sampling import GenerationConfig
from pc_rag.types import HitKind, MissReason, Role, Tier
from tests.support.corpora import (
    CAT,
    DOG,
    EMBEDDING,
    FISH,
    SHORT,
    TEXTS,
    chunk_uses,
    loaded_model,
    named,
    opened,
    request_of,
    same_in_both_arms,
    tiny_engine,
)
from tests.support.processes import run_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add(named(cat=CAT, dog=DOG, fish=FISH))
        yield corpus


def logits_of(engine, plan, recipes):
    """Logits behind a plan, by the engine's own source and runner."""
    with engine.source.acquire([part.key for part in plan.cached], recipes) as acquired:
        view = assemble(plan, acquired.entries, engine.runner, num_new_tokens=1)
        return engine.runner.prefill(view, *fresh_tokens(plan))


# -- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_e1_answer_from_one_chunk_equals_full_prefill(family):
    """E1 through the corpus: prefix, first chunk and question give the uncached arm's logits."""
    with opened(loaded=loaded_model(family)) as corpus:
        corpus.add(TEXTS)
        request = request_of(corpus, "what did the dog do?", 1)
        assert request.plan.num_cached_tokens > 150
        cached = logits_of(corpus.engine, request.plan, request.recipes)
        full = logits_of(corpus.engine, request.plan.without_reuse(), {})
        torch.testing.assert_close(cached, full, atol=1e-4, rtol=0.0)
        assert same_in_both_arms(
            lambda reuse: corpus.answer("what did the dog do?", 1, config=SHORT, reuse=reuse)
        )


def test_answer_is_the_same_when_it_is_asked_twice(corpus):
    """E5: a request changes no entry, whatever was generated in between."""
    first = corpus.answer("the dog", 3, config=SHORT)
    corpus.answer("silver fish", 2, config=SHORT)
    second = corpus.answer("the dog", 3, config=SHORT)
    assert first.completion.token_ids == second.completion.token_ids
    assert first.chunks == second.chunks
    assert corpus.engine.store.check_integrity().damaged == ()


def test_answer_is_the_same_when_it_is_streamed(corpus):
    """``answer`` is the joined stream."""
    answer = corpus.answer("the dog", 2, config=SHORT)
    stream = corpus.stream("the dog", 2, config=SHORT)
    assert "".join(stream) == answer.text == stream.stream.completion.text
    assert stream.chunks == answer.chunks


def test_lost_entry_is_encoded_then_and_there_when_it_is_asked_for(corpus):
    """Pitfall 4: A and C from the store, B computed and said so, and the answer is the same."""
    before = corpus.answer("the dog in the field", 3, config=SHORT)
    plan = request_of(corpus, "the dog in the field", 3).plan
    lost = [part for part in plan.cached if part.label != "(prefix)"][1]
    assert corpus.engine.store.remove(lost.key)
    after = corpus.answer("the dog in the field", 3, config=SHORT)
    first, second, third = chunk_uses(after)
    assert (first.is_hit, second.is_hit, third.is_hit) == (True, False, True)
    assert second.miss_reason is MissReason.NOT_STORED
    assert second.num_encoded_tokens == len(after.chunks[1].text)
    assert after.completion.token_ids == before.completion.token_ids
    assert all(
        use.is_hit for use in chunk_uses(corpus.answer("the dog in the field", 3, config=SHORT))
    )


def test_every_request_gets_its_own_chunks_when_sets_change(corpus):
    """Pitfall 5: no request is served a former one's keys."""
    for question, k in [("cat", 1), ("silver fish swim", 2), ("dog barked", 1), ("cat", 2)]:
        answer = corpus.answer(question, k, config=SHORT)
        with opened() as fresh:
            fresh.add(TEXTS)
            expected = fresh.answer(question, k, config=SHORT)
        assert answer.completion.token_ids == expected.completion.token_ids
        assert [chunk.text for chunk in answer.chunks] == [c.text for c in expected.chunks]


def test_a_text_is_held_when_it_is_a_chunk_of_a_live_document(corpus):
    """Whitespace at its ends aside; parts are none, nor are chunks of removed documents."""
    assert corpus.holds(f"\n{CAT} ")
    assert not corpus.holds(CAT[:-1])
    assert not corpus.holds("")
    corpus.remove("cat")
    assert not corpus.holds(CAT)


def test_answer_is_given_when_the_corpus_is_empty():
    """No chunk, no error: the model is asked all the same."""
    with opened() as corpus:
        answer = corpus.answer("why?", 4, config=SHORT)
        assert answer.chunks == ()
        assert answer.completion.metrics.num_generated_tokens
        assert corpus.search("why?") == ()
        assert corpus.gc().num_chunks == 0


def test_all_chunks_are_read_when_more_are_asked_for(corpus):
    """The number asked for is a limit."""
    assert len(corpus.answer("dog", 50, config=SHORT).chunks) == 3


@pytest.mark.parametrize("question", ["{question} {0} {x}", "a\x00b", "", "\ud83d\ude42".encode(
    "utf-16", "surrogatepass").decode("utf-16")])  # fmt: skip
def test_question_is_taken_as_it_is_when_it_looks_odd(corpus, question):
    """Braces, control characters and emoji are text."""
    request = request_of(corpus, question, 1)
    text = corpus.engine.loaded.tokenizer.decode(request.plan.token_ids)
    assert f"Question: {question}" in text
    assert same_in_both_arms(lambda reuse: corpus.answer(question, 1, config=SHORT, reuse=reuse))


def test_filter_is_kept_when_a_question_is_answered():
    """Pitfall 37: the same text under two tenants; only a's document is named."""
    with opened() as corpus:
        corpus.add(
            [
                Document(CAT, source="a", metadata={"tenant": "a"}),
                Document(CAT, source="b", metadata={"tenant": "b"}),
                Document(DOG, source="b", metadata={"tenant": "b"}),
            ]
        )
        answer = corpus.answer("dog", 5, where={"tenant": "a"}, config=SHORT)
        assert [(chunk.text, chunk.sources) for chunk in answer.chunks] == [(CAT, ("a",))]
        assert answer.chunks[0].metadata == {"tenant": "a"}


def test_parts_of_ttft_are_told_when_a_question_is_answered(corpus):
    """Retrieval is in TTFT, and in its own part; planning too."""
    metrics = corpus.answer("dog", 2, config=SHORT).completion.metrics
    assert metrics.retrieve_seconds > 0
    assert metrics.plan_seconds > 0
    parts = metrics.retrieve_seconds + metrics.plan_seconds + metrics.prefill_seconds
    assert parts <= metrics.ttft_seconds
    assert metrics.template == "corpus"
    assert corpus.generate(f"x {CAT}", SHORT).metrics.retrieve_seconds == 0


def test_plan_does_not_grow_with_the_chunks_when_they_are_stored(corpus, monkeypatch):
    """A stored chunk is not tokenised again to be asked about."""
    seen = []
    tokenizer = corpus.engine.loaded.tokenizer
    encode = type(tokenizer).encode_text

    def record(self, text, **options):
        seen.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode_text", record)
    request_of(corpus, "dog", 3)
    assert not [text for text in seen if any(chunk in text for chunk in TEXTS)]


# -- prompts of others ------------------------------------------------------------------------

HEADER = "file_path: notes/{name}.md\ncreated: 2024-01-01\n\n"
PROMPTS = {
    "headers": "".join(f"{HEADER.format(name=i)}{text}\n\n" for i, text in enumerate(TEXTS)),
    "separator": "\n-----\n".join(TEXTS),
    "no separator": "".join(TEXTS),
    "document prompt": "\n".join(f"<doc id='{i}'>{text}</doc>" for i, text in enumerate(TEXTS)),
    "numbered": "\n".join(f"[{i}] {text}" for i, text in enumerate(TEXTS)),
}


@pytest.mark.parametrize("context", PROMPTS.values(), ids=PROMPTS.keys())
@pytest.mark.parametrize("kind", ["text", "user", "system"])
def test_chunks_are_recognised_whatever_surrounds_them(corpus, context, kind):
    """Pitfalls 35 and 36: documents as plain text, other headers, separators and templates."""
    prompt = {
        "text": f"Answer from the context.\n{context}\nQ: why?\nA:",
        "user": [ChatMessage(Role.USER, f"Context:\n{context}\nQ: why?")],
        "system": [ChatMessage(Role.SYSTEM, context), ChatMessage(Role.USER, "why?")],
    }[kind]
    completion = corpus.generate(prompt, SHORT)
    assert all(use.is_hit for use in chunk_uses(completion))
    assert len(chunk_uses(completion)) == 3
    assert completion.metrics.num_cached_tokens >= sum(map(len, TEXTS))
    expected = corpus.engine.generate(prompt, SHORT)
    assert corpus.generate(prompt, SHORT, reuse=False).token_ids == expected.token_ids


def test_chunk_is_no_hit_when_the_prompt_cut_it(corpus):
    """Pitfall 38: half a chunk is text of the prompt; the output is right."""
    prompt = f"Context: {CAT[:40]}\n---\n{CAT[40:]}\n{DOG}\nWhy?"
    completion = corpus.generate(prompt, SHORT)
    (use,) = chunk_uses(completion)
    assert (use.num_tokens, use.is_hit) == (len(DOG), True)
    plan = corpus.plan(prompt).plan
    assert plan.token_ids == corpus.engine.plan(prompt).plan.token_ids
    assert [p.token_ids for p in plan.cached] == [tuple(DOG.encode())]


# -- what outlives the process ----------------------------------------------------------------

RESTART = """
import json, sys
from pathlib import Path
from tests.support.corpora import TEXTS, SHORT, chunk_uses, opened

with opened(Path(sys.argv[1])) as corpus:
    added = corpus.add(TEXTS)
    answer = corpus.answer("the dog in the field", 3, config=SHORT)
    print(json.dumps({
        "encoded": added.num_encoded,
        "hash": hash("x"),
        "hits": [use.is_hit and use.tier for use in chunk_uses(answer)],
        "kinds": [use.hit_kind for use in chunk_uses(answer)],
        "tokens": answer.completion.token_ids,
    }))
"""


def test_all_chunks_hit_when_a_new_process_with_another_hash_seed_asks(tmp_path):
    """Pitfall 43: keys come from content, and everything needed is on disk."""
    first = run_script(RESTART, tmp_path, seed="1")
    second = run_script(RESTART, tmp_path, seed="2")
    assert first["hash"] != second["hash"]
    assert (first["encoded"], second["encoded"]) == (3, 0)
    assert second["hits"] == [Tier.DISK] * 3
    assert second["kinds"] == [HitKind.EXACT, HitKind.COMPOSED, HitKind.COMPOSED]
    assert first["tokens"] == second["tokens"]


def test_another_model_gets_no_hits_but_right_answers(tmp_path):
    """Pitfall 3 and E6: same shapes, other weights, one folder."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
    with opened(tmp_path, loaded=loaded_model(seed=1)) as other:
        first = other.answer("dog", 1, config=SHORT)
        (use,) = chunk_uses(first)
        assert use.miss_reason is MissReason.FINGERPRINT
        uncached = other.answer("dog", 1, config=SHORT, reuse=False)
        assert first.completion.token_ids == uncached.completion.token_ids
        assert chunk_uses(other.answer("dog", 1, config=SHORT))[0].is_hit
        assert other.add(TEXTS).num_encoded == 2
    with opened(tmp_path) as corpus:
        assert all(use.is_hit for use in chunk_uses(corpus.answer("dog", 3, config=SHORT)))


def test_another_tokenizer_makes_its_own_tokens_when_it_shares_the_folder(tmp_path):
    """Token ids belong to a tokenizer: a model with BOS has another one."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
    with opened(tmp_path, loaded=loaded_model(add_bos=True)) as other:
        ids = request_of(other, "a dog barked at every passing train", 1).plan.token_ids
        assert DOG in other.engine.loaded.tokenizer.decode(ids)
        assert same_in_both_arms(lambda reuse: other.answer("dog", 1, config=SHORT, reuse=reuse))
        assert other.add(TEXTS).num_unchanged == 3


def test_changes_are_seen_when_another_corpus_makes_them(tmp_path):
    """Two corpora on one folder: what one adds and removes, the other finds and misses."""
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.add(named(cat=CAT))
        assert [chunk.text for chunk in two.search("cat")] == [CAT]
        assert chunk_uses(two.answer("cat", 1, config=SHORT))[0].is_hit
        two.add(named(dog=DOG))
        assert {chunk.text for chunk in one.search("dog")} == {CAT, DOG}
        assert len(chunk_uses(one.generate(f"x {CAT} {DOG} y", SHORT))) == 2
        assert two.remove("cat")
        assert [chunk.text for chunk in one.search("cat")] == [DOG]
        assert len(chunk_uses(one.generate(f"x {CAT} {DOG} y", SHORT))) == 1
        two.gc()
        assert one.stats().catalog.num_tombstones == 0
        assert one.answer("dog", 4, config=SHORT).completion.token_ids


def test_folder_is_removed_when_a_temporary_corpus_is_closed():
    """A corpus without a folder leaves nothing."""
    with opened() as corpus:
        corpus.add([CAT])
        folder = corpus._catalog._database.path.parent
        assert folder.is_dir()
    assert not folder.exists()
    corpus.close()


def test_corpus_can_be_closed_twice(tmp_path):
    """And says so when it is used afterwards; the engine is lent and stays open."""
    with tiny_engine() as engine:
        corpus = Corpus(engine, tmp_path, embedding=EMBEDDING)
        corpus.add([CAT])
        corpus.close()
        corpus.close()
        with pytest.raises(StoreError, match="closed"):
            corpus.answer("cat")
        with pytest.raises(StoreError, match="closed"):
            corpus.adopt_prefix("x")
        assert engine.generate("hello", SHORT).token_ids


# -- settings ---------------------------------------------------------------------------------

RESERVED = {"position_policy": "reserved", "slot_tokens": 80}


def test_answers_equal_packed_ones_when_one_chunk_stands_in_its_slot():
    """``reserved`` end to end: the first slot begins where the prefix ends, so it is exact."""
    with opened(**RESERVED) as corpus:
        corpus.add(TEXTS)
        answer = corpus.answer("dog", 1, config=SHORT)
        assert chunk_uses(answer)[0].hit_kind is HitKind.EXACT
        assert same_in_both_arms(lambda reuse: corpus.answer("dog", 1, config=SHORT, reuse=reuse))
        assert [u.is_hit for u in chunk_uses(corpus.answer("dog", 3, config=SHORT))] == [True] * 3


@pytest.mark.parametrize(
    ("first", "second"),
    [(RESERVED, RESERVED | {"slot_tokens": 100}), (RESERVED, {}), ({}, RESERVED)],
    ids=["longer", "none", "some"],
)
def test_corpus_is_refused_when_its_slots_have_another_length(tmp_path, first, second):
    """The slot length belongs to the corpus."""
    with opened(tmp_path, **first) as corpus:
        corpus.add([CAT])
    with tiny_engine(**second) as engine, pytest.raises(ConfigError, match="slot_tokens="):
        Corpus(engine, tmp_path / "catalog", embedding=EMBEDDING)
    with opened(tmp_path, **first) as corpus:
        assert chunk_uses(corpus.answer("cat", 1, config=SHORT))[0].is_hit


def test_answers_are_right_when_modules_see_only_themselves():
    """Visibility ``module``: every chunk is composed and served."""
    with opened(visibility="module") as corpus:
        corpus.add(TEXTS)
        uses = chunk_uses(corpus.answer("dog", 3, config=SHORT))
        assert [use.hit_kind for use in uses] == [HitKind.COMPOSED] * 3
        assert corpus.add(TEXTS).num_encoded == 0


@pytest.mark.parametrize("chunk_tokens", [0, -3])
def test_corpus_is_refused_when_chunks_could_hold_nothing(chunk_tokens):
    """A given zero is not the default."""
    with tiny_engine() as engine, pytest.raises(ConfigError, match="at least 1 token"):
        Corpus(engine, embedding=EMBEDDING, chunk_tokens=chunk_tokens)


def test_corpus_is_refused_when_its_embedding_has_no_name():
    """Before a document is encoded, not after all are."""
    with tiny_engine() as engine, pytest.raises(ConfigError, match="embedder_id"):
        Corpus(engine, embedding=lambda texts: [[1.0]] * len(texts))


def test_documents_are_taken_in_when_there_is_no_embedder(monkeypatch):
    """Recognition needs none; only a search says what to install."""

    def missing():
        raise MissingDependencyError("the default embedder", "embeddings")

    monkeypatch.setattr("pc_rag.corpus.embedding.default_embedder", missing)
    with tiny_engine() as engine, Corpus(engine) as corpus:
        corpus.add([CAT])
        assert chunk_uses(corpus.generate(f"x {CAT} y", SHORT))[0].is_hit
        with pytest.raises(MissingDependencyError):
            corpus.search("cat")


def test_stats_count_what_is_there(corpus):
    """Documents, chunks, tokens, entries and bytes."""
    stats = corpus.stats()
    num_tokens = sum(map(len, TEXTS))
    assert (stats.catalog.num_documents, stats.catalog.num_chunks) == (3, 3)
    assert (stats.catalog.num_tokens, stats.catalog.num_entries) == (num_tokens, 3)
    assert stats.catalog.entry_bytes == num_tokens * stats.bytes_per_token
    assert stats.store[0].num_entries == 4, "the chunks and the prefix"
    assert (stats.num_prefixes, stats.bytes_per_token) == (1, 2 * 3 * 2 * 16 * 4)
    assert corpus.engine.stats is not None


def test_prefix_cache_and_entries_compose_when_both_are_on():
    """The same question again reuses what was computed, and its chunks are hits still."""
    with opened(prefix_cache_bytes=10**8) as corpus:
        corpus.add(TEXTS)
        first = corpus.answer("dog", 2, config=SHORT)
        second = corpus.answer("dog", 2, config=SHORT)
        assert second.completion.token_ids == first.completion.token_ids
        assert second.completion.metrics.num_reused_tokens > 0
        assert all(use.is_hit for use in chunk_uses(second))


# -- threads ----------------------------------------------------------------------------------


def test_answers_equal_serial_ones_when_threads_add_meanwhile():
    """Pitfall 27: filters keep each thread's chunks apart, and nothing is lost."""
    texts = {f"t{i}": [f"Fact {j} of thread {i}: {t}" for j, t in enumerate(TEXTS)]
             for i in range(4)}  # fmt: skip
    documents = {
        name: [Document(text, metadata={"thread": name}) for text in own]
        for name, own in texts.items()
    }

    def ask(corpus, name):
        return corpus.answer("fact", 3, where={"thread": name}, config=SHORT).completion.token_ids

    with opened() as serial:
        serial.add(document for own in documents.values() for document in own)
        expected = {name: ask(serial, name) for name in texts}
    results, errors = {}, []

    def work(corpus, name):
        try:
            for document in documents[name]:
                corpus.add([document])
                corpus.answer("fact", 2, config=GenerationConfig(max_new_tokens=2))
            results[name] = ask(corpus, name)
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    with opened() as corpus:
        threads = [threading.Thread(target=work, args=(corpus, name)) for name in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []
        assert results == expected
        assert corpus.stats().catalog.num_chunks == 12


# -- a real model -----------------------------------------------------------------------------


@pytest.mark.slow
def test_e1_answer_equals_full_prefill_on_smollm2():
    """E1 on SmolLM2: prefix, one retrieved chunk, question; float32, logits to atol 1e-3."""
    try:
        find_default_gguf()
    except (ModelError, MissingDependencyError) as error:
        pytest.skip(f"SmolLM2 is not installed: {error}")
    with (
        PromptCache.from_pretrained("smollm2", dtype="float32", device="cpu") as engine,
        Corpus(engine, embedding=EMBEDDING, prompt_format=PromptFormat()) as corpus,
    ):
        corpus.add(TEXTS)
        question = "Where did the cat sit?"
        config = GenerationConfig(max_new_tokens=24)
        request = request_of(corpus, question, 1)
        assert [part.hit_kind for part in request.plan.parts if isinstance(part, Cached)] == [
            HitKind.EXACT, HitKind.EXACT,
        ]  # fmt: skip
        cached = logits_of(engine, request.plan, request.recipes)
        full = logits_of(engine, request.plan.without_reuse(), {})
        torch.testing.assert_close(cached, full, atol=1e-3, rtol=0.0)
        answer = corpus.answer(question, 1, config=config)
        uncached = corpus.answer(question, 1, config=config, reuse=False)
        assert answer.completion.metrics.num_cache_creation_tokens == 0
        assert answer.completion.token_ids == uncached.completion.token_ids
        assert "mat" in answer.text


def test_nothing_is_left_when_a_removed_document_was_asked_by_another_model(tmp_path):
    """What a request of another model stored on demand is reclaimed too, by whoever collects."""
    folder = tmp_path / "corpus"
    with opened(folder) as corpus:
        corpus.add([Document(CAT, id="cat")])
    with opened(folder, loaded=loaded_model(seed=1)) as other:
        (use,) = chunk_uses(other.answer("cat", 1, config=SHORT))
        assert use.num_encoded_tokens
    with opened(folder) as corpus:
        corpus.remove("cat")
        assert corpus.gc().num_entries == 2
        assert corpus.stats().catalog.num_entries == 0


# -- chunks that are retrieved elsewhere --------------------------------------------------------


def test_chunks_are_recognised_when_they_are_retrieved_elsewhere(monkeypatch):
    """Nothing is embedded, and no embedder is made; the refusal says what to do."""
    monkeypatch.setattr("pc_rag.corpus.embedding.default_embedder", None)
    with opened(has_retrieval=False) as corpus:
        corpus.add(named(cat=CAT, dog=DOG))
        corpus.remove("dog")
        uses = chunk_uses(corpus.generate(f"x {CAT} {DOG} y", SHORT))
        assert [use.is_hit for use in uses] == [True]
        for ask in (corpus.search, corpus.answer, corpus.stream):
            for k in (0, 1):
                with pytest.raises(ConfigError, match="has_retrieval=True"):
                    ask("cat", k)


def test_chunks_are_found_when_the_corpus_is_opened_with_retrieval_later(tmp_path):
    """What was not embedded then is embedded now."""
    with opened(tmp_path, has_retrieval=False) as corpus:
        corpus.add(TEXTS)
    with opened(tmp_path) as corpus:
        assert corpus.search("the dog barked", 1)[0].text == DOG


def test_corpus_is_refused_when_it_is_to_embed_without_retrieval():
    """The two contradict each other."""
    with tiny_engine() as engine, pytest.raises(ConfigError, match="has_retrieval=False"):
        Corpus(engine, embedding=EMBEDDING, has_retrieval=False)
