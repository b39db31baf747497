"""Cache points in a rendered conversation: they stay at their place, whatever a template does."""

from __future__ import annotations

import pytest

from pc_rag.model.answer_memory import AnswerMemory, PromptDigest
from pc_rag.model.chat import ChatFormat, PieceKind
from pc_rag.model.conversation import CachePoint, ChatMessage, ToolCall
from pc_rag.model.template_input import variants
from pc_rag.model.template_skeleton import Escape, Place, Trim
from pc_rag.model.tokenizer import TextTokenizer
from pc_rag.types import Role
from tests.support.tiny_models import CHATML_TEMPLATE, tiny_tokenizer

SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT
TRIMMING = CHATML_TEMPLATE.replace("message['content']", "message['content'] | trim")
NEWLINES = CHATML_TEMPLATE.replace("message['content']", "message['content'].strip('\\n')")
AS_JSON = CHATML_TEMPLATE.replace("message['content']", "message['content'] | tojson")
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}" + CHATML_TEMPLATE.split("%}", 1)[1]
)


def points(*offsets):
    return tuple(CachePoint(offset) for offset in offsets)


def texts_before(pieces):
    """The rendered text before each point."""
    found, text = [], ""
    for piece in pieces:
        found += [text + piece.text[: point.offset] for point in piece.points]
        text += piece.text
    return found


def rendered(template, *messages, answers=None, **options):
    tokenizer = TextTokenizer(tiny_tokenizer(chat_template=template, **options))
    return ChatFormat(tokenizer, answers=answers).render(messages)


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, None])
@pytest.mark.parametrize("add_bos", [False, True])
def test_points_stand_at_their_place_when_contents_are_written_as_they_are(template, add_bos):
    """All before them is template text and contents, BOS included."""
    kept = ChatMessage(USER, "Read this. And?", cache_points=points(0, 10, 15))
    pieces = rendered(template, ChatMessage(SYSTEM, "Be kind."), kept, add_bos=add_bos)
    text = "".join(piece.text for piece in pieces)
    start = text.index("Read")
    assert texts_before(pieces) == [text[: start + offset] for offset in (0, 10, 15)]


@pytest.mark.parametrize(
    ("template", "content", "offset", "expected"),
    [
        (TRIMMING, "  \n a text \n ", 1, ""),
        (TRIMMING, "  \n a text \n ", 6, "a "),
        (TRIMMING, "  \n a text \n ", 12, "a text"),
        (NEWLINES, "\n a text \n", 3, " a"),
        (NEWLINES, "\n a text \n", 10, " a text "),
        (AS_JSON, 'say "a" & b', 7, 'say \\"a\\"'),
        (AS_JSON, 'say "a"', 7, 'say \\"a\\"'),
    ],
)
def test_points_move_with_the_text_when_the_template_trims_or_escapes(
    template, content, offset, expected
):
    """Clipped to what is left of the content."""
    pieces = rendered(template, ChatMessage(USER, content, cache_points=points(offset)))
    (piece,) = (piece for piece in pieces if piece.kind is PieceKind.CONTENT)
    assert [piece.text[: point.offset] for point in piece.points] == [expected]


def test_point_stands_at_the_end_when_its_place_cannot_be_told():
    """An escaping that changes a text by what stands behind it leaves no other place."""

    class Folding(Escape):
        def apply(self, text):
            return text[::-1]

    place = Place(0, Folding(), Trim.NOTHING, Trim.NOTHING)
    assert place.locate("abc", 2) == 3


def test_points_are_shifted_when_messages_are_merged():
    """Runs of one role, and system text in front of the user's."""
    messages = (
        ChatMessage(SYSTEM, "Be kind.", cache_points=points(8)),
        ChatMessage(USER, "Read this.", cache_points=points(4)),
        ChatMessage(USER, "And?", cache_points=points(4)),
    )
    pieces = rendered(NO_SYSTEM, *messages)
    assert [text.rpartition("user\n")[2] for text in texts_before(pieces)] == [
        "Be kind.",
        "Be kind.\n\nRead",
        "Be kind.\n\nRead this.\n\nAnd?",
    ]


def test_point_of_an_empty_content_stands_behind_what_is_there():
    """An empty content has no piece of its own."""
    pieces = rendered(
        CHATML_TEMPLATE,
        ChatMessage(SYSTEM, "", cache_points=points(0)),
        ChatMessage(USER, "Hi"),
        add_bos=True,
    )
    assert texts_before(pieces) == ["<s><|im_start|>system\n"]


def test_points_stand_at_the_ends_of_a_remembered_answer():
    """Its tokens are never cut: a point inside moves to its start."""
    tokenizer = TextTokenizer(tiny_tokenizer())
    answers = AnswerMemory()
    asked = ChatMessage(USER, "Hi")
    before = ChatFormat(tokenizer).render([asked])
    ids = [token_id for piece in before for token_id in piece.token_ids]
    said = tokenizer.encode_text("Hello you.")
    answers.remember("Hello you.", said, behind=PromptDigest(tokenizer, ids))
    answer = ChatMessage(ASSISTANT, "Hello you.", cache_points=points(5, 10))
    pieces = ChatFormat(tokenizer, answers=answers).render([asked, answer, asked])
    (piece,) = (piece for piece in pieces if piece.kind is PieceKind.ANSWER)
    assert [point.offset for point in piece.points] == [0, 10]


def test_points_are_left_out_when_their_text_is():
    """Text beside calls is left out by some templates: nothing stands there to be kept."""
    calling = ChatMessage(
        ASSISTANT, "Let me see.", tool_calls=(ToolCall("look"),), cache_points=points(3)
    )
    for variant in variants((calling,)):
        assert [m.cache_points for m in variant if m.tool_calls and not m.content] in ([], [()])
