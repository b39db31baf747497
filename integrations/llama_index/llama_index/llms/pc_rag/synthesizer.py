"""Answers over whole chunks, as many in a prompt as fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation.events.synthesis import (
    GetResponseEndEvent,
    GetResponseStartEvent,
)
from llama_index.core.response.utils import aget_response_text, get_response_text
from llama_index.core.response_synthesizers import Refine
from llama_index.llms.pc_rag.prompt_room import PromptRoom
from llama_index_instrumentation import get_dispatcher
from pydantic import ValidationError

from pc_rag.errors import LayoutError
from pc_rag.layout.packing import num_fitting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llama_index.core.base.response.schema import RESPONSE_TYPE
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.indices.prompt_helper import PromptHelper
    from llama_index.core.llms import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.schema import NodeWithScore, QueryType
    from llama_index.core.types import RESPONSE_TEXT_TYPE, BasePydanticProgram
    from pydantic import BaseModel

dispatcher = get_dispatcher(__name__)

SEPARATOR = "\n\n"
"""Between two chunks, as LlamaIndex joins them."""

_FIRST_CONTEXT = "context_str"
_FURTHER_CONTEXT = "context_msg"


class PromptCacheSynthesizer(Refine):
    """Answers from nodes of which none is ever split: each is read from the cache whole.

    As many nodes as fit stand in one prompt, in the order in which they were retrieved, written
    as response mode ``compact`` writes them. Where they do not all fit, the answer is refined over
    further prompts, each as full as the answer so far lets it be. Tokens are counted by the
    model's own tokenizer, its chat template included, and room for ``max_tokens`` is left.

    With another LLM it does the same, and counts as LlamaIndex does.

    Args:
        llm: The model; that of LlamaIndex's ``Settings`` by default.
        text_qa_template: Takes ``context_str`` and ``query_str``.
        refine_template: Takes ``context_msg``, ``query_str`` and ``existing_answer``.
        streaming: Answers stream; the prompts before the last are answered first.
        output_cls: Answers are objects of this class.
        structured_answer_filtering: As for LlamaIndex's ``refine``: drop answers from a prompt
            that does not answer the question.
        program_factory: As for ``refine``; with ``structured_answer_filtering`` only.
        callback_manager: That of ``Settings`` by default.
        prompt_helper: Counts the tokens of other LLMs.

    Raises:
        LayoutError: When it answers: a node is too long for any prompt; names it, with its tokens
            and the limit. No model is called before the nodes are checked.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        structured_answer_filtering: bool = False,
        program_factory: Callable[[BasePromptTemplate], BasePydanticProgram[Any]] | None = None,
        callback_manager: CallbackManager | None = None,
        prompt_helper: PromptHelper | None = None,
    ) -> None:
        super().__init__(
            llm=llm,
            text_qa_template=text_qa_template,
            refine_template=refine_template,
            streaming=streaming,
            output_cls=output_cls,
            structured_answer_filtering=structured_answer_filtering,
            program_factory=program_factory,
            callback_manager=callback_manager,
            prompt_helper=prompt_helper,
        )

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """An answer to a query from nodes; see the class."""
        return super().synthesize(
            query, nodes, additional_source_nodes, node_ids=_ids_of(nodes), **response_kwargs
        )

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As ``synthesize``; waits for the model without holding the event loop."""
        return await super().asynthesize(
            query, nodes, additional_source_nodes, node_ids=_ids_of(nodes), **response_kwargs
        )

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: RESPONSE_TEXT_TYPE | None = None,
        node_ids: Sequence[str] = (),
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """The answer's text, object or stream.

        Args:
            query_str: The question.
            text_chunks: Texts of the nodes.
            prev_response: An answer to refine.
            node_ids: Names of the nodes, for errors.
            **response_kwargs: Further variables of the templates.
        """
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        answer: Any = prev_response
        if isinstance(answer, Generator):
            answer = get_response_text(answer)
        pages = self._pages(query_str, text_chunks, node_ids, response_kwargs)
        while (page := pages.next(answer)) is not None:
            program = self._program_factory(page.template)
            found = self._update_response(program, page.context, response_kwargs)
            if pages.has_more and isinstance(found, Generator):
                found = get_response_text(found)
            answer = found or answer
        dispatcher.event(GetResponseEndEvent())
        return self._finished(answer)

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        prev_response: RESPONSE_TEXT_TYPE | None = None,
        node_ids: Sequence[str] = (),
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """As ``get_response``; waits for the model without holding the event loop."""
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        answer: Any = prev_response
        if isinstance(answer, AsyncGenerator):
            answer = await aget_response_text(answer)
        pages = await asyncio.to_thread(
            self._pages, query_str, text_chunks, node_ids, response_kwargs
        )
        while (page := await asyncio.to_thread(pages.next, answer)) is not None:
            program = self._program_factory(page.template)
            found = await self._aupdate_response(program, page.context, response_kwargs)
            if pages.has_more and isinstance(found, AsyncGenerator):
                found = await aget_response_text(found)
            answer = found or answer
        dispatcher.event(GetResponseEndEvent())
        return self._finished(answer)

    def _pages(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        node_ids: Sequence[str],
        response_kwargs: dict[str, Any],
    ) -> _Pages:
        pages = _Pages(
            room=PromptRoom(self._llm, self._prompt_helper),
            first=self._text_qa_template.partial_format(query_str=query_str),
            further=self._refine_template.partial_format(query_str=query_str),
            variables=response_kwargs,
        )
        pages.put(text_chunks, node_ids)
        return pages

    def _finished(self, answer: Any) -> RESPONSE_TEXT_TYPE:
        """The answer in the form that LlamaIndex's other synthesizers give it."""
        if isinstance(answer, str) and self._output_cls is not None:
            with suppress(ValidationError):  # an answer before the last may be plain text
                return self._output_cls.model_validate_json(answer)
        return answer or self._empty_response


@dataclass(frozen=True, slots=True)
class _Page:
    """One prompt.

    Attributes:
        template: With the question in it.
        context: The name of its variable for chunks, and their text.
    """

    template: BasePromptTemplate
    context: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Chunk:
    text: str
    node_id: str
    num_tokens: int


class _Pages:
    """Deals chunks out to prompts, in their order, as many to each as fit it.

    Args:
        room: Counts.
        first: The template of the first prompt.
        further: That of the others, which refine an answer.
        variables: Of both templates.
    """

    def __init__(
        self,
        *,
        room: PromptRoom,
        first: BasePromptTemplate,
        further: BasePromptTemplate,
        variables: dict[str, Any],
    ) -> None:
        self._room = room
        self._first = first
        self._further = further
        self._variables = variables
        self._first_room = room.of(first, {_FIRST_CONTEXT: "", **variables})
        self._waiting: list[_Chunk] = []

    def put(self, texts: Sequence[str], node_ids: Sequence[str]) -> None:
        """Take the chunks, empty ones left out.

        Raises:
            LayoutError: One is too long for the first prompt.
        """
        for text, node_id in zip_longest(map(str.strip, texts), node_ids, fillvalue=""):
            if text:
                num_tokens = self._room.num_chunk_tokens(text)
                self._waiting.append(_Chunk(text, node_id, num_tokens))
        if not self._waiting:  # asked without context, as LlamaIndex does
            self._waiting.append(_Chunk("", "", 0))
        for chunk in self._waiting:
            if chunk.num_tokens > self._first_room:
                raise _too_long(chunk, self._first_room)

    @property
    def has_more(self) -> bool:
        """Whether chunks are left."""
        return bool(self._waiting)

    def next(self, answer: object) -> _Page | None:
        """The next prompt; ``None`` behind the last.

        Raises:
            LayoutError: The answer to refine leaves no room for the next chunk.
        """
        if not self._waiting:
            return None
        template, name, room = self._first, _FIRST_CONTEXT, self._first_room
        if answer is not None:
            template = self._further.partial_format(existing_answer=answer)
            name = _FURTHER_CONTEXT
            room = self._room.of(template, {name: "", **self._variables})
        num_chunks = num_fitting(
            (chunk.num_tokens for chunk in self._waiting),
            room,
            separator_tokens=self._room.num_tokens(SEPARATOR),
        )
        if num_chunks == 0:
            raise _too_long(self._waiting[0], room)
        taken, self._waiting = self._waiting[:num_chunks], self._waiting[num_chunks:]
        return _Page(template, {name: SEPARATOR.join(chunk.text for chunk in taken)})


def _too_long(chunk: _Chunk, room: int) -> LayoutError:
    return LayoutError(
        f"node {chunk.node_id!r} has {chunk.num_tokens} tokens, and its prompt has room for "
        f"{max(room, 0)} beside template, question, answer so far and max_tokens; split documents "
        "into smaller nodes, allow fewer max_tokens, or use response_mode='compact', which "
        f"splits nodes. The node begins {chunk.text[:60]!r}"
    )


def _ids_of(nodes: Sequence[NodeWithScore]) -> tuple[str, ...]:
    return tuple(node.node.node_id for node in nodes)
