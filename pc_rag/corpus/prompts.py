"""What is asked of a corpus as requests: its own questions, and prompts of others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pc_rag.corpus.cache_points import CutPrompt, cut_at_points
from pc_rag.corpus.catalog.records import ChunkId
from pc_rag.corpus.places import ChunkPlace
from pc_rag.corpus.planning import (
    InOrderFinder,
    RequestPlanner,
    cut_conversation,
    cut_plain_text,
    head_of,
    place_mark,
)
from pc_rag.errors import PromptError
from pc_rag.model.conversation import as_conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pc_rag.corpus.ingest import Ingest
    from pc_rag.corpus.kept import KeptEntries
    from pc_rag.corpus.lookup import ChunkLookup
    from pc_rag.corpus.planning import Finder, HeadFitter
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.corpus.prompt_format import PromptFormat
    from pc_rag.corpus.scaffolds import Scaffolds
    from pc_rag.engine import PromptCache, Request
    from pc_rag.model.conversation import ChatMessage, TextPrompt
    from pc_rag.types import TokenIds

_FIRST_CHUNK = place_mark(0)


class CorpusPrompts:
    """Makes requests of questions and prompts. Thread-safe.

    Args:
        engine: Whose model, chat template and configuration decide.
        prompt_format: The text around the chunks of a question.
        lookup: Finds the chunks in prompts of others.
        ingest: Knows the chunks' tokens, and notes the entries that requests read.
        served: Says what prompts are served from at this moment, the corpus's own prefix first.
        kept: Plans what prompts ask to be kept.
        scaffolds: Knows which chunks are read together.
    """

    def __init__(
        self,
        engine: PromptCache,
        prompt_format: PromptFormat,
        lookup: ChunkLookup,
        ingest: Ingest,
        *,
        served: Callable[[], Sequence[CorpusPrefix]],
        kept: KeptEntries,
        scaffolds: Scaffolds,
    ) -> None:
        self._engine = engine
        self._format = prompt_format
        self._lookup = lookup
        self._ingest = ingest
        self._served = served
        self._kept = kept
        self._scaffolds = scaffolds
        self._planner = RequestPlanner(engine)

    def own_head(self) -> TokenIds:
        """What stands before the first chunk of every question; may be empty."""
        return head_of(self._cut(*self._marked("", _FIRST_CHUNK)).pieces)

    def question(self, question: str, texts: Mapping[str, str]) -> Request:
        """The request that asks a question.

        Args:
            question: The question.
            texts: Texts of the chunks to read by their ids, in order.

        Raises:
            LayoutError: Chunks and question do not fit the model's context.
        """
        cut = self._cut(*self._marked(question, *texts))
        return self._plan(cut, lambda place: texts[place.chunk_id])

    def plan(self, prompt: TextPrompt) -> Request:
        """See ``Corpus.plan``."""
        return self._plan(self._recognised(prompt), lambda place: place.text)

    def head_before_chunk(self, prompt: TextPrompt) -> TokenIds:
        """The tokens before the first chunk of a prompt, or part of one.

        None where no whole chunk stands in it: a part may be a quotation, behind which no other
        prompt has its chunks.
        """
        pieces = self._recognised(prompt).pieces
        has_chunk = any(isinstance(piece, ChunkPlace) and piece.head is None for piece in pieces)
        return head_of(pieces) if has_chunk else ()

    def head(self, head: TextPrompt) -> TokenIds:
        """The tokens of a prompt that is cut off where its first chunk begins.

        Raises:
            PromptError: An empty conversation.
        """
        opened = self._cut(_open_ended(head), InOrderFinder([(_FIRST_CHUNK, _FIRST_CHUNK)]))
        return head_of(opened.pieces)

    def _plan(self, cut: CutPrompt, text_at: Callable[[ChunkPlace], str]) -> Request:
        whole: dict[str, TokenIds] = {}

        def chunk_tokens(place: ChunkPlace) -> TokenIds:
            if place.head is not None:
                return place.head.token_ids
            if place.chunk_id not in whole:
                chunk_id = ChunkId(place.chunk_id)
                whole[chunk_id] = self._ingest.entries.tokens_of(chunk_id, text_at(place))
            return whole[place.chunk_id]

        prefixes = self._served()
        chain = self._kept.chain(head_of(cut.pieces), cut.points, prefixes)
        pieces = self._scaffolds.placed(cut.pieces)
        request = self._planner.plan(pieces, chunk_tokens, prefixes=prefixes, chain=chain)
        self._ingest.note(request)
        self._scaffolds.note(pieces, request)
        return request

    def _marked(
        self, question: str, *chunk_ids: str
    ) -> tuple[tuple[ChatMessage, ...], InOrderFinder]:
        """The conversation that asks a question, marks in the chunks' places, and their finder."""
        places = [(chunk_id, place_mark(i)) for i, chunk_id in enumerate(chunk_ids)]
        messages = self._format.messages(question, [mark for _, mark in places])
        return messages, InOrderFinder(places)

    def _recognised(self, prompt: TextPrompt) -> CutPrompt:
        """A prompt cut at the chunks that its messages name, and at those that stand in it."""
        return self._cut(
            prompt,
            self._lookup.find,
            chunk_of=self._lookup.find_whole,
            fit_head=self._ingest.entries.head,
        )

    def _cut(
        self,
        prompt: TextPrompt,
        find: Finder,
        *,
        chunk_of: Callable[[str], str | None] = lambda _: None,
        fit_head: HeadFitter = lambda _: None,
    ) -> CutPrompt:
        engine = self._engine
        if isinstance(prompt, str):
            return CutPrompt(cut_plain_text(engine, prompt, find, fit_head=fit_head))
        rendered = engine.chat_format.render(as_conversation(prompt))
        pieces, points = cut_at_points(engine.loaded.tokenizer, rendered)
        cut = cut_conversation(engine, pieces, find, chunk_of=chunk_of, fit_head=fit_head)
        return CutPrompt(cut, points)


def _open_ended(head: TextPrompt) -> TextPrompt:
    """A prompt that goes on behind its head with a mark."""
    if isinstance(head, str):
        return head + _FIRST_CHUNK
    conversation = as_conversation(head)
    if not conversation.messages:
        raise PromptError(
            "head: an empty conversation; pass the text before the first chunk, or messages of "
            "which the last is cut off where the first chunk begins"
        )
    *before, last = conversation.messages
    opened = replace(last, content=last.content + _FIRST_CHUNK)
    return replace(conversation, messages=(*before, opened))
