"""Anthropic's ``cache_control`` on content blocks: the prompt up to there is kept."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_pc_rag.messages import to_conversation

from pc_rag.errors import PromptError
from pc_rag.model.conversation import CachePoint
from pc_rag.types import HitKind
from tests.support.corpora import SHORT, opened

RULES = "You answer from the report below, in one short sentence."


def block(text, **control):
    return {"type": "text", "text": text} | ({"cache_control": control} if control else {})


def points_of(*content):
    (message,) = to_conversation([HumanMessage(list(content))]).messages
    return message.cache_points


def test_points_stand_behind_blocks_with_cache_control():
    """Five minutes unless the block says otherwise; other blocks keep nothing."""
    assert points_of(
        "Look: ",
        block("a", type="ephemeral"),
        block("bc"),
        block("d", type="ephemeral", ttl="1h"),
        block("e", type="ephemeral", ttl="5m"),
        block("f", type="other"),
    ) == (CachePoint(7, 300.0), CachePoint(10, 3600.0), CachePoint(11, 300.0))


def test_point_stands_at_its_place_when_the_block_has_no_text():
    """A call of a tool is no text; what was said before it is kept."""
    call = {"type": "tool_use", "id": "1", "name": "look", "cache_control": {"type": "ephemeral"}}
    (message,) = to_conversation([AIMessage([block("Let me see."), call])]).messages
    assert message.cache_points == (CachePoint(11),)


def test_text_has_no_points_when_the_content_is_a_string():
    """Plain messages are as they were."""
    (message,) = to_conversation([HumanMessage("Hi")]).messages
    assert message.cache_points == ()


@pytest.mark.parametrize("ttl", ["", "5", "soon", "0m", 300, None])
def test_message_is_refused_when_its_ttl_is_malformed(ttl):
    """By a typed error that says how to write it."""
    with pytest.raises(PromptError, match="'5m'"):
        points_of(block("a", type="ephemeral", ttl=ttl))


def test_prompt_up_to_the_block_hits_when_it_comes_again():
    """From LangChain's messages to an exact hit."""

    def ask(corpus, question):
        system = SystemMessage([block(RULES, type="ephemeral")])
        conversation = to_conversation([system, HumanMessage(question)])
        return corpus.generate(conversation, SHORT).metrics.modules

    with opened() as corpus:
        (first,), (again,) = ask(corpus, "Who?"), ask(corpus, "Where?")
    assert first.num_encoded_tokens == first.num_tokens
    assert again.hit_kind is HitKind.EXACT
