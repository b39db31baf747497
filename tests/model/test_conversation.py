"""Messages, calls and tools as values: what is joined, and what is refused at once."""

from __future__ import annotations

import pytest

from pc_rag.errors import PromptError
from pc_rag.model.chat import ChatFormat
from pc_rag.model.conversation import (
    CachePoint,
    ChatMessage,
    Conversation,
    ToolCall,
    ToolSpec,
    fold_system,
    merge_roles,
    parse_ttl,
)
from pc_rag.types import Role
from tests.support.tool_templates import tool_tokenizer

SYSTEM, USER, ASSISTANT, TOOL = Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL
ALICE, BOB = ChatMessage(USER, "a", name="alice"), ChatMessage(USER, "b", name="bob")
NAMED_TEMPLATE = (
    "{% for m in messages %}{{ m.role + (m.name or '') + ': ' + m.content }}{% endfor %}"
)


def test_messages_stay_apart_when_their_speakers_differ():
    """Nobody says what another has said."""
    again = ChatMessage(USER, "c", name="bob")
    joined = ChatMessage(USER, "b\n\nc", name="bob")
    assert merge_roles((ALICE, BOB, again)) == (ALICE, joined)
    pieces = ChatFormat(tool_tokenizer(NAMED_TEMPLATE)).render((ALICE, BOB))
    assert "".join(piece.text for piece in pieces) == "useralice: auserbob: b"


def test_messages_of_two_speakers_are_joined_when_the_template_wants_turns():
    """Without a name, since none said it all."""
    turns = "{% if not loop.first %}{{ raise_exception('take turns') }}{% endif %}"
    template = NAMED_TEMPLATE.replace("{{ m.role", turns + "{{ m.role")
    pieces = ChatFormat(tool_tokenizer(template)).render((ALICE, BOB))
    assert "".join(piece.text for piece in pieces) == "user: a\n\nb"


def test_system_text_is_said_by_the_user_when_it_is_folded():
    """It becomes the beginning of a message, and no message of its own."""
    kind, brief = ChatMessage(SYSTEM, "Be kind."), ChatMessage(SYSTEM, "Be brief.")
    answer = ChatMessage(ASSISTANT, "yes")
    folded = fold_system((kind, ALICE, answer, brief))
    assert folded == (
        ChatMessage(USER, "Be kind.\n\na", name="alice"),
        answer,
        ChatMessage(USER, "Be brief."),
    )


HALF = "a\ud800"


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: ChatMessage(USER, HALF), "the content of a user message"),
        (lambda: ChatMessage(USER, "a", name=HALF), "the name of a user message"),
        (lambda: ChatMessage(TOOL, "a", tool_call_id=HALF), "the tool_call_id of a tool"),
        (lambda: ChatMessage(USER, "a", chunks=(HALF,)), "a chunk of a user message"),
        (lambda: ToolCall(HALF), "the name of a tool call"),
        (lambda: ToolCall("f", {}, HALF), "the id of a call of 'f'"),
        (lambda: ToolCall("f", {"a": [HALF]}), "the arguments of a call of 'f'"),
        (lambda: ToolSpec(HALF), "the name of a tool"),
        (lambda: ToolSpec("f", HALF), "the description of tool 'f'"),
        (lambda: ToolSpec("f", "", {HALF: 1}), "the parameters of tool 'f'"),
    ],
)
def test_text_is_refused_when_it_holds_half_a_character(make, where):
    """No tokenizer takes it; the error names the place and the character."""
    with pytest.raises(PromptError, match=rf"{where}.*lone surrogate U\+D800"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChatMessage(USER, None), "content of a user message is a NoneType"),
        (lambda: ChatMessage(USER, "a", name=3), "name of a user message is a int"),
        (lambda: ChatMessage(USER, "a", chunks="abc"), "chunks of a user message are a str"),
        (lambda: ChatMessage(USER, "a", chunks=3), "chunks of a user message are a int"),
        (lambda: ChatMessage(USER, "a", chunks=[3]), "chunks of a user message hold a int"),
        (lambda: ChatMessage(ASSISTANT, "", tool_calls=[{"name": "f"}]), "hold a dict"),
        (lambda: ChatMessage(ASSISTANT, "", tool_calls={"name": "f"}), "are a dict"),
        (lambda: Conversation("hello"), "messages of a conversation are a str"),
        (lambda: Conversation([ALICE], [{"name": "f"}]), "tools of a conversation hold a dict"),
        (lambda: ToolSpec("f", None), "description of tool 'f' is a NoneType"),
        (lambda: ToolCall(3), "name of a tool call is a int"),
    ],
)
def test_value_is_refused_when_it_is_of_another_kind(make, message):
    """At once, and not while a template renders it."""
    with pytest.raises(PromptError, match=message):
        make()


def test_lists_are_taken_as_tuples_when_values_are_made():
    """Equal to those made of tuples, and as hashable."""
    call, tool = ToolCall("f"), ToolSpec("f")
    listed = Conversation(
        [ChatMessage(USER, "a", ["a"]), ChatMessage(ASSISTANT, "", tool_calls=[call])], [tool]
    )
    tuples = Conversation(
        (ChatMessage(USER, "a", ("a",)), ChatMessage(ASSISTANT, "", tool_calls=(call,))), (tool,)
    )
    assert listed == tuples
    assert hash(listed) == hash(tuples)


def test_cache_points_are_shifted_when_contents_are_joined():
    """The whole text before a point stays before it."""
    first = ChatMessage(SYSTEM, "Be kind.", cache_points=[CachePoint(8)])
    second = ChatMessage(SYSTEM, "Be brief.", cache_points=(CachePoint(2, 60.0), CachePoint(9)))
    (joined,) = merge_roles((first, second))
    assert [joined.content[: p.offset] for p in joined.cache_points] == [
        "Be kind.",
        "Be kind.\n\nBe",
        "Be kind.\n\nBe brief.",
    ]
    assert [p.ttl_seconds for p in joined.cache_points] == [300.0, 60.0, 300.0]
    (folded,) = fold_system((first, ChatMessage(USER, "a", cache_points=(CachePoint(1),))))
    assert [p.offset for p in folded.cache_points] == [8, 11]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: CachePoint(-1), "offset -1"),
        (lambda: CachePoint(1.0), "offset 1.0"),
        (lambda: CachePoint(True), "offset True"),
        (lambda: CachePoint(0, 0.0), "ttl_seconds 0.0"),
        (lambda: CachePoint(0, float("nan")), "ttl_seconds nan"),
        (lambda: CachePoint(0, float("inf")), "ttl_seconds inf"),
        (lambda: CachePoint(0, "5m"), "ttl_seconds '5m'"),
        (lambda: ChatMessage(USER, "ab", cache_points=(CachePoint(3),)), "offset 3"),
        (lambda: ChatMessage(USER, "ab", cache_points=(CachePoint(2), CachePoint(1))), "rising"),
        (lambda: ChatMessage(USER, "ab", cache_points=(1,)), "hold a int"),
    ],
)
def test_cache_point_is_refused_when_it_lies_nowhere_or_never_ends(make, named):
    """At once, with what was given."""
    with pytest.raises(PromptError, match=named):
        make()


def test_time_to_live_is_read_when_it_is_written_as_in_prompts():
    """Seconds, minutes, hours."""
    assert [parse_ttl(text) for text in ("300s", "5m", "1h")] == [300.0, 300.0, 3600.0]


@pytest.mark.parametrize(
    "text", ["", "5", "m", "0m", "-5m", "5 m", "1.5h", "5d", "\u0665m", None, 300]
)
def test_time_to_live_is_refused_when_it_is_malformed(text):
    """Never guessed."""
    with pytest.raises(PromptError, match="time to live"):
        parse_ttl(text)
