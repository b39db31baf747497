"""However a call ends, it is counted once, and its query's run ends with it."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.llms.pc_rag import CacheHitEventHandler, CallOutcome, DocumentOutcome
from llama_index_instrumentation import get_dispatcher

from pc_rag.metrics import Outcome
from pc_rag.types import FinishReason
from tests.support.llama_index_queries import (
    EventList,
    SpeakingLLM,
    answer_of,
    ask,
    engine_of,
)
from tests.support.uses import TEXTS, metrics_of, use_of

METRICS = metrics_of(use_of(TEXTS[0]))


@pytest.fixture
def handler():
    with CacheHitEventHandler() as handler:
        yield handler


def counts(handler):
    return {outcome: count for outcome, count in handler.calls.items() if count}


def requests(handler):
    return {outcome: count for outcome, count in handler.snapshot().total.requests.items() if count}


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("is_ours", [False, True])
def test_request_is_cancelled_once_when_the_consumer_leaves_a_stream(handler, is_chat, is_ours):
    """A stream closed early is one cancelled request and no failure (pitfall 26)."""
    told = metrics_of(use_of(TEXTS[0]), finish_reason=FinishReason.CANCELLED)
    llm = SpeakingLLM(reported=told if is_ours else None, is_chat=is_chat)
    response = engine_of(llm, streaming=True).query("?")
    next(response.response_gen)
    response.response_gen.close()
    gc.collect()
    assert counts(handler) == {CallOutcome.CANCELLED: 1}
    assert requests(handler) == {Outcome.CANCELLED: 1}
    (run,) = handler.runs
    assert run.num_documents_hit == int(is_ours)  # metrics come behind the end, and explain it
    assert handler.num_open_runs == 0


async def test_request_is_cancelled_once_when_the_consumer_leaves_an_async_stream(handler):
    """The same on an event loop."""
    engine = engine_of(SpeakingLLM(reported=METRICS, is_chat=True), streaming=True)
    response = await engine.aquery("?")
    await anext(response.response_gen)
    await response.response_gen.aclose()
    for _ in range(9):  # the loop closes what stands inside, a level a round
        gc.collect()
        await asyncio.sleep(0)
    assert counts(handler) == {CallOutcome.CANCELLED: 1}
    assert requests(handler) == {Outcome.CANCELLED: 1}
    assert len(handler.runs) == 1


def test_metrics_are_counted_when_the_consumer_leaves_behind_the_last_piece(handler):
    """Metrics come before the last piece: a consumer that leaves there had a whole answer."""
    stream = SpeakingLLM(reported=METRICS).stream_complete("?")
    for _ in range(4):
        next(stream)
    stream.close()
    assert counts(handler) == {CallOutcome.REPORTED: 1}
    assert requests(handler) == {Outcome.COMPLETED: 1}


def test_events_of_a_closed_stream_end_with_the_exception(handler):
    """Start, pieces, exception; our handler took them for one request (pitfall 26)."""
    with EventList() as events:
        stream = SpeakingLLM().stream_complete("?")
        next(stream)
        stream.close()
    assert events.names("LLM", "Exception") == [
        "LLMCompletionStartEvent",
        "LLMCompletionInProgressEvent",
        "ExceptionEvent",
    ]
    assert counts(handler) == {CallOutcome.CANCELLED: 1}


@pytest.mark.parametrize("is_referenced", [True, False])
def test_run_is_finished_when_nobody_will_read_its_stream(handler, is_referenced):
    """A stream that was thrown away called no model; one that may still be read is open."""
    response = engine_of(SpeakingLLM(reported=METRICS), streaming=True).query("?")
    if not is_referenced:
        del response
        gc.collect()
    assert len(handler.runs) == int(not is_referenced)
    assert counts(handler) == {}
    assert ("still open: " in handler.report()) == is_referenced
    if is_referenced:
        assert handler.num_open_runs > 0
        assert "".join(response.response_gen) == "Norway."
        assert counts(handler) == {CallOutcome.REPORTED: 1}
    (run,) = handler.runs
    outcome = DocumentOutcome.HIT if is_referenced else DocumentOutcome.NOT_IN_PROMPT
    assert outcome in {each.outcome for each in run.documents}
    assert handler.num_open_runs == 0


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_request_is_failed_once_when_the_model_raises(handler, is_chat, streaming, is_async):
    """An error counts once, at the start or in the middle of a stream."""
    engine = engine_of(SpeakingLLM(is_chat=is_chat, fails_at=1), streaming=streaming)
    with pytest.raises(ZeroDivisionError, match="the model broke"):
        await ask(engine, is_async=is_async)
    assert counts(handler) == {CallOutcome.FAILED: 1}
    assert requests(handler) == {Outcome.FAILED: 1}
    (run,) = handler.runs
    assert run.calls[CallOutcome.FAILED] == 1
    assert [each.outcome for each in run.documents] == [DocumentOutcome.UNKNOWN] * 3
    assert handler.num_open_runs == 0


class WaitingLLM(MockLLM):
    """Waits for ever, and says when it began."""

    started: Any = None

    @llm_completion_callback()
    async def acomplete(self, prompt, formatted=False, **kwargs):
        self.started.set()
        await asyncio.Event().wait()


async def test_request_is_cancelled_once_when_its_task_is(handler):
    """A cancelled task is no failure."""
    llm = WaitingLLM()
    llm.started = asyncio.Event()
    task = asyncio.create_task(engine_of(llm).aquery("?"))
    await llm.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert counts(handler) == {CallOutcome.CANCELLED: 1}
    assert requests(handler) == {Outcome.CANCELLED: 1}
    assert handler.num_open_runs == 0


def test_ended_streams_are_forgotten_when_nobody_reads_the_handler(handler):
    """Memory is bounded also where responses are kept and no report is ever asked for."""
    engine = engine_of(SpeakingLLM(reported=METRICS), streaming=True)
    kept = [engine.query("?") for _ in range(20)]
    assert all(answer_of(response) for response in kept)
    engine_of(SpeakingLLM(reported=METRICS)).query("?")
    assert not handler._streams._streams


def test_run_ends_when_its_retriever_raises(handler):
    """A query that never asked leaves nothing open."""
    engine = engine_of(MockLLM())

    def fail(bundle):
        raise ZeroDivisionError

    engine.retriever._retrieve = fail
    with pytest.raises(ZeroDivisionError):
        engine.query("?")
    assert counts(handler) == {}
    assert handler.num_open_runs == 0


def test_handler_does_not_lock_itself_out_when_streams_are_collected(handler):
    """The garbage collector may close a stream while the same thread is inside the handler."""
    stream = SpeakingLLM(reported=METRICS).stream_complete("?")
    next(stream)
    done = threading.Event()

    def collect() -> None:
        nonlocal stream
        with handler._runs._lock, handler.stats._lock, handler._calls._lock, handler._streams._lock:
            stream = None
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(20)
    assert handler.calls[CallOutcome.CANCELLED] == 1


def test_handlers_raise_nothing_when_events_are_odd(handler):
    """The dispatcher would swallow it: what is odd is left alone."""
    root = get_dispatcher()
    for event in (
        LLMChatEndEvent(messages=[], response=None, span_id=None),
        LLMChatEndEvent(messages=[], response=None, span_id="never started"),
        ExceptionEvent(exception=GeneratorExit(), span_id="never started"),
    ):
        handler.handle(event)
        root.event(event)
    assert counts(handler) == {}
