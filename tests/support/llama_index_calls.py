"""Calls of our LlamaIndex model by every way there is, and what is heard of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llama_index.core.base.llms.types import CompletionResponse
    from llama_index.core.instrumentation.events import BaseEvent

    from pc_rag.corpus import Corpus

SYNC_WAYS = ("complete", "stream_complete", "chat", "stream_chat")
WAYS = (*SYNC_WAYS, *(f"a{way}" for way in SYNC_WAYS))
"""The eight ways to ask."""
STREAMS = tuple(way for way in WAYS if "stream" in way)


def call(llm: Any, way: str, prompt: Any, **kwargs: Any) -> Any:
    """Begin a call: a response, a generator, or a coroutine of one of them."""
    if "chat" in way and isinstance(prompt, str):
        prompt = [ChatMessage(content=prompt)]
    return getattr(llm, way)(prompt, **kwargs)


async def pieces(llm: Any, way: str, prompt: Any, **kwargs: Any) -> list[Any]:
    """All the responses of a call; one of a call that does not stream."""
    begun = call(llm, way, prompt, **kwargs)
    if way.startswith("a"):
        begun = await begun
    if "stream" not in way:
        return [begun]
    if way.startswith("a"):
        return [piece async for piece in begun]
    return list(begun)


async def ask(llm: Any, way: str, prompt: Any, **kwargs: Any) -> Any:
    """The last response of a call: the whole answer."""
    return (await pieces(llm, way, prompt, **kwargs))[-1]


def text_of(response: ChatResponse | CompletionResponse) -> str:
    """The text of a response of either kind."""
    if isinstance(response, ChatResponse):
        return response.message.content or ""
    return response.text


def modules(response: Any) -> list[dict[str, Any]]:
    """The chunks of an answer's request, the corpus's prefix left out."""
    return [m for m in response.raw["pc_rag"]["modules"] if m["label"] != "(prefix)"]


def shown(corpus: Corpus, request: Any) -> str:
    """The text of a prompt as it reached the engine, control tokens and all."""
    backend = corpus.engine.loaded.tokenizer.backend
    return backend.decode(list(request.plan.token_ids), skip_special_tokens=False)


class KeptEvents(BaseEventHandler):
    """Keeps every event, with the errors in them."""

    events: list[Any] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "KeptEvents"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]

    def of(self, name: str) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if event.class_name() == name]


@contextmanager
def heard() -> Iterator[KeptEvents]:
    """Everything that LlamaIndex's instrumentation tells meanwhile."""
    handler, root = KeptEvents(), get_dispatcher()
    root.add_event_handler(handler)
    try:
        yield handler
    finally:
        root.event_handlers.remove(handler)


@contextmanager
def spans() -> Iterator[SimpleSpanHandler]:
    """The spans that end meanwhile."""
    handler, root = SimpleSpanHandler(), get_dispatcher()
    root.add_span_handler(handler)
    try:
        yield handler
    finally:
        root.span_handlers.remove(handler)
