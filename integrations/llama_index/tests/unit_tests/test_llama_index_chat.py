"""Conversations: earlier turns and marked places are read, not computed again."""

from __future__ import annotations

from itertools import pairwise

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import CacheControl, CachePoint, ChatMessage, TextBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import TextNode
from llama_index.llms.pc_rag import PcRagLLM
from llama_index.llms.pc_rag.messages import to_conversation

from pc_rag.errors import PromptError
from pc_rag.model.conversation import CachePoint as PcRagCachePoint
from pc_rag.types import HitKind
from tests.support.corpora import CAT, DOG, FISH, opened, recorded
from tests.support.engines import scripted
from tests.support.llama_index_calls import WAYS, ask, call, heard, shown

RULES = "You answer from the report below, in one short sentence, and never guess."


def cached_tokens(response):
    return response.raw["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def llm(corpus):
    return PcRagLLM(corpus=corpus, max_tokens=12)


# --- turns


@pytest.mark.parametrize("way", [way for way in WAYS if "chat" in way])
async def test_turn_computes_only_what_is_new_when_a_conversation_goes_on(llm, way):
    """The response's message goes back as it came, and its KV is there already."""
    history = [ChatMessage(role="system", content=RULES), ChatMessage(content="Who sat?")]
    first = await ask(llm, way, history)
    history += [first.message, ChatMessage(content="And where?")]
    second = await ask(llm, way, history)
    before = first.raw["usage"]["total_tokens"]
    assert before - 2 <= cached_tokens(second) <= before + 2
    assert len(history) == 4


async def test_memory_is_reused_when_a_chat_engine_streams(llm, corpus):
    """A chat engine with memory: each turn is a longer prompt with the same beginning."""
    memory = ChatMemoryBuffer.from_defaults(token_limit=1500, tokenizer_fn=llm.tokenizer)
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=memory, system_prompt=RULES)
    with heard() as events, recorded(corpus.engine) as requests:
        first = "".join(engine.stream_chat("Who sat?").response_gen)
        second = str(await engine.achat("And where?"))
        response = await engine.astream_chat("And when?")
        third = "".join([token async for token in response.async_response_gen()])
    assert all([first, second, third])
    told = [event.request_metrics for event in events.of("PromptCacheEvent")]
    assert len(told) == 3
    for before, after in pairwise(told):
        assert after.num_cache_read_tokens >= before.prompt_tokens - 2
    text = shown(corpus, requests[2])
    assert text.count(RULES) == 1
    assert text.index("Who sat?") < text.index("And where?") < text.index("And when?")


def test_nodes_are_hits_when_a_chat_engine_retrieves(llm, corpus):
    """Context mode puts node texts into the system message, where they are recognised."""
    nodes = [TextNode(text=text) for text in (CAT, DOG, FISH)]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    engine = index.as_chat_engine(llm=llm, chat_mode="context", similarity_top_k=2)
    with heard() as events:
        assert str(engine.chat("What happened?"))
    (told,) = events.of("PromptCacheEvent")
    assert len([use for use in told.request_metrics.modules if use.is_hit]) == 2


# --- cache points


def point(**control):
    return CachePoint(cache_control=CacheControl(type="ephemeral", **control))


def text(content):
    return TextBlock(text=content)


def test_points_stand_behind_the_text_before_them():
    """Their places count the joined text; five minutes unless they say otherwise."""
    message = ChatMessage(
        blocks=[
            text("ab"),
            point(),
            text("cd"),
            text("e"),
            CachePoint(cache_control=CacheControl(type="default", ttl="1h")),
            text("f"),
        ]
    )
    (found,) = to_conversation([message]).messages
    assert found.content == "ab\ncd\ne\nf"
    assert found.cache_points == (PcRagCachePoint(2, 300.0), PcRagCachePoint(7, 3600.0))
    assert [found.content[p.offset :] for p in found.cache_points] == ["\ncd\ne\nf", "\nf"]


def test_point_is_nothing_when_no_text_is_before_it():
    """At the beginning of the first message; in a later one, the messages before are kept."""
    blocks = [point(), text("a")]
    first, second = to_conversation([ChatMessage(blocks=blocks)] * 2).messages
    assert first.cache_points == ()
    assert second.cache_points == (PcRagCachePoint(0, 300.0),)


@pytest.mark.parametrize("ttl", ["", "5", "soon", "0m", "-1m"])
def test_message_is_refused_when_its_ttl_is_malformed(llm, ttl):
    """By a typed error that says how to write it."""
    with pytest.raises(PromptError, match="'5m'"):
        llm.chat([ChatMessage(blocks=[text("a"), point(ttl=ttl)])])


def marked(question):
    """Rules up to which the prompt is kept, and a question."""
    return [
        ChatMessage(role="system", blocks=[text(RULES), point(ttl="1h")]),
        ChatMessage(content=question),
    ]


@pytest.mark.parametrize("way", [way for way in WAYS if "chat" in way])
async def test_text_up_to_the_point_is_read_when_it_comes_again(way):
    """Without the exact prefix cache: from the entry that the first call kept."""
    with opened() as corpus:
        llm = PcRagLLM(corpus=corpus, max_tokens=4)
        first, again = [await ask(llm, way, marked(each)) for each in ("Who?", "Where, then?")]
        plain = await ask(
            llm, way, [ChatMessage(role="system", content=RULES), ChatMessage(content="Where?")]
        )
    usage = first.raw["usage"]
    assert cached_tokens(first) == 0
    assert usage["cache_creation_tokens"] >= len(RULES)
    assert cached_tokens(again) == usage["cache_creation_tokens"]
    assert again.raw["usage"]["cache_creation_tokens"] == 0
    assert [m["hit_kind"] for m in again.raw["pc_rag"]["modules"]] == [HitKind.EXACT]
    assert plain.raw["usage"]["cache_creation_tokens"] == 0


def test_answer_is_the_same_when_there_is_a_point(corpus):
    """A point is no text, and what it reads is exact."""
    llm = PcRagLLM(corpus=corpus, max_tokens=12)
    plain = [ChatMessage(role="system", content=RULES), ChatMessage(content="Who?")]
    with recorded(corpus.engine) as requests:
        expected = llm.chat(plain, reuse=False).message.content
        answers = [llm.chat(marked("Who?")).message.content for _ in range(2)]
    assert answers == [expected] * 2
    assert len({request.plan.token_ids for request in requests}) == 1


def test_text_up_to_the_point_is_read_when_the_store_is_opened_again(tiny_folder, tmp_path):
    """After a restart, from the store's folder."""
    answers = []
    for question in ("Who?", "Where, then?"):
        with PcRagLLM(model=str(tiny_folder), store=tmp_path, max_tokens=4) as llm:
            answers.append(llm.chat(marked(question)))
            host = llm.host
        assert not host.is_open
    first, again = answers
    assert cached_tokens(again) == first.raw["usage"]["cache_creation_tokens"] >= len(RULES)


async def test_next_turn_is_read_when_the_point_moves_on(corpus):
    """An agent's usual marking: a point behind the last message of each turn."""
    llm = PcRagLLM(corpus=corpus, max_tokens=4)
    history = [ChatMessage(blocks=[text("The report: it rained all day long."), point()])]
    with scripted(corpus.engine, "Yes."):
        first = await call(llm, "achat", history)
    history += [first.message, ChatMessage(blocks=[text("And at night?"), point()])]
    second = await call(llm, "achat", history)
    assert cached_tokens(second) >= len("The report: it rained all day long.")
