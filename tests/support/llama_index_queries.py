"""Query engines of LlamaIndex, and LLMs that say what they are told, on a clock of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from llama_index.core import MockEmbedding, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.llms.types import CompletionResponse, LLMMetadata
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.llms.pc_rag.events import PromptCacheEvent
from llama_index_instrumentation import get_dispatcher

from tests.support.uses import TEXTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.base.base_query_engine import BaseQueryEngine
    from llama_index.core.base.llms.types import CompletionResponseGen
    from llama_index.core.callbacks import CallbackManager
    from llama_index_instrumentation.base import BaseEvent

    from pc_rag.metrics import RequestMetrics

dispatcher = get_dispatcher(__name__)


class SpeakingLLM(CustomLLM):
    """Says its pieces, and tells of metrics as ours does. Its chat asks its complete.

    Attributes:
        pieces: What a stream shows.
        reported: Metrics that each call tells of; ``None`` for another model.
        is_chat: Whether query engines chat with it.
        fails_at: The piece before which it raises.
        name: What it is called; ``unknown`` says nothing.
        has_delta: Whether pieces carry what is new, and not only the text so far.
        own_raw: ``raw`` of its final response, beside the metrics.
        clock: Moved by a second before every piece.
    """

    pieces: tuple[str, ...] = ("Nor", "way", ".")
    reported: Any = None
    is_chat: bool = False
    fails_at: int | None = None
    name: str = "speaker"
    has_delta: bool = True
    own_raw: dict[str, Any] | None = None
    clock: Any = None

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name=self.name, is_chat_model=self.is_chat)

    def _tell(self, span_id: str | None, finish_reason: str = "stop") -> None:
        if self.reported is not None:
            dispatcher.event(
                PromptCacheEvent(
                    model_name=self.name,
                    finish_reason=finish_reason,
                    metrics=_plain(self.reported),
                    span_id=span_id,
                )
            )

    def _last(self, delta: str | None = None) -> CompletionResponse:
        raw = dict(self.own_raw or {})
        if self.reported is not None:
            raw["pc_rag"] = _plain(self.reported)
        return CompletionResponse(text="".join(self.pieces), delta=delta, raw=raw or None)

    def _say(self, index: int) -> str:
        if self.clock is not None:
            self.clock.advance(1.0)
        if index == self.fails_at:
            raise ZeroDivisionError("the model broke")
        return self.pieces[index]

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        for index in range(len(self.pieces)):
            self._say(index)
        self._tell(active_span_id.get())
        return self._last()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        span_id = active_span_id.get()

        def pieces() -> CompletionResponseGen:
            so_far = ""
            try:
                for index in range(len(self.pieces)):
                    piece = self._say(index)
                    so_far += piece
                    yield CompletionResponse(text=so_far, delta=piece if self.has_delta else None)
            except GeneratorExit:
                self._tell(span_id, "cancelled")
                raise
            self._tell(span_id)
            yield self._last(delta="")

        return pieces()

    @classmethod
    def class_name(cls) -> str:
        return "speaking_llm"


def _plain(metrics: RequestMetrics | dict[str, Any]) -> dict[str, Any]:
    return metrics if isinstance(metrics, dict) else metrics.to_dict()


def nodes_of(*texts: str, **fields: Any) -> list[TextNode]:
    """Nodes of these texts, with their first word as the source."""
    return [
        TextNode(
            text=text,
            metadata={"source": text.split()[0]},
            excluded_llm_metadata_keys=["source"],
            **fields,
        )
        for text in texts
    ]


def engine_of(
    llm: Any,
    nodes: Sequence[TextNode] | None = None,
    *,
    callback_manager: CallbackManager | None = None,
    **settings: Any,
) -> BaseQueryEngine:
    """A query engine that retrieves all of its nodes."""
    nodes = nodes_of(*TEXTS) if nodes is None else nodes
    index = VectorStoreIndex(
        list(nodes), embed_model=MockEmbedding(embed_dim=4), callback_manager=callback_manager
    )
    return RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=len(nodes)),
        get_response_synthesizer(llm=llm, callback_manager=callback_manager, **settings),
        callback_manager=callback_manager,
    )


def answer_of(response: Any) -> str:
    """The text of an answer, a stream read to its end."""
    stream = getattr(response, "response_gen", None)
    return str(response) if stream is None else "".join(stream)


async def ask(engine: BaseQueryEngine, *, is_async: bool = False, question: str = "?") -> str:
    """Query an engine and read its answer, streamed or not."""
    if not is_async:
        return answer_of(engine.query(question))
    response = await engine.aquery(question)
    if not hasattr(response, "async_response_gen"):
        return str(response)
    return "".join([piece async for piece in response.async_response_gen()])


class EventList(BaseEventHandler):
    """Kinds of the events that LlamaIndex sends while it is entered.

    Not the events: an exception holds the frames of its stream, which then is not closed.
    """

    _names: list[str] = PrivateAttr(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "EventList"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self._names.append(event.class_name())

    def __enter__(self) -> Self:
        get_dispatcher().add_event_handler(self)
        return self

    def __exit__(self, *error: object) -> None:
        root = get_dispatcher()
        root.event_handlers = [each for each in root.event_handlers if each is not self]

    def names(self, *prefixes: str) -> list[str]:
        """Kinds of the events that start so, in order."""
        return [name for name in self._names if name.startswith(prefixes)]
