"""What a chain found in the cache is counted once, explained, and kept apart by run."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from langchain.agents import create_agent
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool, tool
from langchain_pc_rag import CacheHitHandler, CallOutcome, DocumentOutcome

from pc_rag.errors import ConfigError
from pc_rag.types import MissReason
from tests.support.langchain_chains import (
    EXPECTED_FATES,
    LIMA,
    METRICS,
    OSLO,
    ROME,
    chain_of,
    config,
    fates,
    joined,
)
from tests.support.langchain_models import (
    ListRetriever,
    RetrieverOfRetrievers,
    SpeakingChat,
    SpeakingLLM,
    ToolCallingChat,
)
from tests.support.uses import TEXTS, metrics_of, use_of


@pytest.fixture
def handler():
    return CacheHitHandler()


@pytest.mark.parametrize("model", [SpeakingChat(metrics=METRICS), SpeakingLLM(metrics=METRICS)])
@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
async def test_run_is_reported_when_a_chain_ran(handler, model, way):
    """Each document has its outcome, each module its reason, each token its place."""
    chain = chain_of(model)
    if way == "invoke":
        await asyncio.to_thread(chain.invoke, "?", config(handler))
    elif way == "stream":
        assert "".join(chain.stream("?", config(handler))) == "Norway."
    elif way == "ainvoke":
        await chain.ainvoke("?", config(handler))
    else:
        assert "".join([piece async for piece in chain.astream("?", config(handler))]) == "Norway."
    run = handler.last_run
    assert handler.runs == (run,)
    assert (run.num_documents, run.num_documents_hit) == (3, 1)
    assert fates(run) == EXPECTED_FATES
    assert (run.num_module_hits, run.module_misses[MissReason.NOT_STORED]) == (1, 1)
    assert run.module_hit_rate == 0.5
    assert (run.num_cache_read_tokens, run.num_prompt_tokens) == (10, 40)
    assert run.saved_seconds == pytest.approx(10 / 1000 - 0.002)
    assert run.ttft_seconds == 0.25
    assert run.calls[CallOutcome.REPORTED] == 1
    assert handler.snapshot().total.num_cache_read_tokens == 10
    assert handler._tree.num_open_runs == 0


def test_sums_are_kept_by_template_when_several_models_ran(handler):
    """Hit rates, reasons and savings of each template, and of all."""
    other = metrics_of(use_of(ROME), template="legal", rate=None)
    for metrics in (METRICS, other, METRICS):
        chain_of(SpeakingChat(metrics=metrics)).invoke("?", config(handler))
    travel, legal = handler.snapshot().groups
    assert (travel.template, travel.num_requests, travel.module_hit_rate) == ("travel", 2, 0.5)
    assert (legal.template, legal.module_hit_rate, legal.num_unknown_savings) == ("legal", 1.0, 1)
    assert handler.snapshot().total.saved_seconds == pytest.approx(2 * 0.008)


def test_documents_are_found_when_a_retrieval_chain_of_classic_ran(handler):
    """The chain that many applications still use nests its runs deeper."""
    prompt = ChatPromptTemplate.from_template("{context}\n{input}")
    stuff = create_stuff_documents_chain(SpeakingChat(metrics=METRICS), prompt)
    chain = create_retrieval_chain(ListRetriever(), stuff)
    chain.invoke({"input": "?"}, config(handler))
    assert fates(handler.last_run) == EXPECTED_FATES


def test_documents_are_found_when_a_function_retrieves(handler):
    """Without a retriever, a function that returns documents stands in for it."""
    fetch = RunnableLambda(lambda _: [Document(OSLO, id="o"), Document(LIMA, id="l")])
    chain_of(SpeakingChat(metrics=METRICS), fetch).invoke("?", config(handler))
    assert {key: fate[0] for key, fate in fates(handler.last_run).items()} == {
        "o": DocumentOutcome.HIT,
        "l": DocumentOutcome.MISS,
    }


def test_functions_are_not_believed_when_a_retriever_spoke(handler):
    """A step that rewrites what was retrieved makes no documents of its own."""
    shout = RunnableLambda(lambda found: [Document(each.page_content.upper()) for each in found])
    chain_of(SpeakingChat(metrics=METRICS), ListRetriever() | shout).invoke("?", config(handler))
    rewritten = {"Rome": (DocumentOutcome.NOT_IN_PROMPT, None)}
    assert fates(handler.last_run) == EXPECTED_FATES | rewritten


def test_documents_are_those_of_the_outermost_when_retrievers_nest(handler):
    """What an inner retriever offered and the outer one dropped was not retrieved."""
    retriever = RetrieverOfRetrievers(inner=ListRetriever())
    chain_of(SpeakingChat(metrics=METRICS), retriever).invoke("?", config(handler))
    assert fates(handler.last_run) == {"Oslo": (DocumentOutcome.HIT, None)}


@pytest.mark.parametrize("way", ["invoke", "stream", "astream"])
@pytest.mark.parametrize("is_retriever", [True, False])
async def test_calls_are_one_run_when_an_agent_uses_a_tool(handler, way, is_retriever):
    """Both model calls and the tool's retrieval belong to the agent's run."""

    @tool("search", response_format="content_and_artifact")
    def fetch(query: str):
        """Look it up."""
        found = [Document(text, metadata={"source": text[:4]}) for text in TEXTS]
        return joined(found), found

    search = create_retriever_tool(ListRetriever(), "search", "Look it up.")
    model = ToolCallingChat(metrics=METRICS)
    agent = create_agent(model, tools=[search if is_retriever else fetch])
    question = {"messages": [("user", "?")]}
    if way == "invoke":
        await asyncio.to_thread(agent.invoke, question, config(handler))
    elif way == "stream":
        list(agent.stream(question, config(handler), stream_mode="messages"))
    else:
        async for _ in agent.astream(question, config(handler), stream_mode="messages"):
            pass
    (run,) = handler.runs
    assert run.calls[CallOutcome.REPORTED] == 2
    assert fates(run) == EXPECTED_FATES
    assert run.num_module_hits == 2
    assert handler.snapshot().total.num_requests == 2
    assert handler._tree.num_open_runs == 0


def test_best_use_of_a_document_stands_when_a_later_call_missed_it(handler):
    """A document that one prompt of a run read is a hit, and both uses are counted."""
    lost = metrics_of(use_of(OSLO, MissReason.IO))
    first, second = (SpeakingChat(metrics=metrics) for metrics in (METRICS, lost))
    chain = ListRetriever() | RunnableLambda(joined) | first | StrOutputParser() | second
    chain.invoke("?", config(handler))
    assert fates(handler.last_run)["Oslo"] == (DocumentOutcome.HIT, None)
    assert handler.last_run.num_module_hits == 1
    assert handler.last_run.module_misses[MissReason.IO] == 1


def test_model_is_its_own_run_when_it_is_called_alone(handler):
    """No chain, no documents, and still a report."""
    SpeakingChat(metrics=METRICS).invoke("?", config(handler))
    assert handler.last_run.num_documents == 0
    assert handler.last_run.num_module_hits == 1


def test_handler_works_when_it_hangs_on_the_model_only(handler):
    """The parents it never saw make no difference but for retrieval."""
    chain_of(SpeakingChat(metrics=METRICS, callbacks=[handler])).invoke("?")
    (run,) = handler.runs
    assert (run.num_documents, run.num_module_hits) == (0, 1)


@pytest.fixture
def eager_switching():
    """Threads take turns as often as the interpreter can, so that a missing lock shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_runs_stay_apart_when_a_batch_runs_in_threads(handler):
    """Every run has its own documents and call, and no call is lost."""
    chain = chain_of(SpeakingChat(metrics=METRICS))
    chain.batch(["?"] * 40, {**config(handler), "max_concurrency": 8})
    assert len({run.run_id for run in handler.runs}) == 40
    assert all(run.calls[CallOutcome.REPORTED] == 1 for run in handler.runs)
    assert all(fates(run) == EXPECTED_FATES for run in handler.runs)
    assert handler.snapshot().total.num_requests == 40
    assert handler._tree.num_open_runs == 0


async def test_runs_stay_apart_when_tasks_interleave(handler):
    """The same on one event loop."""
    chain = chain_of(SpeakingChat(metrics=METRICS))
    await chain.abatch(["?"] * 20, config(handler))
    assert len(handler.runs) == 20
    assert all(fates(run) == EXPECTED_FATES for run in handler.runs)


def test_oldest_report_leaves_when_there_are_too_many():
    """Memory is bounded; the sums remember."""
    handler = CacheHitHandler(max_runs=2)
    for text in TEXTS:
        SpeakingChat(metrics=metrics_of(use_of(text))).invoke("?", config(handler))
    labels = [run.modules[0].label for run in handler.runs]
    assert labels == [use_of(LIMA).label, use_of(ROME).label]
    assert handler.snapshot().total.num_requests == 3


def test_report_names_every_reason_when_modules_were_missed(handler):
    """No hit rate stands there without telling why."""
    modules = [use_of(f"text {reason}", reason) for reason in MissReason]
    chain_of(SpeakingChat(metrics=metrics_of(*modules))).invoke("?", config(handler))
    report = handler.report()
    for reason in MissReason:
        assert f"1  {reason}: " in report
    assert f"0 of {len(MissReason)} (0.0%)" in report
    assert "Oslo: not indexed" in report


def test_report_says_so_when_there_was_nothing_to_hit(handler):
    """A prompt without modules is told apart from misses, and both from nothing at all."""
    assert "no request was counted" in handler.report()
    chain_of(SpeakingChat(metrics=metrics_of())).invoke("?", config(handler))
    assert "nothing of it was encoded at ingestion" in handler.report()


def test_dictionary_is_json_when_runs_were_reported(handler):
    """Sums, runs and their documents survive JSON."""
    chain_of(SpeakingChat(metrics=METRICS)).invoke("?", config(handler))
    plain = handler.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["calls"]["reported"] == 1
    assert plain["stats"]["total"]["num_cache_read_tokens"] == 10
    assert plain["runs"][0]["documents"][1]["miss_reason"] == "not-stored"
    assert plain["runs"][0]["module_hit_rate"] == 0.5


def test_collector_shows_the_sums_when_scraped(handler):
    """A Prometheus registry takes the handler's collector."""
    prometheus = pytest.importorskip("prometheus_client", reason="the extra `prometheus`")
    registry = prometheus.CollectorRegistry()
    registry.register(handler.collector())
    chain_of(SpeakingChat(metrics=METRICS)).invoke("?", config(handler))
    labels = {"template": "travel", "tenant": ""}
    assert registry.get_sample_value("pc_rag_cache_read_tokens_total", labels) == 10
    assert registry.get_sample_value("pc_rag_saved_seconds", labels) == pytest.approx(0.008)


def test_limit_is_refused_when_below_one():
    """A handler that keeps no run has nothing to report."""
    with pytest.raises(ConfigError, match="max_runs is 0"):
        CacheHitHandler(max_runs=0)
