"""What a query found in the cache is counted once, explained, and kept apart by query."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import BaseRetriever
from llama_index.llms.pc_rag import CacheHitEventHandler, CallOutcome, DocumentOutcome
from llama_index_instrumentation import get_dispatcher

from pc_rag.errors import ConfigError
from pc_rag.types import HitKind, MissReason
from tests.support.llama_index_queries import (
    SpeakingLLM,
    answer_of,
    ask,
    engine_of,
    nodes_of,
)
from tests.support.uses import TEXTS, metrics_of, use_of

OSLO, LIMA, ROME = TEXTS
METRICS = metrics_of(use_of(OSLO), use_of(LIMA, MissReason.NOT_STORED))
FATES = {
    "Oslo": (DocumentOutcome.HIT, None),
    "Lima": (DocumentOutcome.MISS, MissReason.NOT_STORED),
    "Rome": (DocumentOutcome.NOT_INDEXED, None),
}

dispatcher = get_dispatcher(__name__)


@pytest.fixture
def handler():
    with CacheHitEventHandler() as handler:
        yield handler


def fates(run):
    return {each.source: (each.outcome, each.miss_reason) for each in run.documents}


def counts(handler):
    return {outcome: count for outcome, count in handler.calls.items() if count}


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_query_is_one_run_when_it_retrieved_and_asked(handler, is_chat, streaming, is_async):
    """Nodes have their outcomes in every way to ask, streams included (pitfalls 29, 32, 34)."""
    llm = SpeakingLLM(reported=METRICS, is_chat=is_chat)
    assert await ask(engine_of(llm, streaming=streaming), is_async=is_async) == "Norway."
    (run,) = handler.runs
    assert run.run_id.startswith("RetrieverQueryEngine.")
    assert fates(run) == FATES
    assert counts(handler) == {CallOutcome.REPORTED: 1}
    assert run.calls[CallOutcome.REPORTED] == 1
    assert (run.num_module_hits, run.module_misses[MissReason.NOT_STORED]) == (1, 1)
    assert (run.num_prompt_tokens, run.num_cache_read_tokens) == (40, 10)
    assert handler.snapshot().total.num_requests == 1
    assert handler.num_open_runs == 0


def test_fate_is_found_when_prompts_hold_metadata_or_text_alone(handler):
    """A node is known by what the prompt holds of it, and by its text alone (pitfalls 34, 38)."""
    nodes = nodes_of("Whole text with metadata.", "Alone is this text.", "Part of a text.", "Tiny")
    nodes[0].metadata["file"] = "a.txt"
    nodes[1].metadata["file"] = "b.txt"
    uses = (
        use_of("file: a.txt\n\nWhole text with metadata."),
        use_of("Alone is this text."),
        use_of("Part of a text.", hit_kind=HitKind.PARTIAL),
    )
    llm = SpeakingLLM(reported=metrics_of(*uses))
    engine_of(llm, nodes).query("?")
    assert {source: fate for source, (fate, _) in fates(handler.last_run).items()} == {
        "Whole": DocumentOutcome.HIT,
        "Alone": DocumentOutcome.HIT,
        "Part": DocumentOutcome.PARTIAL,
        "Tiny": DocumentOutcome.TOO_SHORT,
    }


def test_nodes_are_not_in_the_prompt_when_nobody_asks(handler):
    """A retrieval alone is a run of its own, and what embeds only is none."""
    engine = engine_of(MockLLM())
    assert handler.runs == ()
    engine.retriever.retrieve("?")
    assert {fate for fate, _ in fates(handler.last_run).values()} == {DocumentOutcome.NOT_IN_PROMPT}
    assert len(handler.runs) == 1


class RetrieverOfRetrievers(BaseRetriever):
    """Gives what it chooses of another's."""

    def __init__(self, inner):
        super().__init__()
        self._inner = inner

    def _retrieve(self, query_bundle):
        return [each for each in self._inner.retrieve(query_bundle) if "Oslo" in each.text]


def test_nodes_are_those_of_the_outermost_when_retrievers_nest(handler):
    """What an inner retriever found is no document before the outer chose it."""
    RetrieverOfRetrievers(engine_of(MockLLM()).retriever).retrieve("?")
    assert list(fates(handler.last_run)) == ["Oslo"]


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_call_is_unreported_when_another_model_answers(handler, is_chat, streaming, is_async):
    """Another model is one call without metrics, however many events it sends."""
    engine = engine_of(MockLLM(max_tokens=3, is_chat_model=is_chat), streaming=streaming)
    assert await ask(engine, is_async=is_async) == "text text text"
    assert counts(handler) == {CallOutcome.UNREPORTED: 1}
    assert handler.last_run.calls[CallOutcome.UNREPORTED] == 1
    assert handler.last_run.num_documents == 3
    assert handler.snapshot().total.num_requests == 0
    assert "1 brought no metrics of pc-rag" in handler.report()


def test_call_is_unreadable_when_metrics_are_malformed(handler):
    """Malformed metrics are told, and are no zero hits."""
    engine_of(SpeakingLLM(reported={"prompt_tokens": "many"})).query("?")
    assert counts(handler) == {CallOutcome.UNREADABLE: 1}
    assert "unreadable metrics, the latest: " in handler.report()


def test_runs_stay_apart_when_queries_run_in_threads(handler):
    """Each query has its own nodes and hits, whichever threads interleave."""
    engines = [
        engine_of(SpeakingLLM(reported=metrics_of(use_of(text))), nodes_of(text), streaming=odd)
        for text in TEXTS
        for odd in (False, True)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda engine: answer_of(engine.query("?")), engines * 4))
    finally:
        sys.setswitchinterval(interval)
    assert counts(handler) == {CallOutcome.REPORTED: 24}
    assert len(handler.runs) == 24
    for run in handler.runs:
        assert [each.outcome for each in run.documents] == [DocumentOutcome.HIT]
        assert [each.label for each in run.modules] == [run.documents[0].chunk_id]
    assert handler.num_open_runs == 0


async def test_runs_stay_apart_when_tasks_interleave(handler):
    """The same on one event loop."""
    engines = [
        engine_of(
            SpeakingLLM(reported=metrics_of(use_of(text)), is_chat=True),
            nodes_of(text),
            streaming=streaming,
        )
        for text in TEXTS
        for streaming in (False, True)
    ]
    await asyncio.gather(*(ask(engine, is_async=True) for engine in engines * 2))
    assert counts(handler) == {CallOutcome.REPORTED: 12}
    assert len(handler.runs) == 12
    for run in handler.runs:
        assert [each.outcome for each in run.documents] == [DocumentOutcome.HIT]


def test_streams_belong_to_their_queries_when_they_are_read_in_turn(handler):
    """A stream is its query's, also where another query or a span of the consumer is open."""
    engines = [
        engine_of(SpeakingLLM(reported=metrics_of(use_of(text))), nodes_of(text), streaming=True)
        for text in TEXTS
    ]
    responses = [engine.query("?") for engine in engines]
    assert handler.runs == ()

    @dispatcher.span
    def read_in_turn() -> None:
        for _ in range(5):
            for response in responses:
                next(response.response_gen, None)

    read_in_turn()
    assert len(handler.runs) == 3
    for run in handler.runs:
        assert [each.outcome for each in run.documents] == [DocumentOutcome.HIT]


class AskingTwice(SpeakingLLM):
    """A model of the user's that asks another twice for one answer."""

    other: SpeakingLLM

    def complete(self, prompt, formatted=False, **kwargs):
        self.other.complete(prompt)
        return self.other.complete(prompt)


def test_each_request_is_counted_when_a_model_asks_another_twice(handler):
    """Two requests inside one call are two."""
    other = SpeakingLLM(reported=METRICS)
    engine_of(AskingTwice(other=other, is_chat=True)).query("?")
    assert counts(handler) == {CallOutcome.REPORTED: 2}
    assert handler.snapshot().total.num_requests == 2
    assert len(handler.runs) == 1


def test_calls_are_runs_of_their_own_when_no_span_is_followed():
    """A handler that was merely added counts calls, and relates them to no retrieval."""
    handler, root = CacheHitEventHandler(), get_dispatcher()
    root.add_event_handler(handler)
    try:
        engine_of(SpeakingLLM(reported=METRICS)).query("?")
        answer_of(engine_of(SpeakingLLM(reported=METRICS), streaming=True).query("?"))
    finally:
        root.event_handlers.remove(handler)
    assert counts(handler) == {CallOutcome.REPORTED: 2}
    assert [run.num_module_hits for run in handler.runs] == [1, 1]
    assert [run.num_documents for run in handler.runs] == [0, 0]
    assert handler.runs[0].run_id.startswith("SpeakingLLM.complete-")
    assert handler.num_open_runs == 0


def test_nothing_is_heard_when_the_handler_is_detached():
    """What was counted stays; the dispatcher is as it was."""
    root = get_dispatcher()
    before = (list(root.event_handlers), list(root.span_handlers))
    handler, engine = CacheHitEventHandler(), engine_of(SpeakingLLM(reported=METRICS))
    with handler.attach() as same:
        assert same is handler
        engine.query("?")
    engine.query("?")
    handler.detach()
    assert counts(handler) == {CallOutcome.REPORTED: 1}
    assert list(map(id, root.event_handlers)) == list(map(id, before[0]))
    assert list(map(id, root.span_handlers)) == list(map(id, before[1]))
    with handler:
        engine.query("?")
    assert counts(handler) == {CallOutcome.REPORTED: 2}


def test_handler_is_refused_when_it_is_attached_already(handler):
    """Attached twice it would count everything twice."""
    with pytest.raises(ConfigError, match=r"detach\(\)"):
        handler.attach()
    with pytest.raises(ConfigError, match="attached to a dispatcher already"):
        handler.attach(get_dispatcher("elsewhere"))


def test_other_dispatchers_are_not_heard_when_one_was_chosen():
    """A handler on a dispatcher hears what is below it."""
    with CacheHitEventHandler().attach(get_dispatcher("elsewhere")) as handler:
        engine_of(SpeakingLLM(reported=METRICS)).query("?")
    assert counts(handler) == {}


def test_metrics_are_counted_when_the_handler_came_during_the_call():
    """A request that ends is counted, also where its start was not seen."""
    stream = SpeakingLLM(reported=METRICS).stream_complete("?")
    next(stream)
    with CacheHitEventHandler() as handler:
        list(stream)
    assert counts(handler) == {CallOutcome.REPORTED: 1}
    assert handler.snapshot().total.num_cache_read_tokens == 10


def test_oldest_report_leaves_when_there_are_too_many():
    """Memory is bounded; the sums remember."""
    with CacheHitEventHandler(max_runs=2) as handler:
        for text in TEXTS:
            engine_of(SpeakingLLM(reported=metrics_of(use_of(text)))).query("?")
    labels = [run.modules[0].label for run in handler.runs]
    assert labels == [use_of(LIMA).label, use_of(ROME).label]
    assert handler.snapshot().total.num_requests == 3


def test_limit_is_refused_when_below_one():
    """A handler that keeps no run has nothing to report."""
    with pytest.raises(ConfigError, match="CacheHitEventHandler: max_runs is 0"):
        CacheHitEventHandler(max_runs=0)


def test_dictionary_is_json_when_runs_were_reported(handler):
    """Sums, runs and their documents survive JSON."""
    engine_of(SpeakingLLM(reported=METRICS)).query("?")
    plain = handler.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["calls"]["reported"] == 1
    assert plain["stats"]["total"]["num_cache_read_tokens"] == 10
    assert plain["runs"][0]["num_documents_hit"] == 1


def test_report_names_every_reason_when_modules_were_missed(handler):
    """No hit rate stands there without telling why (pitfall 34)."""
    modules = [use_of(f"text {reason}", reason) for reason in MissReason]
    engine_of(SpeakingLLM(reported=metrics_of(*modules))).query("?")
    report = handler.report()
    for reason in MissReason:
        assert f"1  {reason}: " in report
    assert "Oslo: not indexed" in report


def test_collector_shows_the_sums_when_scraped(handler):
    """A Prometheus registry takes the handler's collector."""
    prometheus = pytest.importorskip("prometheus_client", reason="the extra `prometheus`")
    registry = prometheus.CollectorRegistry()
    registry.register(handler.collector())
    engine_of(SpeakingLLM(reported=METRICS)).query("?")
    labels = {"template": "travel", "tenant": ""}
    assert registry.get_sample_value("pc_rag_cache_read_tokens_total", labels) == 10
