"""How a reply is run: its pieces, and one event about what the prompt found in the cache."""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.instrumentation.span import active_span_id
from llama_index.llms.pc_rag.events import PromptCacheEvent
from llama_index.llms.pc_rag.messages import full_text
from llama_index_instrumentation import get_dispatcher

from pc_rag.errors import GenerationError
from pc_rag.serving import begun, texts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterator

    from pc_rag.serving import Reply, ReplyStream

_T = TypeVar("_T")

dispatcher = get_dispatcher(__name__)


def run(stream: ReplyStream) -> Reply:
    """Go on to the end, and tell."""
    with _telling(stream, active_span_id.get()):
        return stream.run()


async def arun(begin: Callable[[], ReplyStream]) -> Reply:
    """As ``run``, from the call's beginning; does not hold the event loop."""
    span_id = active_span_id.get()
    stream = await begun(begin)
    with _telling(stream, span_id):
        async with aclosing(texts(stream)) as pieces:
            async for _ in pieces:
                pass
    return stream.reply


def pieces_of(
    begin: Callable[[], ReplyStream],
    piece: Callable[[str, str], _T],
    last: Callable[..., _T],
) -> Generator[_T, None, None]:
    """Pieces of a reply that begins when the first is pulled.

    Args:
        begin: Begins the call.
        piece: Makes a piece of all the text that came so far, and what is new of it.
        last: Makes the last piece of the reply.
    """
    span_id = active_span_id.get()  # it has ended when the first piece is pulled

    def pieces() -> Generator[_T, None, None]:
        so_far = ""
        stream = begin()
        with _telling(stream, span_id):
            for text in stream:
                so_far += text
                yield piece(so_far, text)
            if rest := full_text(stream.reply).removeprefix(so_far):
                yield piece(so_far + rest, rest)
        yield last(stream.reply, delta="")

    return pieces()


def apieces_of(
    begin: Callable[[], ReplyStream],
    piece: Callable[[str, str], _T],
    last: Callable[..., _T],
) -> AsyncGenerator[_T, None]:
    """As ``pieces_of``; does not hold the event loop."""
    span_id = active_span_id.get()

    async def pieces() -> AsyncGenerator[_T, None]:
        so_far = ""
        stream = await begun(begin)
        with _telling(stream, span_id):
            async with aclosing(texts(stream)) as generated:
                async for text in generated:
                    so_far += text
                    yield piece(so_far, text)
            if rest := full_text(stream.reply).removeprefix(so_far):
                yield piece(so_far + rest, rest)
        yield last(stream.reply, delta="")

    return pieces()


def told(
    callback: Callable[[], Callable[..., Any]],
    pieces: Generator[_T, None, None],
    llm: object,
    *args: Any,
    **kwargs: Any,
) -> Generator[_T, None, None]:
    """Pieces with LlamaIndex's events around them; closed as one.

    LlamaIndex's decorators leave the pieces to the garbage collector where the consumer leaves, and
    it comes late if a handler keeps the error: the generation would not have ended until then.

    Args:
        callback: LlamaIndex's decorator.
        pieces: What the call returns.
        llm: The model.
        args: Of the call, for the events.
        kwargs: Likewise.
    """

    def call(_llm: object, *_args: Any, **_kwargs: Any) -> Generator[_T, None, None]:
        return pieces

    return _closing_both(callback()(call)(llm, *args, **kwargs), pieces)


async def atold(
    callback: Callable[[], Callable[..., Any]],
    pieces: AsyncGenerator[_T, None],
    llm: object,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[_T, None]:
    """As ``told``."""

    async def call(_llm: object, *_args: Any, **_kwargs: Any) -> AsyncGenerator[_T, None]:
        return pieces

    return _aclosing_both(await callback()(call)(llm, *args, **kwargs), pieces)


def _closing_both(
    outer: Generator[_T, None, None], pieces: Generator[_T, None, None]
) -> Generator[_T, None, None]:
    try:
        for piece in outer:  # noqa: UP028 - "yield from" would close the outer one first
            yield piece
    finally:
        pieces.close()  # tells what it found, before LlamaIndex tells the end
        outer.close()


async def _aclosing_both(
    outer: AsyncGenerator[_T, None], pieces: AsyncGenerator[_T, None]
) -> AsyncGenerator[_T, None]:
    try:
        async for piece in outer:
            yield piece
    finally:
        await pieces.aclose()
        await outer.aclose()


@contextmanager
def _telling(stream: ReplyStream, span_id: str | None) -> Iterator[None]:
    """Close a stream, and tell what it found in the cache unless it failed."""

    def tell() -> None:
        _tell(stream.reply, span_id)

    try:
        with stream:
            yield
    except (ValueError, TypeError) as error:  # LlamaIndex would answer "Empty Response"
        raise GenerationError(
            f"the model failed: {type(error).__name__}: {error}; its traceback stands above"
        ) from error
    except Exception:
        raise
    except BaseException:  # the consumer left, or its task was cancelled
        # At once, save where a thread computes still, or the garbage collector closed the stream.
        stream.when_completed(tell)
        raise
    tell()


def _tell(reply: Reply, span_id: str | None) -> None:
    dispatcher.event(
        PromptCacheEvent(
            model_name=reply.model_name,
            finish_reason=reply.finish_reason,
            metrics=reply.completion.metrics.to_dict(),
            span_id=span_id,
        )
    )
