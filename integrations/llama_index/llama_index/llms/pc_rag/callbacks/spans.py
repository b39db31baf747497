"""Handlers that follow spans, so that they know which events belong to one query."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import Dispatcher
from typing_extensions import override

from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    import inspect
    from types import TracebackType


class SpanFollower(BaseSpanHandler[BaseSpan]):
    """Tells a handler of spans that start and end; keeps none itself."""

    _handler: SpanEventHandler = PrivateAttr()

    def __init__(self, handler: SpanEventHandler) -> None:
        super().__init__()
        self._handler = handler

    @classmethod
    @override
    def class_name(cls) -> str:
        return "SpanFollower"

    @override
    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._handler.enter_span(id_, parent_id)

    @override
    def span_exit(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        self._handler.end_span(id_, result)

    @override
    def span_drop(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        self._handler.end_span(id_)

    @override
    def new_span(self, *args: Any, **kwargs: Any) -> None:
        return None

    @override
    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        return None

    @override
    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        return None


class SpanEventHandler(BaseEventHandler):
    """An event handler that follows spans too, once it is attached.

    ``handler.attach()``, or ``with handler:``, hears everything that LlamaIndex does in this
    process. LlamaIndex's dispatcher swallows what handlers raise, so these raise nothing.
    """

    _follower: SpanFollower = PrivateAttr()
    _dispatcher: Dispatcher | None = PrivateAttr(default=None)

    def __init__(self) -> None:
        super().__init__()
        self._follower = SpanFollower(self)

    @abstractmethod
    def enter_span(self, span_id: str, parent_id: str | None) -> None:
        """A span starts."""

    @abstractmethod
    def end_span(self, span_id: str, result: object = None) -> None:
        """A span ended, however it did; with what it gave, or with nothing after an error."""

    def attach(self, dispatcher: Dispatcher | None = None) -> Self:
        """Hear events and spans of a dispatcher, the root by default, and of those below it.

        Returns:
            The handler itself: ``with handler.attach(dispatcher):``.

        Raises:
            ConfigError: It is attached already, and would count everything twice.
        """
        chosen = dispatcher if dispatcher is not None else get_dispatcher()
        is_there = any(each is self for each in chosen.event_handlers)
        if self._dispatcher is not None or is_there:
            raise ConfigError(
                f"{self.class_name()} is attached to a dispatcher already, and would count "
                "everything twice. Call detach() first, or make another handler"
            )
        self._dispatcher = chosen
        chosen.add_span_handler(self._follower)
        chosen.add_event_handler(self)
        return self

    def detach(self) -> None:
        """Hear nothing more; what was counted stays. Does nothing where it is not attached."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is None:
            return
        # New lists: another thread may be walking through the old ones.
        dispatcher.event_handlers = [each for each in dispatcher.event_handlers if each is not self]
        dispatcher.span_handlers = [
            each for each in dispatcher.span_handlers if each is not self._follower
        ]

    def __enter__(self) -> Self:
        return self if self._dispatcher is not None else self.attach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()
