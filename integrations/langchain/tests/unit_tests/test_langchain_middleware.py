from __future__ import annotations

import subprocess
import sys

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool, tool
from langchain_pc_rag import ChatPcRag, PromptCacheIndex, PromptCacheMiddleware, message_chunks
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import Field

from pc_rag.corpus import chunk_id_of
from pc_rag.model.conversation import ChatMessage
from tests.support.corpora import CAT, DOG, SHORT, chunk_uses
from tests.support.langchain_stores import (
    counted_corpus,
    texts_as_documents,
    warmings,
    word_store,
)

QUESTION = "Who sat on the mat?"


class ScriptedModel(BaseChatModel):
    """Says what it is told to, and keeps the prompts that reach it."""

    script: list[AIMessage]
    prompts: list[list] = Field(default_factory=list)

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.prompts.append(messages)
        answer = self.script[len(self.prompts) - 1].model_copy(update={"id": None})
        return ChatResult(generations=[ChatGeneration(message=answer)])


class CountedRetriever:
    """A retriever that keeps the questions it was asked."""

    def __init__(self, retriever):
        self.questions = []

        def find(question):
            self.questions.append(question)
            return retriever.invoke(question)

        async def afind(question):
            self.questions.append(question)
            return await retriever.ainvoke(question)

        self.runnable = RunnableLambda(find, afind)


@pytest.fixture
def counted():
    with counted_corpus() as counted:
        yield counted


@pytest.fixture
def filled(counted):
    documents = PromptCacheIndex(vectorstore=word_store(), corpus=counted.corpus, k=2)
    documents.upsert(texts_as_documents(source="a.txt"))
    return documents


def _model(*script):
    return ScriptedModel(script=list(script) or [AIMessage("The cat.")] * 4)


def _search_call():
    return AIMessage("", tool_calls=[{"name": "search", "args": {"query": QUESTION}, "id": "1"}])


async def _ask(agent, question, config=None, *, is_async=False):
    asked = {"messages": [HumanMessage(question)]}
    return await agent.ainvoke(asked, config) if is_async else agent.invoke(asked, config)


def _hits(counted, prompt):
    """Whether each chunk that a prompt names was served from the store."""
    roles = {"human": "user", "ai": "assistant"}
    messages = []
    for message in prompt:
        text, chunks = message_chunks(message)
        messages.append(ChatMessage(roles.get(message.type, message.type), text, chunks=chunks))
    uses = chunk_uses(counted.corpus.generate(messages, SHORT))
    return [use.hit_kind is not None for use in uses]


@pytest.mark.parametrize("is_async", [False, True])
async def test_documents_stand_in_the_system_message_when_a_user_asks(counted, filled, is_async):
    """The text is what ``dynamic_prompt`` with joined documents gives; each is a named chunk."""
    begun, model = warmings(counted.corpus), _model()
    middleware = PromptCacheMiddleware(counted.corpus, filled, system_prompt="Answer from these:")
    agent = create_agent(model, middleware=[middleware], system_prompt="Be brief.")
    result = await _ask(agent, QUESTION, is_async=is_async)
    system, question = model.prompts[0]
    found = [document.page_content for document in filled.invoke(QUESTION)]
    expected = "\n\n".join(["Be brief.", "Answer from these:", *found])
    assert message_chunks(system) == (expected, tuple(found))
    assert question.text == QUESTION
    assert begun[0][0] == found
    assert begun[0][1].result(60) == 2
    assert _hits(counted, model.prompts[0]) == [True, True]
    assert set(result) == {"messages"}
    assert [message.type for message in result["messages"]] == ["human", "ai"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_all_documents_are_hits_when_our_model_answers(counted, filled, is_async):
    """The agent's request reads every retrieved document, also one too short to recognise."""
    filled.upsert(texts_as_documents("A mat."))
    found = [document.page_content for document in filled.invoke(QUESTION)]
    assert "A mat." in found
    model = ChatPcRag(corpus=counted.corpus, max_tokens=4)
    agent = create_agent(model, middleware=[PromptCacheMiddleware(counted.corpus, filled)])
    num_encoded = counted.num_encoded
    result = await _ask(agent, QUESTION, is_async=is_async)
    modules = result["messages"][-1].response_metadata["pc_rag"]["modules"]
    hits = [module for module in modules if module["label"] != "(prefix)"]
    assert [module["label"] for module in hits] == [chunk_id_of(text) for text in found]
    assert all(module["hit_kind"] for module in hits)
    assert counted.num_encoded == num_encoded


@pytest.mark.parametrize("is_async", [False, True])
async def test_retrieval_runs_once_when_a_turn_has_several_model_calls(counted, filled, is_async):
    """All calls of a turn see the same documents; the next turn has its own."""
    retriever = CountedRetriever(filled)
    model = _model(_search_call(), AIMessage("The cat."), AIMessage("A dog."))

    @tool
    def search(query: str) -> str:
        """Search."""
        return "nothing"

    agent = create_agent(
        model,
        tools=[search],
        middleware=[PromptCacheMiddleware(counted.corpus, retriever.runnable)],
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": "1"}}
    await _ask(agent, QUESTION, config, is_async=is_async)
    assert retriever.questions == [QUESTION]
    assert model.prompts[0][0] == model.prompts[1][0]
    await _ask(agent, "Which dog barked?", config, is_async=is_async)
    assert retriever.questions == [QUESTION, "Which dog barked?"]
    assert message_chunks(model.prompts[2][0])[1][0] == DOG


async def test_system_message_keeps_its_blocks_when_it_is_a_list(counted, filled):
    """Blocks of the agent's own system message stay as they are."""
    model, own = _model(), {"type": "text", "text": "Be brief.", "cache_control": {"a": 1}}
    agent = create_agent(
        model,
        middleware=[PromptCacheMiddleware(counted.corpus, filled)],
        system_prompt=SystemMessage([own]),
    )
    await _ask(agent, QUESTION)
    system = model.prompts[0][0]
    assert system.content[0] == own
    assert system.text.startswith(f"Be brief.\n\n{CAT}")


async def test_documents_are_written_by_the_prompt_when_one_is_given(counted, filled):
    """Headers and separators are the user's, and the chunks are still named."""
    prompt = PromptTemplate.from_template("[{source}] {page_content}")
    middleware = PromptCacheMiddleware(
        counted.corpus, filled, document_prompt=prompt, separator=" | "
    )
    model = _model()
    await _ask(create_agent(model, middleware=[middleware]), QUESTION)
    text, chunks = message_chunks(model.prompts[0][0])
    assert text == " | ".join(f"[a.txt] {chunk}" for chunk in chunks)
    assert len(chunks) == 2


@pytest.mark.parametrize("system_prompt", ["", "Answer."])
async def test_prompt_is_plain_when_nothing_is_retrieved(counted, system_prompt):
    """Without documents there is the system prompt, or no system message."""
    model = _model()
    middleware = PromptCacheMiddleware(
        counted.corpus, RunnableLambda(lambda _: []), system_prompt=system_prompt
    )
    await _ask(create_agent(model, middleware=[middleware]), QUESTION)
    texts = [message.text for message in model.prompts[0]]
    assert texts == [text for text in (system_prompt, QUESTION) if text]


@pytest.mark.parametrize("is_async", [False, True])
async def test_chunks_are_named_when_a_retriever_tool_answers(counted, filled, is_async):
    """The answer's text is the tool's own; its documents are named, warmed, and hits."""
    search = create_retriever_tool(
        filled,
        "search",
        "Searches.",
        document_prompt=PromptTemplate.from_template("Source: {source}\nContent: {page_content}"),
        response_format="content_and_artifact",
    )
    begun = warmings(counted.corpus)
    model = _model(_search_call(), AIMessage("The cat."))
    agent = create_agent(model, tools=[search], middleware=[PromptCacheMiddleware(counted.corpus)])
    result = await _ask(agent, QUESTION, is_async=is_async)
    found = [document.page_content for document in filled.invoke(QUESTION)]
    answer = model.prompts[1][-1]
    text = "\n\n".join(f"Source: a.txt\nContent: {chunk}" for chunk in found)
    assert message_chunks(answer) == (text, tuple(found))
    assert [document.page_content for document in answer.artifact] == found
    assert begun[0][1].result(60) == 2
    assert result["messages"][2].content == answer.content


@pytest.mark.parametrize(
    "answer",
    [
        ToolMessage("nothing found", artifact=texts_as_documents(CAT), tool_call_id="1"),
        ToolMessage(CAT, artifact=None, tool_call_id="1"),
        ToolMessage(CAT, artifact=[CAT], tool_call_id="1"),
        ToolMessage(CAT, artifact={"documents": 1}, tool_call_id="1"),
        ToolMessage([{"type": "text", "text": CAT}], artifact=[], tool_call_id="1"),
        Command(update={"messages": []}),
    ],
)
async def test_answer_passes_unchanged_when_no_document_stands_in_it(counted, answer):
    """Other tools' answers, and commands, are not touched."""
    middleware = PromptCacheMiddleware(counted.corpus)
    before = answer.model_copy(deep=True) if isinstance(answer, ToolMessage) else answer

    async def handle(_):
        return answer

    assert middleware.wrap_tool_call(None, lambda _: answer) is answer
    assert await middleware.awrap_tool_call(None, handle) is answer
    assert answer == before


def test_tools_own_message_stays_as_it_is_when_its_chunks_are_named(counted):
    """What the tool returned may be kept by others; a copy of it holds the blocks."""
    own = ToolMessage(CAT, artifact=texts_as_documents(CAT), tool_call_id="1")
    named = PromptCacheMiddleware(counted.corpus).wrap_tool_call(None, lambda _: own)
    assert own.content == CAT
    assert message_chunks(named) == (CAT, (CAT,))


def test_extra_is_named_when_langchain_is_absent():
    """Without the package ``langchain`` the class is an error that names what to install."""
    program = (
        "import sys\n"
        "sys.modules['langchain'] = None\n"
        "import langchain_pc_rag\n"
        "langchain_pc_rag.format_chunks\n"
        "try:\n"
        "    langchain_pc_rag.PromptCacheMiddleware\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("MissingDependencyError PromptCacheMiddleware needs")
    assert "langchain-pc-rag[agents]" in done.stdout


def test_version_is_named_when_langchain_is_too_old():
    """Middleware of two type parameters, as before 1.2.10, is told to be too old."""
    program = (
        "import typing\n"
        "import langchain.agents.middleware as middleware\n"
        "S, C = typing.TypeVar('S'), typing.TypeVar('C')\n"
        "class Old(typing.Generic[S, C]): pass\n"
        "middleware.AgentMiddleware = Old\n"
        "import langchain_pc_rag\n"
        "try:\n"
        "    langchain_pc_rag.PromptCacheMiddleware\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("MissingDependencyError PromptCacheMiddleware")
    assert "langchain >= 1.2.10" in done.stdout
    assert "langchain-pc-rag[agents]" in done.stdout


def test_nothing_is_imported_when_the_package_is():
    """``import langchain_pc_rag`` brings neither langchain, langchain-core nor torch."""
    program = (
        "import sys, langchain_pc_rag\n"
        "dir(langchain_pc_rag)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} "
        "& {'langchain', 'langchain_core', 'langgraph', 'torch', 'transformers'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
