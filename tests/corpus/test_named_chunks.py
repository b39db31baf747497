"""Chunks that a message names are found where they stand, however short; others are recognised."""

from __future__ import annotations

import pytest

from pc_rag.corpus import Document, chunk_id_of
from pc_rag.corpus.planning import InOrderFinder, NamedFirstFinder
from pc_rag.corpus.recognition import Recognized
from pc_rag.layout.plan import Cached
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.loading import wrap_model
from pc_rag.types import Role
from tests.support.corpora import (
    CAT,
    DOG,
    SHORT,
    TEXTS,
    chunk_uses,
    named,
    opened,
)
from tests.support.tiny_models import CHATML_TEMPLATE, tiny_model

TRIMMING_TEMPLATE = CHATML_TEMPLATE.replace("message['content']", "message['content'] | trim")
SHORT_CHUNKS = ("yes", "text")


@pytest.fixture(scope="module")
def corpus():
    with opened(has_retrieval=False) as corpus:
        corpus.add(TEXTS)
        corpus.add(Document(text, id=text, is_whole=True) for text in SHORT_CHUNKS)
        yield corpus


@pytest.fixture(scope="module")
def trimming():
    """A corpus whose chat template trims contents."""
    model, tokenizer = tiny_model("llama")
    tokenizer.chat_template = TRIMMING_TEMPLATE
    with opened(loaded=wrap_model(model, tokenizer), has_retrieval=False) as corpus:
        corpus.add(named(cat=CAT, dog=DOG))
        yield corpus


def user(content, *chunks):
    return ChatMessage(Role.USER, content, chunks)


def labels_of(corpus, *messages):
    plan = corpus.plan(messages).plan
    return [p.label for p in plan.parts if isinstance(p, Cached) and p.label != "(prefix)"]


def text_of(corpus, *messages):
    return corpus.engine.loaded.tokenizer.decode(corpus.plan(messages).plan.token_ids)


def ids(*texts):
    return [chunk_id_of(text) for text in texts]


def test_named_chunk_is_found_when_it_is_too_short_to_be_recognised(corpus):
    """And is a hit, of the same tokens as without the name."""
    content = "Context: a text.\n\nyes\n\ntext\n\nWhy?"
    assert labels_of(corpus, user(content)) == []
    assert labels_of(corpus, user(content, "yes")) == ids("yes")
    assert labels_of(corpus, user(content, "yes", "text")) == ids("yes", "text")
    assert text_of(corpus, user(content, "yes", "text")) == text_of(corpus, user(content))
    uses = chunk_uses(corpus.generate([user(content, "yes", "text")], SHORT))
    assert [use.is_hit for use in uses] == [True, True]


def test_named_chunk_stands_apart_when_its_text_is_part_of_a_word_before(corpus):
    """``text`` in ``Context`` is not the chunk; where it stands in words only, it is."""
    plan = corpus.plan([user("Context: text", "text")]).plan
    (part,) = [p for p in plan.parts if isinstance(p, Cached) and p.label == chunk_id_of("text")]
    before = plan.token_ids[: part.span.start]
    assert corpus.engine.loaded.tokenizer.decode(before).endswith("Context: ")
    assert labels_of(corpus, user("Context!", "text")) == ids("text")


def test_others_are_recognised_when_some_are_named(corpus):
    """Before, between and behind the named ones, whatever the whitespace around a name."""
    content = f"{CAT}\n\nyes\n\n{DOG} {CAT}"
    assert labels_of(corpus, user(content, "  yes\n")) == ids(CAT, "yes", DOG, CAT)
    assert labels_of(corpus, user(content, "yes", f"\n{DOG}\n")) == ids(CAT, "yes", DOG, CAT)


def test_name_is_passed_over_when_it_is_no_chunk(corpus):
    """Unknown, empty, or not in the content: plain text, in which chunks are recognised."""
    assert labels_of(corpus, user(f"no such: {CAT} yes", "no such", "", "absent", "yes")) == ids(
        CAT, "yes"
    )
    assert labels_of(corpus, user(f"a {CAT} b", f"a {CAT} b")) == ids(CAT)


def test_named_chunks_are_found_when_messages_are_merged(corpus):
    """Neighbours of one role become one message, and keep what they name, in order."""
    messages = (user("One: text", "text"), user("Two: yes", "yes"), user("Why?"))
    assert labels_of(corpus, *messages) == ids("text", "yes")
    system = ChatMessage(Role.SYSTEM, "Rules: yes", ("yes",))
    assert labels_of(corpus, system, *messages) == ids("yes", "text", "yes")


def test_named_chunk_is_found_when_the_template_trims_it(trimming):
    """Whitespace at the content's ends goes, and the name has it still."""
    message = user(f"  \n{CAT}\n\n{DOG}\n ", f"  \n{CAT}\n", f"{DOG}\n ")
    assert labels_of(trimming, message) == ids(CAT, DOG)


def test_head_is_learned_up_to_the_named_chunk_when_it_is_short(corpus):
    """The head of a prompt ends where its first chunk begins, named or recognised."""
    message = user(f"Say: text. {CAT}", "text")
    corpus.learn_prefix([message]).result(60)
    assert corpus.prefixes[-1].endswith("Say: ")
    assert corpus.learn_prefix([message]) is None
    corpus.forget_prefix(corpus.prefixes[-1])


def test_places_are_in_order_when_a_named_text_stands_twice():
    """Each is looked for behind the one before; what the finder finds never overlaps them."""
    known = {"ab": "1", "b": "2"}
    find = NamedFirstFinder(["b", "ab", "b"], known.get, InOrderFinder([("3", "x"), ("3", "x")]))
    assert find("xab b ab x b") == [
        Recognized("3", 0, 1),
        Recognized("2", 4, 5),
        Recognized("1", 6, 8),
        Recognized("3", 9, 10),
        Recognized("2", 11, 12),
    ]


@pytest.mark.parametrize("label", ["qa prompt", ""])
def test_requests_are_counted_by_template_when_one_is_named(corpus, label):
    """The label of the call; the default one without."""
    engine = corpus.engine
    for run in (corpus.generate, engine.generate):
        assert run([user("Hi")], SHORT, template=label).metrics.template == label
    with corpus.stream_prompt("Hi", SHORT, template=label) as stream:
        list(stream)
    assert stream.completion.metrics.template == label
    assert corpus.generate("Hi", SHORT).metrics.template == "corpus"
    assert engine.generate("Hi", SHORT).metrics.template == "text"
    assert engine.generate([user("Hi")], SHORT).metrics.template == "chat"
