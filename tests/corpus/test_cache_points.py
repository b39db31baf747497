"""Cache points in prompts to a corpus: where tokens are cut, and which chunks are still found."""

from __future__ import annotations

import pytest

from pc_rag.corpus.cache_points import cut_at_points
from pc_rag.model.chat import ChatFormat, ChatPiece, PieceKind
from pc_rag.model.conversation import CachePoint, ChatMessage
from pc_rag.model.loading import wrap_model
from pc_rag.model.tokenizer import TextTokenizer
from pc_rag.types import HitKind, MissReason, Role
from tests.support.corpora import (
    CAT,
    DOG,
    FISH,
    SHORT,
    TEXTS,
    opened,
    same_in_both_arms,
    tiny_engine,
)
from tests.support.tiny_models import CHATML_TEMPLATE, tiny_model, tiny_tokenizer
from tests.support.tiny_tokenizers import metaspace_tokenizer

RULES = "You answer from the report below, in one short sentence."
TRIMMING = CHATML_TEMPLATE.replace("message['content']", "message['content'] | trim")


def asked(content, *offsets, chunks=()):
    points = tuple(CachePoint(offset) for offset in offsets)
    return ChatMessage(Role.USER, content, chunks=chunks, cache_points=points)


def read(corpus, *messages):
    """The texts that a prompt reads from entries, control tokens left out."""
    decode = corpus.engine.loaded.tokenizer.decode
    return [decode(part.token_ids) for part in corpus.plan(messages).plan.cached]


def ids_of(pieces):
    return [token_id for piece in pieces for token_id in piece.token_ids]


def test_a_point_is_a_border_of_tokens():
    """The same text before it has the same tokens, whatever comes behind it."""
    tokenizer = TextTokenizer(tiny_tokenizer(merges=[("a", "b"), ("b", "c")]))
    pieces = ChatFormat(tokenizer).render([asked("xab", 2)])
    cut, points = cut_at_points(tokenizer, pieces)
    whole, _ = cut_at_points(tokenizer, ChatFormat(tokenizer).render([asked("xab")]))
    assert len(ids_of(cut)) == len(ids_of(whole)) + 1
    assert tokenizer.decode(ids_of(cut)[: points[0].end]).endswith("xa")
    assert [piece.text for piece in cut if piece.kind is PieceKind.CONTENT] == ["b"]


@pytest.mark.parametrize("kind", ["unigram", "bpe-always", "bpe-first", "bpe-prepend"])
def test_no_space_appears_when_a_tokenizer_that_prepends_one_is_cut(kind):
    """Only the very first text gets the space that such tokenizers put before every text."""
    tokenizer = TextTokenizer(metaspace_tokenizer(kind))
    text = "the cat sat"
    piece = ChatPiece(
        PieceKind.CONTENT,
        text,
        tokenizer.encode_text(text, is_first=True),
        points=(CachePoint(3), CachePoint(7)),
    )
    cut, points = cut_at_points(tokenizer, (piece,))
    first = tokenizer.encode_text("the", is_first=True)
    rest = tokenizer.encode_text(" cat"), tokenizer.encode_text(" sat")
    assert ids_of(cut) == [*first, *rest[0], *rest[1]]
    assert [point.end for point in points] == [len(first), len(first) + len(rest[0])]


def test_nothing_is_kept_when_the_point_stands_at_the_start_of_the_prompt():
    """No token stands before it."""
    tokenizer = TextTokenizer(tiny_tokenizer(chat_template=None))
    piece = ChatPiece(PieceKind.CONTENT, "text", (1, 2, 3, 4), points=(CachePoint(0),))
    cut, points = cut_at_points(tokenizer, (piece,))
    assert (ids_of(cut), points) == ([1, 2, 3, 4], ())
    with opened() as corpus:
        metrics = corpus.generate([asked(RULES, 0, len(RULES))], SHORT).metrics
    assert [use.label for use in metrics.modules] == ["(cache point)"]


def test_chunks_are_found_behind_the_last_point_only():
    """Those before it are a part of what is kept, exact in their place."""
    with opened() as corpus:
        corpus.add(TEXTS)
        content = f"{CAT}\n\n{DOG}\n\n{FISH}\n\nWho?"
        kept, chunk = read(corpus, asked(content, content.index(FISH)))
        assert kept.endswith(f"{CAT}\n\n{DOG}\n\n")
        assert chunk == FISH
        kept, *chunks = read(corpus, asked(content, content.index(DOG) + 5))
        assert chunks == [FISH], "a chunk that the point cuts is text"


def test_named_chunks_are_found_behind_the_point_when_they_stand_before_it_too():
    """Names belong to their places: the one before the point is spent there."""
    with opened() as corpus:
        corpus.add([*TEXTS, "tea"])
        content = f"tea: {CAT}\n\ntea and tea"
        point = content.index("\n\n") + 2
        kept, *chunks = read(corpus, asked(content, point, chunks=("tea", CAT)))
        assert chunks == []
        kept, *chunks = read(corpus, asked(content, point, chunks=("tea", CAT, "tea")))
        assert chunks == ["tea"]
        assert kept.endswith(f"tea: {CAT}\n\n")


def test_kept_text_hits_when_the_template_trims_it():
    """A template that trims contents: the point moves with the text."""
    model, _ = tiny_model("llama")
    loaded = wrap_model(model, tiny_tokenizer(chat_template=TRIMMING))
    content = f" \n{RULES} \n"
    with opened(loaded=loaded) as corpus:
        for is_hit in (False, True):
            rules = ChatMessage(Role.SYSTEM, content, cache_points=(CachePoint(len(content) - 1),))
            metrics = corpus.generate([rules, asked("Who?")], SHORT).metrics
            assert [use.is_hit for use in metrics.modules] == [is_hit]
        assert read(corpus, rules, asked("Who?"))[0].endswith(RULES)
        assert same_in_both_arms(
            lambda reuse: corpus.generate([rules, asked("Who?")], SHORT, reuse=reuse)
        )


def test_kept_text_hits_when_messages_of_one_role_are_merged():
    """Two user messages in a row: the first is kept, the second changes."""
    with opened() as corpus:
        report = asked(f"The report: {CAT}", len(f"The report: {CAT}"))
        first = corpus.generate([report, asked("Who?")], SHORT).metrics
        again = corpus.generate([report, asked("And where?")], SHORT).metrics
    assert [use.miss_reason for use in first.modules] == [MissReason.NOT_STORED]
    assert [use.hit_kind for use in again.modules] == [HitKind.EXACT]


def test_prefix_is_learnt_when_the_prompt_has_points():
    """The head of such a prompt is cut at its points; adopted, it serves it and its first chunk."""
    with opened() as corpus:
        corpus.add(TEXTS)
        content = f"Report. {DOG}\n\nWho?"
        prompt = [
            ChatMessage(Role.SYSTEM, RULES, cache_points=(CachePoint(20),)),
            asked(content, 4),
        ]
        assert corpus.plan(prompt).remarks
        learnt = corpus.learn_prefix(prompt)
        assert learnt is not None
        learnt.result()
        kinds = [part.hit_kind for part in corpus.plan(prompt).plan.cached]
        assert kinds == [HitKind.EXACT, HitKind.EXACT]
        assert corpus.plan(prompt).remarks == {}


def test_points_are_passed_over_when_there_is_no_corpus():
    """An engine alone keeps no notes of entries; the prompt is answered all the same."""
    with tiny_engine() as engine:
        kept = [asked(RULES, len(RULES))]
        plain = engine.generate([asked(RULES)], SHORT)
        answer = engine.generate(kept, SHORT)
    assert answer.token_ids == plain.token_ids
    assert answer.metrics.modules == ()
