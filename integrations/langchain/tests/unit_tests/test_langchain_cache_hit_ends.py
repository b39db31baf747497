"""A model call is counted once, by how it ended: told, replayed, left, failed or silent."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.tools import tool
from langchain_pc_rag import CacheHitHandler, CallOutcome

from pc_rag.metrics import Outcome
from pc_rag.types import FinishReason
from tests.support.langchain_chains import METRICS, OSLO, chain_of, config
from tests.support.langchain_models import ListRetriever, SpeakingChat, SpeakingLLM
from tests.support.uses import metrics_of, use_of


@pytest.fixture
def handler():
    return CacheHitHandler()


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_answer_is_replayed_and_no_hit_when_the_response_cache_gave_it(handler, way):
    """The replayed metrics are of a request that was counted before."""
    model = SpeakingChat(metrics=METRICS, num_output_tokens=3, cache=InMemoryCache())
    for _ in range(3):
        if way == "invoke":
            await asyncio.to_thread(model.invoke, "?", config(handler))
        else:
            await model.ainvoke("?", config(handler))
    assert handler.num_replayed == 2
    assert handler.snapshot().total.num_requests == 1
    assert handler.snapshot().total.num_cache_read_tokens == 10
    assert handler.last_run.num_module_hits == 0
    assert "the response cache answered" in handler.report()


@pytest.mark.parametrize("model", [SpeakingChat(metrics=METRICS), SpeakingLLM(metrics=METRICS)])
def test_request_is_cancelled_once_when_the_consumer_leaves_a_stream(handler, model):
    """A break is no failure; the chain's run ends before the model's, and still has its call."""
    chain = chain_of(model)
    stream = (chain.first | chain.middle[0] | model).stream("?", config(handler))
    next(stream)
    stream.close()
    gc.collect()
    assert handler.snapshot().total.requests == {
        Outcome.COMPLETED: 0,
        Outcome.CANCELLED: 1,
        Outcome.FAILED: 0,
    }
    assert handler.last_run.calls[CallOutcome.CANCELLED] == 1
    assert handler.last_run.num_documents == 3
    assert handler._tree.num_open_runs == 0


def test_request_is_counted_once_when_a_parser_drains_what_the_consumer_left(handler):
    """LangChain's parsers pull a model to its end for their trace: that request was whole."""
    stream = chain_of(SpeakingChat(metrics=METRICS)).stream("?", config(handler))
    assert next(stream) == "Nor"
    stream.close()
    gc.collect()
    assert handler.snapshot().total.num_requests == 1
    assert handler.snapshot().total.requests[Outcome.FAILED] == 0
    assert sum(handler.last_run.calls.values()) == 1
    assert handler._tree.num_open_runs == 0


async def test_request_is_cancelled_once_when_the_consumer_leaves_an_async_stream(handler):
    """The same where the generator is closed on the loop."""
    stream = chain_of(SpeakingChat(metrics=METRICS)).astream("?", config(handler))
    assert await anext(stream) == "Nor"
    await stream.aclose()
    for _ in range(20):
        await asyncio.sleep(0)
    assert handler.snapshot().total.requests[Outcome.CANCELLED] == 1
    assert handler.snapshot().total.num_requests == 1


def test_metrics_are_counted_when_the_consumer_leaves_behind_the_last_piece(handler):
    """The request was whole; its numbers came with the piece that the consumer took last."""
    stream = SpeakingChat(metrics=METRICS).stream("?", config(handler))
    for piece in stream:
        if piece.chunk_position == "last":
            break
    stream.close()
    assert handler.calls[CallOutcome.REPORTED] == 1
    assert handler.snapshot().total.requests[Outcome.COMPLETED] == 1


def test_metrics_say_cancelled_when_the_engine_does(handler):
    """A request that the engine itself saw cancelled is counted as that."""
    metrics = metrics_of(use_of(OSLO), finish_reason=FinishReason.CANCELLED)
    SpeakingChat(metrics=metrics).invoke("?", config(handler))
    assert handler.snapshot().total.requests[Outcome.CANCELLED] == 1


@pytest.mark.parametrize("model", [SpeakingChat(fail_at=1), SpeakingLLM(fail_at=1)])
@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_request_is_failed_once_when_the_model_raises(handler, model, way):
    """The error reaches the caller, and is counted."""
    with pytest.raises(ZeroDivisionError):
        list(getattr(chain_of(model), way)("?", config(handler)))
    assert handler.snapshot().total.requests[Outcome.FAILED] == 1
    assert handler.snapshot().total.num_requests == 1
    assert handler.last_run.calls[CallOutcome.FAILED] == 1
    assert handler._tree.num_open_runs == 0


def test_run_ends_when_its_retriever_or_tool_raises(handler):
    """What failed on the way leaves nothing behind."""

    @tool
    def broken(query: str) -> str:
        """Fail."""
        raise OSError(query)

    with pytest.raises(OSError, match="index is gone"):
        chain_of(SpeakingChat(), ListRetriever(has_failed=True)).invoke("?", config(handler))
    with pytest.raises(OSError, match="x"):
        broken.invoke("x", config(handler))
    assert len(handler.runs) == 2
    assert handler._tree.num_open_runs == 0
    assert handler.snapshot().total.num_requests == 0
    assert "no model was called" in handler.report()


def test_call_is_unreported_when_another_model_answers(handler):
    """A model without our metrics is no miss."""
    chain_of(SpeakingChat()).invoke("?", config(handler))
    assert handler.calls[CallOutcome.UNREPORTED] == 1
    assert handler.snapshot().total.num_requests == 0
    assert "1 brought no metrics of pc-rag" in handler.report()
    assert "it is another model" in handler.report()


@pytest.mark.parametrize(
    "malformed", [{"template": "x"}, "what", {**METRICS.to_dict(), "tenant": 1}]
)
def test_call_is_unreadable_when_metrics_are_malformed(handler, malformed):
    """A fault in them is shown; the chain and the bookkeeping go on."""
    chain_of(SpeakingChat(malformed=malformed)).invoke("?", config(handler))
    assert handler.calls[CallOutcome.UNREADABLE] == 1
    assert "unreadable metrics, the latest: metrics of a request: " in handler.report()
    assert handler._tree.num_open_runs == 0


def test_handler_does_not_lock_itself_out_when_streams_are_collected(handler):
    """The garbage collector may close a stream while the same thread is inside the handler."""
    stream = SpeakingChat(metrics=METRICS).stream("?", config(handler))
    next(stream)
    done = threading.Event()

    def collect() -> None:
        nonlocal stream
        with handler._lock, handler.stats._lock:
            stream = None
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(20)
    assert handler.calls[CallOutcome.CANCELLED] == 1
