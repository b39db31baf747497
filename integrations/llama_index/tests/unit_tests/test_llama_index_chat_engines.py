"""LlamaIndex's chat engines: nodes are hit, and earlier turns are not computed again."""

from __future__ import annotations

import pytest
from llama_index.core import Settings, SummaryIndex
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.pc_rag import PcRagLLM

from pc_rag.errors import GenerationError
from tests.support.llama_index_indexes import (
    QUESTION,
    chunks_in,
    encode_nodes,
    events,
    failing,
    hit_labels,
    labels_of,
    requests_in,
    text_nodes,
)

FOLLOW_UP = "And what did the dog do?"
CONTEXT_MODES = [ChatMode.CONTEXT, ChatMode.CONDENSE_PLUS_CONTEXT, ChatMode.BEST]
MODES = [ChatMode.SIMPLE, ChatMode.CONDENSE_QUESTION, *CONTEXT_MODES]
NODES = text_nodes(source="pets.txt")


@pytest.fixture
def llm(corpus, monkeypatch):
    llm = PcRagLLM(corpus=corpus, max_tokens=6)
    encode_nodes(corpus, NODES)
    monkeypatch.setattr(Settings, "_llm", llm)
    return llm


def engine_of(llm, mode, **options):
    """A chat engine over an index that gives all nodes, in their order, for every question."""
    memory = ChatMemoryBuffer.from_defaults(token_limit=1500, tokenizer_fn=llm.tokenizer)
    return SummaryIndex(NODES).as_chat_engine(mode, llm=llm, memory=memory, **options)


async def said(engine, message, *, streaming=False, is_async=False):
    """The text of a turn."""
    if not streaming:
        return (await engine.achat(message) if is_async else engine.chat(message)).response
    if not is_async:
        return "".join(engine.stream_chat(message).response_gen)
    response = await engine.astream_chat(message)
    return "".join([piece async for piece in response.async_response_gen()])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_nodes_are_hit_in_both_turns_when_a_chat_engine_is_asked(
    llm, mode, streaming, is_async
):
    """Every node that a turn's prompt holds is read from the cache, in every chat mode."""
    engine = engine_of(llm, mode)
    ways = {"streaming": streaming, "is_async": is_async}
    num_nodes = 0 if mode is ChatMode.SIMPLE else len(NODES)
    for message in (QUESTION, FOLLOW_UP):
        with events() as kept:
            await said(engine, message, **ways)
        metrics = requests_in(kept)[-1]  # a turn may condense the question first
        assert hit_labels(metrics) == labels_of(NODES)[:num_nodes]
        assert len(chunks_in(metrics)) == num_nodes
    assert len(engine.chat_history) == 4


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("mode", [ChatMode.SIMPLE, ChatMode.CONTEXT])
async def test_earlier_turns_are_reused_when_the_conversation_goes_on(llm, mode, streaming):
    """The second turn's prompt begins with the first and its answer, which are in memory."""
    engine = engine_of(llm, mode)
    with events() as kept:
        await said(engine, QUESTION, streaming=streaming)
        await said(engine, FOLLOW_UP, streaming=streaming)
    first, second = requests_in(kept)
    nodes = sum(use.num_tokens for use in chunks_in(second) if use.is_hit)
    assert second.num_reused_tokens + nodes >= first.prompt_tokens
    assert second.num_reused_tokens > first.num_reused_tokens
    assert second.num_fresh_tokens < len(FOLLOW_UP) + 40  # and the template around it


async def test_turns_are_the_same_when_they_stream_or_are_asynchronous(llm):
    """All four ways of asking give the same conversation."""
    conversations = set()
    for streaming in (False, True):
        for is_async in (False, True):
            engine = engine_of(llm, ChatMode.CONTEXT)
            ways = {"streaming": streaming, "is_async": is_async}
            turns = [await said(engine, message, **ways) for message in (QUESTION, FOLLOW_UP)]
            conversations.add(tuple(turns))
    assert len(conversations) == 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_a_failure_surfaces_when_the_model_raises_in_a_chat(llm, mode, is_async):
    """It is no empty answer, and the next turn works."""
    engine = engine_of(llm, mode)
    with failing(llm.open_corpus(), ValueError("bad")), pytest.raises(GenerationError, match="bad"):
        await said(engine, QUESTION, is_async=is_async)
    assert await said(engine_of(llm, mode), QUESTION, is_async=is_async)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_failure_surfaces_when_the_model_raises_in_a_chats_stream(llm, is_async):
    """LlamaIndex writes the history in a thread or task of its own; the consumer is told."""
    engine = engine_of(llm, ChatMode.CONTEXT)
    with failing(llm.open_corpus(), ValueError("bad")), pytest.raises(GenerationError, match="bad"):
        await said(engine, QUESTION, streaming=True, is_async=is_async)
