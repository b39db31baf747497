"""Chunks are encoded behind the corpus's own prefix, and behind those it adopts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from pc_rag.corpus import PromptFormat
from pc_rag.corpus.prefix_set import MAX_PREFIXES
from pc_rag.corpus.prefixes import longest_prefix_of
from pc_rag.errors import ConfigError, PromptError
from pc_rag.model.conversation import ChatMessage
from pc_rag.types import HitKind, MissReason, Role
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    TEXTS,
    chunk_uses,
    loaded_model,
    opened,
    request_of,
    same_in_both_arms,
)

HEAD = "Use these facts.\n"
PROMPT = f"{HEAD}{CAT}\n{DOG}\nWhat sat?"


@pytest.fixture
def corpus():
    with opened() as corpus:
        corpus.add(TEXTS)
        yield corpus


def uses_of(corpus, prompt=PROMPT):
    return [(use.hit_kind, use.miss_reason) for use in chunk_uses(corpus.generate(prompt, SHORT))]


SERVED = [(HitKind.EXACT, None), (HitKind.COMPOSED, None)]
OTHER = [(HitKind.COMPOSED, MissReason.OTHER_PREFIX)] * 2


def test_longest_prefix_wins_when_several_fit():
    """Of those that the head begins with; empty ones and longer ones do not fit."""
    prefixes = [SimpleNamespace(token_ids=ids) for ids in [(1,), (1, 2), (1, 2, 3), (2,), ()]]
    assert longest_prefix_of((1, 2, 9), prefixes).token_ids == (1, 2)
    assert longest_prefix_of((1, 2), prefixes).token_ids == (1, 2)
    assert longest_prefix_of((1, 2, 3), prefixes).token_ids == (1, 2, 3)
    assert longest_prefix_of((9,), prefixes) is None
    assert longest_prefix_of((), prefixes) is None


def test_first_chunk_is_exact_when_the_head_was_adopted(corpus):
    """Before: placed from behind the own prefix. Afterwards: just as a full prefill."""
    assert uses_of(corpus) == OTHER
    assert corpus.adopt_prefix(HEAD).result(60) == 3
    assert uses_of(corpus) == SERVED
    assert same_in_both_arms(
        lambda reuse: corpus.generate(f"{HEAD}{FISH} Why?", SHORT, reuse=reuse)
    )
    assert corpus.prefixes == (corpus.prefix, HEAD)
    assert corpus.stats().num_prefixes == 2
    own = chunk_uses(corpus.answer("cat", 2, config=SHORT))
    assert [(use.hit_kind, use.miss_reason) for use in own] == SERVED


def test_own_prefix_serves_when_the_adoption_is_not_done(corpus, monkeypatch):
    """Prompts are answered meanwhile, with the remark ``other-prefix``."""
    begun, may_go_on = threading.Event(), threading.Event()
    encode = corpus.engine.source.encode

    def wait(*arguments, **keywords):
        begun.set()
        may_go_on.wait(60)
        return encode(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(corpus.engine.source, "encode", wait)
        adopted = corpus.adopt_prefix(HEAD)
        assert corpus.adopt_prefix(HEAD) is adopted, "asked twice, encoded once"
        assert begun.wait(60)
        assert uses_of(corpus) == OTHER
        may_go_on.set()
        adopted.result(60)
    assert uses_of(corpus) == SERVED


def test_conversation_is_exact_when_its_head_was_adopted(corpus):
    """The last message of the head is cut off where the chunks begin."""
    system = ChatMessage(Role.SYSTEM, "Be brief.")
    corpus.adopt_prefix([system, ChatMessage(Role.USER, "Facts: ")]).result(60)
    prompt = [system, ChatMessage(Role.USER, f"Facts: {CAT} {DOG} What?")]
    assert uses_of(corpus, prompt) == SERVED
    assert corpus.prefixes[1].endswith("Be brief.<|im_end|>\n<|im_start|>user\nFacts: ")


def test_later_documents_are_encoded_behind_adopted_prefixes_too(corpus):
    """A prefix stays complete as the corpus grows."""
    corpus.adopt_prefix(HEAD).result(60)
    report = corpus.add(["A new chunk that tells of a yellow bird in a tree."])
    assert report.num_encoded == 2
    prompt = f"{HEAD}A new chunk that tells of a yellow bird in a tree. What?"
    assert uses_of(corpus, prompt) == [(HitKind.EXACT, None)]


def test_documents_are_complete_when_they_came_during_the_adoption(corpus, monkeypatch):
    """What was published while the rest was encoded is encoded before the adoption ends."""
    new = "A new chunk that tells of a yellow bird in a tree."
    encode_live = corpus._prefixes._encode_live
    calls = []

    def add_meanwhile(prefix):
        num_encoded = encode_live(prefix)
        if not calls:
            corpus.add([new])
        calls.append(num_encoded)
        return num_encoded

    monkeypatch.setattr(corpus._prefixes, "_encode_live", add_meanwhile)
    assert corpus.adopt_prefix(HEAD).result(60) == 4
    assert uses_of(corpus, f"{HEAD}{new} What?") == [(HitKind.EXACT, None)]


def test_adopted_prefix_serves_when_the_corpus_is_opened_again(tmp_path):
    """Nothing is encoded again, and later documents go behind it too."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
        corpus.adopt_prefix(HEAD).result(60)
    with opened(tmp_path) as corpus:
        assert corpus.prefixes == (corpus.prefix, HEAD)
        assert uses_of(corpus) == SERVED
        assert corpus.adopt_prefix(HEAD).result(60) == 0
        assert corpus.prefixes[0] == corpus.prefix != HEAD
    with opened(tmp_path, loaded=loaded_model(seed=1)) as corpus:
        assert corpus.prefixes == (corpus.prefix,), "another model has encoded nothing behind it"


def test_prefix_is_adopted_when_a_former_run_was_cut_off(tmp_path, monkeypatch):
    """Entries that are stored already are noted, and the prefix counts as complete."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
        with monkeypatch.context() as patch:
            patch.setattr(corpus._catalog.entries, "record", lambda entries: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                corpus.adopt_prefix(HEAD).result(60)
        assert corpus.prefixes == (corpus.prefix,)
    with opened(tmp_path) as corpus:
        assert corpus.prefixes == (corpus.prefix,)
        assert corpus.adopt_prefix(HEAD).result(60) == 0
        assert corpus.stats().catalog.num_entries == 6
    with opened(tmp_path) as corpus:
        assert uses_of(corpus) == SERVED


def test_own_prefix_stays_the_own_one_when_it_is_adopted(tmp_path):
    """Asking for what is there already changes nothing, here or in the catalog."""
    with opened(tmp_path) as corpus:
        corpus.add([CAT])
        messages = corpus.prompt_format.messages("", [""])
        head = [messages[0], ChatMessage(Role.USER, corpus.prompt_format.header)]
        assert corpus.adopt_prefix(head).result(60) == 0
        assert corpus.prefixes == (corpus.prefix,)
        assert [each.role for each in corpus._catalog.prefixes.all()] == ["default"]


def test_plain_text_is_another_prefix_when_it_reads_like_control_tokens(corpus):
    """The same characters as plain text are other tokens, and take nothing from the own prefix."""
    looks_alike = corpus.prefix
    corpus.adopt_prefix(looks_alike).result(60)
    assert corpus.prefixes == (looks_alike, looks_alike)
    own = chunk_uses(corpus.answer("cat", 1, config=SHORT))
    assert own[0].hit_kind is HitKind.EXACT
    assert uses_of(corpus, f"{looks_alike}{CAT} Why?") == [(HitKind.EXACT, None)]


def test_prefix_is_refused_when_it_has_no_token(corpus):
    """There is nothing to stand behind."""
    with pytest.raises(PromptError, match="at least one token"):
        corpus.adopt_prefix("")


def test_head_is_learned_from_a_prompt(corpus):
    """What stands before the first chunk; once, and only where a chunk stands."""
    assert corpus.learn_prefix("No chunk stands here.") is None
    assert corpus.learn_prefix(f"{CAT} no head") is None
    assert corpus.learn_prefix(PROMPT).result(60) == 3
    assert uses_of(corpus) == SERVED
    assert corpus.learn_prefix(PROMPT) is None
    own = corpus.prompt_format.messages("why?", [CAT])
    assert corpus.learn_prefix(own) is None


def test_longest_adopted_prefix_serves_when_one_begins_another(corpus):
    """Of two that fit, the one that leaves the first chunk exact."""
    corpus.adopt_prefix("Use ").result(60)
    corpus.adopt_prefix(HEAD).result(60)
    assert uses_of(corpus) == SERVED
    assert uses_of(corpus, f"Use {CAT} {DOG} what?") == SERVED
    assert uses_of(corpus, f"Use those {CAT} {DOG} what?") == OTHER


def test_both_formats_answer_exactly_when_they_share_a_folder(tmp_path):
    """A former default is served from its entries; later documents go behind the own one only."""
    other = PromptFormat(prefix="", header="Facts:\n")
    with opened(tmp_path) as corpus:
        corpus.add([CAT])
        first = corpus.prefix
    with opened(tmp_path, prompt_format=other) as corpus:
        assert corpus.prefixes == (corpus.prefix,)
        assert [each.record.text for each in corpus._prefixes.served] == [corpus.prefix, first]
        use = chunk_uses(corpus.answer("cat", 1, config=SHORT))[0]
        assert use.miss_reason is MissReason.OTHER_PREFIX
        assert use.num_encoded_tokens == len(CAT)
        again = chunk_uses(corpus.answer("cat", 1, config=SHORT))[0]
        assert again.hit_kind is HitKind.EXACT
        assert corpus.add([DOG]).num_encoded == 1
    with opened(tmp_path) as corpus:
        assert corpus.prefix == first
        assert corpus.add([CAT]).num_encoded == 0
        assert corpus.add([DOG]).num_encoded == 1
        assert all(use.is_hit for use in chunk_uses(corpus.answer("dog", 2, config=SHORT)))


def test_own_prefix_is_the_one_just_recorded_when_two_formats_open_at_once(tmp_path):
    """Another process's default does not become ours."""
    other = PromptFormat(prefix="", header="Facts:\n")
    with opened(tmp_path) as first, opened(tmp_path / "b", prompt_format=other) as second:
        assert first.prefix != second.prefix
    with opened(tmp_path) as first:
        with opened(tmp_path, prompt_format=other) as second:
            assert second.prefix != first.prefix
            assert second.prefix.endswith("Facts:\n")
        assert request_of(first, "why?", 0).plan.num_tokens


def test_adopting_serves_the_head_when_modules_see_only_themselves():
    """Under visibility ``module`` only the prefix itself is stored; chunks are as they were."""
    with opened(visibility="module") as corpus:
        corpus.add(TEXTS)
        assert corpus.adopt_prefix(HEAD).result(60) == 0
        completion = corpus.generate(PROMPT, SHORT)
        assert completion.metrics.modules[0].label == "(prefix)"
        assert [use.hit_kind for use in chunk_uses(completion)] == [HitKind.COMPOSED] * 2


def test_prefixes_are_limited_when_many_heads_come(corpus):
    """Each prefix costs the corpus once more, so a fifth is refused by name and not learned."""
    for number in range(MAX_PREFIXES - 1):
        corpus.adopt_prefix(f"Head number {number}: ").result()
    with pytest.raises(ConfigError, match="Head number 0"):
        corpus.adopt_prefix("One too many: ")
    assert corpus.learn_prefix(f"Yet another head: {CAT}") is None
    assert len(corpus.prefixes) == MAX_PREFIXES


def test_prompt_is_not_read_when_there_is_no_room_to_learn(corpus):
    """Adapters ask after every request, so a full corpus answers at once."""
    for number in range(3):
        corpus.adopt_prefix(f"head {number}: ").result(60)
    assert corpus.learn_prefix(object()) is None
    corpus.forget_prefix("head 0: ")
    assert corpus.learn_prefix(f"another head: {CAT}").result(60) == 3


def test_prefix_leaves_nothing_when_it_is_forgotten(corpus):
    """Its entries leave the store, prompts with it are served from the own prefix again."""
    before = corpus.stats()
    head = "Read this: "
    num_encoded = corpus.adopt_prefix(head).result()
    assert num_encoded == before.catalog.num_chunks
    assert corpus.forget_prefix(head) == num_encoded + 1, "the prefix itself too"
    after = corpus.stats()
    assert after.store[-1].num_entries == before.store[-1].num_entries
    assert after.catalog.num_entries == before.catalog.num_entries
    assert after.num_prefixes == 1
    (use,) = corpus.generate(head + CAT, SHORT).metrics.modules
    assert use.miss_reason is MissReason.OTHER_PREFIX
    assert corpus.adopt_prefix(head).result() == num_encoded


def broken(*_arguments, **_keywords):
    raise RuntimeError("the encoder broke")


BIRD = "A new chunk that tells of a yellow bird in a tree."


@pytest.mark.parametrize("when", ["before", "after"])
def test_documents_are_published_when_a_prefix_is_forgotten_meanwhile(corpus, monkeypatch, when):
    """Without what was encoded behind it, wherever between listing and recording it went."""
    before = corpus.stats()
    corpus.adopt_prefix(HEAD).result(60)
    encode = corpus.engine.source.encode

    def forget_meanwhile(*arguments, **keywords):
        if when == "before":
            corpus.forget_prefix(HEAD)
        yield from encode(*arguments, **keywords)
        if when == "after":
            corpus.forget_prefix(HEAD)

    with monkeypatch.context() as patch:
        patch.setattr(corpus.engine.source, "encode", forget_meanwhile)
        assert corpus.add([BIRD]).num_added == 1
    after = corpus.stats()
    assert corpus.prefixes == (corpus.prefix,)
    assert after.catalog.num_entries == before.catalog.num_entries + 1
    assert after.store[-1].num_entries == before.store[-1].num_entries + 1
    assert uses_of(corpus, f"{HEAD}{BIRD} What?") == [OTHER[0]]


def test_documents_are_complete_when_an_adoption_ends_during_their_ingest(corpus, monkeypatch):
    """Also those whose prefixes were listed before it ended, and that were published after."""
    publish = corpus._ingest._publish
    encode_live = corpus._prefixes._encode_live
    num_calls = []

    def adopt_first(*arguments):
        corpus.adopt_prefix(HEAD).result(60)
        return publish(*arguments)

    def count(prefix):
        num_calls.append(prefix)
        return encode_live(prefix)

    monkeypatch.setattr(corpus._prefixes, "_encode_live", count)
    monkeypatch.setattr(corpus._ingest, "_publish", adopt_first)
    assert corpus.add([BIRD]).num_encoded == 2
    assert len(num_calls) == 1, "the adoption had ended"
    assert uses_of(corpus, f"{HEAD}{BIRD} What?") == [(HitKind.EXACT, None)]
    assert corpus.stats().catalog.num_entries == 8


def test_prefix_is_not_adopted_when_it_was_forgotten_and_failed_afterwards(tmp_path, monkeypatch):
    """What a former adoption had finished counts no more."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
        corpus.adopt_prefix(HEAD).result(60)
        corpus.forget_prefix(HEAD)
        with monkeypatch.context() as patch:
            patch.setattr(corpus.engine.source, "encode", broken)
            with pytest.raises(RuntimeError, match="broke"):
                corpus.adopt_prefix(HEAD).result(60)
    with opened(tmp_path) as corpus:
        assert corpus.prefixes == (corpus.prefix,)


@pytest.mark.parametrize(
    "settings", [{"tenant": "b"}, {"storage_dtype": "float16"}, {"visibility": "module"}]
)
def test_prefix_is_not_adopted_when_only_other_entries_were_encoded(tmp_path, settings):
    """Those of another tenant, numeric type or visibility serve nobody else."""
    with opened(tmp_path) as corpus:
        corpus.add(TEXTS)
        corpus.adopt_prefix(HEAD).result(60)
    with opened(tmp_path, **settings) as corpus:
        assert corpus.prefixes == (corpus.prefix,)
    with opened(tmp_path) as corpus:
        assert corpus.prefixes == (corpus.prefix, HEAD)


@pytest.fixture
def blocked(corpus, monkeypatch):
    """A corpus whose adoptions begin and do not go on; yields it with the event that lets them."""
    begun, may_go_on = threading.Event(), threading.Event()
    encode_live = corpus._prefixes._encode_live

    def wait(prefix):
        begun.set()
        may_go_on.wait(60)
        return encode_live(prefix)

    monkeypatch.setattr(corpus._prefixes, "_encode_live", wait)
    yield corpus, begun, may_go_on
    may_go_on.set()


def test_pending_adoption_is_returned_when_it_took_the_last_place(blocked):
    """Who asks for it again gets it; who asks for another one is told what to forget."""
    corpus, _, may_go_on = blocked
    heads = [f"Head number {number}: " for number in range(MAX_PREFIXES - 1)]
    pending = [corpus.adopt_prefix(head) for head in heads]
    assert [corpus.adopt_prefix(head) for head in heads] == pending
    assert corpus.learn_prefix(f"{heads[-1]}{CAT}") is pending[-1]
    with pytest.raises(ConfigError, match="Head number 2"):
        corpus.adopt_prefix("One too many: ")
    assert corpus.learn_prefix(f"Yet another head: {CAT}") is None
    may_go_on.set()
    assert [each.result(60) for each in pending] == [3, 3, 3]
    assert corpus.prefixes[1:] == tuple(heads)


def test_adoption_ends_first_when_it_is_forgotten_meanwhile(blocked):
    """One that has not begun is cancelled, and its place is free."""
    corpus, begun, may_go_on = blocked
    running, waiting = corpus.adopt_prefix(HEAD), corpus.adopt_prefix("Read this: ")
    assert begun.wait(60)
    assert corpus.forget_prefix("Read this: ") == 0
    assert waiting.cancelled()
    again = corpus.adopt_prefix("Read this: ")
    assert again is not waiting
    may_go_on.set()
    assert corpus.forget_prefix(HEAD) == 4
    assert running.result(60) == again.result(60) == 3
    assert corpus.prefixes == (corpus.prefix, "Read this: ")


def test_nobody_is_refused_when_many_threads_learn_at_once(corpus):
    """Room is looked for and taken in one step: ``None`` is promised where there is none."""
    with ThreadPoolExecutor(8) as threads:
        heads = [f"Head number {number}: {CAT}" for number in range(24)]
        learned = list(threads.map(corpus.learn_prefix, heads))
    assert sum(each is not None for each in learned) == MAX_PREFIXES - 1


def test_former_defaults_cost_an_ingest_nothing_when_there_are_many(tmp_path):
    """New chunks go behind the own prefix; behind a former one when they are asked for."""
    for number in range(MAX_PREFIXES + 2):
        prompt_format = PromptFormat(header=f"Facts {number}:\n")
        with opened(tmp_path, prompt_format=prompt_format) as corpus:
            assert corpus.add([CAT, DOG]).num_encoded == 2
            assert corpus.prefixes == (corpus.prefix,)
            former = corpus.prompt_format.messages("why?", [CAT])
    with opened(tmp_path) as corpus:
        corpus.add([CAT, DOG, FISH])
        assert corpus.adopt_prefix(HEAD).result(60) == 3, "former ones leave room"
        assert uses_of(corpus, former) == [(HitKind.EXACT, None)]
        before = corpus.stats().store[-1].num_entries
        # FISH is encoded behind the former one by the request, and noted nowhere.
        (use,) = chunk_uses(corpus.generate(prompt_format.messages("why?", [FISH]), SHORT))
        assert use.num_encoded_tokens == len(FISH)
        text = corpus._prefixes.served[-1].record.text
        assert "Facts 5" in text
        assert corpus.forget_prefix(text) == 4
        assert corpus.stats().store[-1].num_entries == before - 3
        assert uses_of(corpus, former) == [OTHER[0]]


def test_former_default_is_encoded_behind_when_it_is_adopted(tmp_path):
    """Then it is like any adopted one, also after opening again."""
    with opened(tmp_path, prompt_format=PromptFormat(header="Facts:\n")) as corpus:
        corpus.add([CAT])
        messages = corpus.prompt_format.messages("", [""])
        head = [messages[0], ChatMessage(Role.USER, "Facts:\n")]
    for _ in range(2):
        with opened(tmp_path) as corpus:
            corpus.add([CAT, DOG])
            assert corpus.adopt_prefix(head).result(60) in (0, 1)
            assert len(corpus.prefixes) == len(corpus._prefixes.served) == 2
            assert corpus.prefixes[1].endswith("Facts:\n")


def test_prefix_is_forgotten_when_its_adoption_failed_half_way(corpus, monkeypatch):
    """It is in the catalog though no prompt is served from it; its entries go too."""
    before = corpus.stats()
    encode = corpus.engine.source.encode

    def break_half_way(*arguments, **keywords):
        yield next(iter(encode(*arguments, **keywords)))
        raise RuntimeError("the encoder broke")

    with monkeypatch.context() as patch:
        patch.setattr(corpus.engine.source, "encode", break_half_way)
        with pytest.raises(RuntimeError, match="broke"):
            corpus.adopt_prefix(HEAD).result(60)
    assert corpus.stats().store[-1].num_entries > before.store[-1].num_entries
    assert corpus.forget_prefix(HEAD) > 0
    after = corpus.stats()
    assert after.store[-1].num_entries == before.store[-1].num_entries
    assert after.catalog.num_prefixes == before.catalog.num_prefixes


def test_chunks_stay_when_a_prefix_is_forgotten_that_they_do_not_see():
    """Under visibility ``module`` the chunks' entries belong to every prefix."""
    with opened(visibility="module") as corpus:
        corpus.add(TEXTS)
        corpus.adopt_prefix(HEAD).result(60)
        corpus.generate(PROMPT, SHORT)
        assert corpus.forget_prefix(HEAD) == 1
        assert all(use.is_hit for use in chunk_uses(corpus.answer("cat", 2, config=SHORT)))


def test_conversation_is_refused_as_a_head_when_it_is_empty(corpus):
    """Said as for a text without a token, and with what to pass."""
    with pytest.raises(PromptError, match="last is cut off"):
        corpus.adopt_prefix([])


def test_own_prefix_stays_when_it_is_asked_to_be_forgotten(corpus):
    """Forgetting names adopted prefixes only."""
    assert corpus.forget_prefix(corpus.prefix) == 0
    assert len(corpus.prefixes) == 1
