"""Generated answers are known again by their text, within bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pc_rag.model.answer_memory import AnswerMemory
from pc_rag.model.chat import ChatFormat, PieceKind
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.tokenizer import TextTokenizer
from pc_rag.types import Role
from tests.support.tiny_models import tiny_tokenizer


def test_latest_ids_are_given_when_a_text_was_generated_twice():
    """One text, one answer; its tokens are counted once."""
    memory = AnswerMemory()
    memory.remember("ab", (1, 2))
    memory.remember("ab", (3,))
    assert memory.token_ids_of("ab") == (3,)
    assert memory.token_ids_of("b") is None
    assert (len(memory), memory.num_tokens) == (1, 1)


@pytest.mark.parametrize("bounds", [{"max_tokens": 5}, {"max_answers": 2}])
def test_answer_used_longest_ago_is_forgotten_when_there_is_no_room(bounds):
    """A look-up is a use."""
    memory = AnswerMemory(**bounds)
    memory.remember("a", (1, 1))
    memory.remember("b", (2, 2))
    assert memory.token_ids_of("a")
    memory.remember("c", (3, 3))
    assert memory.token_ids_of("b") is None
    assert (memory.token_ids_of("a"), memory.token_ids_of("c")) == ((1, 1), (3, 3))
    assert (len(memory), memory.num_tokens) == (2, 4)


def test_nothing_else_is_forgotten_when_an_answer_is_too_long():
    """It is not remembered; nor is an answer without text."""
    memory = AnswerMemory(max_tokens=3)
    memory.remember("a", (1, 2, 3))
    memory.remember("b", (1, 2, 3, 4))
    memory.remember("", (1,))
    assert (len(memory), memory.num_tokens) == (1, 3)


def test_bounds_hold_when_threads_remember_at_once():
    """Counts agree with what is held."""
    memory = AnswerMemory(max_tokens=50)

    def work(number):
        for index in range(200):
            memory.remember(f"{number} {index % 9}", (number,) * (index % 7 + 1))
            memory.token_ids_of(f"{number} {index % 5}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert memory.num_tokens == sum(map(len, memory._answers.values())) <= 50


def render(answers, *messages):
    tokenizer = TextTokenizer(tiny_tokenizer())
    return ChatFormat(tokenizer, answers=answers).render(messages)


def test_generated_ids_are_kept_when_an_answer_comes_back():
    """Of the whole content of an assistant's message, and of no other."""
    memory = AnswerMemory()
    memory.remember("Hi", (7, 8, 9))
    messages = [
        ChatMessage(Role.USER, "Hi"),
        ChatMessage(Role.ASSISTANT, "Hi"),
        ChatMessage(Role.USER, "So?"),
        ChatMessage(Role.ASSISTANT, "Hi!"),
        ChatMessage(Role.USER, "Hi"),
    ]
    contents = [p for p in render(memory, *messages) if p.kind is not PieceKind.CONTROL]
    assert [p.kind for p in contents] == [
        PieceKind.CONTENT,
        PieceKind.ANSWER,
        PieceKind.CONTENT,
        PieceKind.CONTENT,
        PieceKind.CONTENT,
    ]
    assert contents[1].token_ids == (7, 8, 9)
    assert contents[0].token_ids == tuple(b"Hi")
