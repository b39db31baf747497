"""Chunks are encoded behind the corpus's own prefix, and behind those it adopts."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from pc_rag.corpus import PromptFormat
from pc_rag.corpus.prefix_set import MAX_PREFIXES
from pc_rag.corpus.prefixes import longest_prefix_of
from pc_rag.errors import ConfigError, PromptError
from pc_rag.model.chat import ChatMessage
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
    """A former default is served like an adopted prefix; documents go behind both."""
    other = PromptFormat(prefix="", header="Facts:\n")
    with opened(tmp_path) as corpus:
        corpus.add([CAT])
        first = corpus.prefix
    with opened(tmp_path, prompt_format=other) as corpus:
        assert corpus.prefixes == (corpus.prefix, first)
        use = chunk_uses(corpus.answer("cat", 1, config=SHORT))[0]
        assert use.miss_reason is MissReason.OTHER_PREFIX
        assert use.num_encoded_tokens == len(CAT)
        again = chunk_uses(corpus.answer("cat", 1, config=SHORT))[0]
        assert again.hit_kind is HitKind.EXACT
        corpus.add([DOG])
    with opened(tmp_path) as corpus:
        assert corpus.prefix == first
        assert corpus.add([DOG]).num_encoded == 0
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


def test_prefix_leaves_nothing_when_it_is_forgotten(corpus):
    """Its entries leave the store, prompts with it are served from the own prefix again."""
    before = corpus.stats()
    head = "Read this: "
    num_encoded = corpus.adopt_prefix(head).result()
    assert num_encoded == before.catalog.num_chunks
    assert corpus.forget_prefix(head) == num_encoded
    after = corpus.stats()
    assert after.catalog.num_entries == before.catalog.num_entries
    assert after.num_prefixes == 1
    (use,) = corpus.generate(head + CAT, SHORT).metrics.modules
    assert use.miss_reason is MissReason.OTHER_PREFIX
    assert corpus.adopt_prefix(head).result() == num_encoded


def test_own_prefix_stays_when_it_is_asked_to_be_forgotten(corpus):
    """Forgetting names adopted prefixes only."""
    assert corpus.forget_prefix(corpus.prefix) == 0
    assert len(corpus.prefixes) == 1
