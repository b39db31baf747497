"""Generated answers are known again behind the prompt they answered, within bounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pc_rag.model.answer_memory import AnswerMemory, PromptDigest
from pc_rag.model.chat import ChatFormat, PieceKind
from pc_rag.model.conversation import ChatMessage
from pc_rag.model.tokenizer import TextTokenizer
from pc_rag.types import Role
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_tokenizers import metaspace_tokenizer

USER, ASSISTANT = Role.USER, Role.ASSISTANT
TOKENIZER = TextTokenizer(tiny_tokenizer(merges=[("a", "b"), ("c", "d")]))
AB, CD = 260, 261
PROMPT = PromptDigest(TOKENIZER, b"prompt")
SPACED_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Llama 2's: the prompt ends without the space that stands before an answer."""


def test_latest_ids_are_given_when_a_text_was_generated_twice():
    """One text, one answer; its tokens are counted once."""
    memory = AnswerMemory()
    memory.remember("ab", (1, 2), behind=PROMPT)
    memory.remember("ab", (3,), behind=PROMPT)
    assert memory.token_ids_of("ab", behind=PROMPT) == (3,)
    assert memory.token_ids_of("b", behind=PROMPT) is None
    assert (len(memory), memory.num_tokens) == (1, 1)


@pytest.mark.parametrize("bounds", [{"max_tokens": 5}, {"max_answers": 2}])
def test_answer_used_longest_ago_is_forgotten_when_there_is_no_room(bounds):
    """A look-up is a use."""
    memory = AnswerMemory(**bounds)
    memory.remember("a", (1, 1), behind=PROMPT)
    memory.remember("b", (2, 2), behind=PROMPT)
    assert memory.token_ids_of("a", behind=PROMPT)
    memory.remember("c", (3, 3), behind=PROMPT)
    assert memory.token_ids_of("b", behind=PROMPT) is None
    assert (memory.token_ids_of("a", behind=PROMPT), memory.token_ids_of("c", behind=PROMPT)) == (
        (1, 1),
        (3, 3),
    )
    assert (len(memory), memory.num_tokens) == (2, 4)


def test_nothing_else_is_forgotten_when_an_answer_is_too_long():
    """It is not remembered; nor is an answer without text."""
    memory = AnswerMemory(max_tokens=3)
    memory.remember("a", (1, 2, 3), behind=PROMPT)
    memory.remember("b", (1, 2, 3, 4), behind=PROMPT)
    memory.remember("", (1,), behind=PROMPT)
    assert (len(memory), memory.num_tokens) == (1, 3)


def test_bounds_hold_when_threads_remember_at_once():
    """Counts agree with what is held."""
    memory = AnswerMemory(max_tokens=50)

    def work(number):
        for index in range(200):
            memory.remember(f"{number} {index % 9}", (number,) * (index % 7 + 1), behind=PROMPT)
            memory.token_ids_of(f"{number} {index % 5}", behind=PROMPT)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert memory.num_tokens == sum(map(len, memory._answers.values())) <= 50


def test_answer_is_not_known_when_it_stands_behind_another_prompt():
    """What was generated for one prompt changes no other."""
    memory = AnswerMemory()
    memory.remember("ab", (1, 2), behind=PROMPT)
    assert memory.token_ids_of("ab", behind=PromptDigest(TOKENIZER, b"prompts")) is None
    assert memory.token_ids_of("ab", behind=PromptDigest(TOKENIZER, b"prompt")) == (1, 2)


def test_prompts_are_the_same_when_only_their_tokens_differ():
    """Chunks cut a text into other tokens; control tokens are more than their text."""

    def value(*token_ids):
        return PromptDigest(TOKENIZER, token_ids).value

    assert value(*b"ab", 258, CD) == value(AB, 258, *b"cd") == value(AB, 258, *b"c", *b"d")
    written = TOKENIZER.encode_text(TOKENIZER.backend.id_to_token(258))
    others = [(AB, *written, CD), (AB, CD, 258), (AB, 259, CD), (AB, CD), (258, AB, CD)]
    assert len({value(*ids) for ids in [(AB, 258, CD), *others]}) == len(others) + 1


def test_digest_is_that_of_the_whole_when_it_grows():
    """Copies go their own way."""
    grown = PromptDigest(TOKENIZER, (*b"a", 258, *b"c"))
    other = grown.copy().extend(b"x")
    grown.extend((*b"d", 259))
    assert grown.value == PromptDigest(TOKENIZER, (*b"a", 258, CD, 259)).value
    assert other.value == PromptDigest(TOKENIZER, (*b"a", 258, *b"cx")).value


def answered(chat_format, memory, *messages):
    """Remember the last message as the answer to those before; its ids are the caller's."""
    *prompt, (text, ids) = messages
    pieces = chat_format.render(prompt)
    digest = PromptDigest(TOKENIZER, [i for piece in pieces for i in piece.token_ids])
    memory.remember(text, ids, behind=digest)


def test_generated_ids_are_kept_when_an_answer_comes_back():
    """Of the whole content of an assistant's message, and of no other."""
    memory = AnswerMemory()
    chat_format = ChatFormat(TOKENIZER, answers=memory)
    question = ChatMessage(USER, "abcd")
    answered(chat_format, memory, question, ("abcd", (*b"ab", CD)))
    messages = [
        question,
        ChatMessage(ASSISTANT, "abcd"),
        ChatMessage(USER, "So?"),
        ChatMessage(ASSISTANT, "abcd"),
        question,
    ]
    contents = [p for p in chat_format.render(messages) if p.kind is not PieceKind.CONTROL]
    kinds = [PieceKind.CONTENT, PieceKind.ANSWER] + [PieceKind.CONTENT] * 3
    assert [piece.kind for piece in contents] == kinds
    assert contents[1].token_ids == (*b"ab", CD)
    assert contents[0].token_ids == contents[3].token_ids == (AB, CD)


def test_answers_are_known_when_they_follow_each_other():
    """Behind the first answer as it was generated, the second is what it was."""
    memory = AnswerMemory()
    chat_format = ChatFormat(TOKENIZER, answers=memory)
    messages = [ChatMessage(USER, "ab"), ChatMessage(ASSISTANT, "abcd"), ChatMessage(USER, "cd")]
    answered(chat_format, memory, messages[0], ("abcd", (*b"ab", CD)))
    answered(chat_format, memory, *messages, ("cdab", (*b"c", *b"d", AB)))
    pieces = chat_format.render([*messages, ChatMessage(ASSISTANT, "cdab"), ChatMessage(USER, "x")])
    answers = [piece.token_ids for piece in pieces if piece.kind is PieceKind.ANSWER]
    assert answers == [(*b"ab", CD), (*b"cd", AB)]


@pytest.mark.parametrize("kind", ["bpe-prepend", "bpe-always", "bpe-first", "unigram"])
@pytest.mark.parametrize("words", [("▁the", "▁cat"), ("the", "▁cat")])
def test_text_is_the_templates_when_an_answer_begins_with_a_dropped_space(kind, words):
    """The decoder drops the space of an answer's first token, and the template writes another."""
    hf = metaspace_tokenizer(kind)
    hf.chat_template = SPACED_TEMPLATE
    tokenizer = TextTokenizer(hf)
    memory = AnswerMemory()
    plain, chat_format = ChatFormat(tokenizer), ChatFormat(tokenizer, answers=memory)

    def ids_of(pieces):
        return [token_id for piece in pieces for token_id in piece.token_ids]

    def text_of(pieces):
        return tokenizer.backend.decode(ids_of(pieces), skip_special_tokens=False)

    question = ChatMessage(USER, "sat")
    prompt_ids = ids_of(plain.render([question]))
    generated = tuple(hf.convert_tokens_to_ids(word) for word in words)
    answer = tokenizer.decode(generated)
    assert answer == "the cat"
    memory.remember(answer, generated, behind=PromptDigest(tokenizer, prompt_ids))
    messages = [question, ChatMessage(ASSISTANT, answer), question]
    pieces = chat_format.render(messages)
    assert text_of(pieces) == text_of(plain.render(messages))
    if words[0] == "▁the":  # its space is the template's: the run of the cache goes on
        assert ids_of(pieces)[: len(prompt_ids) + 2] == [*prompt_ids, *generated]
    else:
        assert all(piece.kind is not PieceKind.ANSWER for piece in pieces)


def test_answer_is_tokenised_anew_when_the_template_puts_a_space_that_it_lacks():
    """What the model wrote right behind a colon is not what the template shows."""
    template = (
        "{% for m in messages %}{{ ('Q' if m.role == 'user' else 'A') + ': ' + m.content + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    )
    tokenizer = TextTokenizer(tiny_tokenizer(chat_template=template, merges=[("a", "b")]))
    memory = AnswerMemory()
    chat_format = ChatFormat(tokenizer, answers=memory)
    answered(chat_format, memory, ChatMessage(USER, "x"), ("ab", (*b"ab",)))
    messages = [ChatMessage(USER, "x"), ChatMessage(ASSISTANT, "ab")]
    assert chat_format.render(messages) == ChatFormat(tokenizer).render(messages)
