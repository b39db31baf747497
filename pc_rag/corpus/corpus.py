"""The corpus: documents in, answers out, with the retrieved chunks' KV read from the store."""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

from pc_rag.corpus.catalog import Catalog
from pc_rag.corpus.catalog.records import ChunkId, PrefixRole
from pc_rag.corpus.chunking import Chunker
from pc_rag.corpus.documents import Document
from pc_rag.corpus.embedding import as_embedder, default_embedder
from pc_rag.corpus.garbage import collect_garbage
from pc_rag.corpus.ingest import Ingest, PreparedDocument
from pc_rag.corpus.lookup import ChunkLookup
from pc_rag.corpus.planning import (
    InOrder,
    RequestPlanner,
    cut_conversation,
    cut_plain_text,
    head_of,
)
from pc_rag.corpus.prefixes import CorpusPrefix, corpus_prefix
from pc_rag.corpus.prompt_format import PromptFormat
from pc_rag.corpus.reports import Answer, AnswerStream, CorpusStats
from pc_rag.errors import ConfigError, PromptError
from pc_rag.metrics import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from pc_rag.corpus.embedding import Embedder, EmbedFunction
    from pc_rag.corpus.ingest import OnProgress
    from pc_rag.corpus.planning import CutPiece, Finder
    from pc_rag.corpus.reports import GcReport, IngestEstimate, IngestReport, RetrievedChunk
    from pc_rag.engine import Completion, CompletionStream, PromptCache, Request
    from pc_rag.model.chat import ChatMessage
    from pc_rag.model.sampling import GenerationConfig
    from pc_rag.types import TokenIds

_SLOT_SETTING = "slot_tokens"
_MARK = "\ue000pc-rag first chunk\ue000"
"""Stands for the first chunk while the prefix is measured; private-use characters."""


class Corpus:
    """A collection of documents whose chunks are encoded once and reused by every question.

    Thread-safe; several processes may share its folder. A context manager.

    Args:
        engine: The model and the store. Lent: closing the corpus leaves it open.
        folder: Keeps the catalog; ``None`` for a corpus that ends with the process.
        prompt_format: The text around the chunks; its part before the first chunk is the prefix
            that chunks are encoded behind.
        embedding: Turns texts into vectors for retrieval: an ``Embedder`` or a function of texts;
            by default a small sentence-transformers model.
        chunk_tokens: Most tokens of a chunk; the engine's configuration decides by default.

    Raises:
        ConfigError: The folder was made with another slot length.
        StoreError: The catalog cannot be opened.
    """

    def __init__(
        self,
        engine: PromptCache,
        folder: str | Path | None = None,
        *,
        prompt_format: PromptFormat | None = None,
        embedding: Embedder | EmbedFunction | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        self.engine = engine
        self.prompt_format = prompt_format or PromptFormat()
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        folder = Path(self._temporary.name if self._temporary else folder or "")
        tokenizer = engine.loaded.tokenizer
        self._catalog = Catalog(folder, tokenizer_id=tokenizer.digest)
        self._check_slots()
        self._chunker = Chunker(
            lambda text: len(tokenizer.encode_text(text)),
            max_tokens=chunk_tokens or engine.config.chunk_tokens,
        )
        self._planner = RequestPlanner(engine)
        self._lookup = ChunkLookup(
            self._catalog,
            lambda: default_embedder() if embedding is None else as_embedder(embedding),
        )
        self._background = ThreadPoolExecutor(1, thread_name_prefix="pc-rag-prefix")
        self._lock = Lock()
        self._prefixes = self._open_prefixes()

    @property
    def prefix(self) -> str:
        """The text before the first chunk, control text of the chat template included."""
        return self._prefixes[0].record.text

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Texts that all chunks are encoded behind, the corpus's own first."""
        return tuple(prefix.record.text for prefix in self._prefixes)

    def prepare(self, documents: Iterable[Document | str]) -> list[PreparedDocument]:
        """Split and tokenise documents, so that ``estimate`` can tell what adding them needs."""
        return list(self._ingest.prepare(_documents(documents)))

    def estimate(self, prepared: Sequence[PreparedDocument]) -> IngestEstimate:
        """What adding prepared documents will need; nothing is encoded."""
        return self._ingest.estimate(prepared)

    def add(
        self,
        documents: Iterable[Document | str | PreparedDocument],
        *,
        on_progress: OnProgress | None = None,
        pinned: bool = False,
    ) -> IngestReport:
        """Add documents, or replace those of the same id. Unchanged text is not encoded again.

        A document answers once all its chunks are stored; its former version answers until then.

        Args:
            documents: Documents, plain texts, or what ``prepare`` returned.
            on_progress: Called after every encoded chunk.
            pinned: Never evict the chunks' entries.

        Raises:
            IngestError: A document cannot be taken in; those before it are.
            StoreIOError: The store's medium failed.
        """
        ingest = self._ingest

        def prepared() -> Iterable[PreparedDocument]:
            for document in documents:
                if isinstance(document, PreparedDocument):
                    yield document
                else:
                    yield from ingest.prepare(_documents([document]))

        report = ingest.add(prepared(), on_progress=on_progress, pinned=pinned)
        self._lookup.index_all()
        return report

    def remove(self, document_id: str) -> bool:
        """Remove a document; its chunks are no longer found. ``gc`` reclaims their bytes."""
        return self._catalog.remove_document(document_id)

    def gc(self) -> GcReport:
        """Delete the chunks that no document owns any more, and their entries."""
        return collect_garbage(self._catalog, self.engine.store)

    def stats(self) -> CorpusStats:
        """What the corpus and its store hold."""
        return CorpusStats(
            catalog=self._catalog.stats(),
            store=self.engine.store.stats(),
            bytes_per_token=self.engine.bytes_per_token,
            num_prefixes=len(self._prefixes),
        )

    def search(
        self, question: str, k: int = 4, *, where: Mapping[str, str] | None = None
    ) -> tuple[RetrievedChunk, ...]:
        """The ``k`` chunks nearest to a question, best first.

        Args:
            question: Any text.
            k: Most chunks to return.
            where: Metadata that a chunk's document must have.
        """
        return self._lookup.search(question, k=k, where=where)

    def answer(
        self,
        question: str,
        k: int = 4,
        *,
        where: Mapping[str, str] | None = None,
        config: GenerationConfig | None = None,
        reuse: bool | None = None,
    ) -> Answer:
        """Answer a question from the ``k`` nearest chunks; see ``stream``."""
        answer = self.stream(question, k, where=where, config=config, reuse=reuse)
        with answer.stream as stream:
            for _ in stream:
                pass
        return Answer(answer.stream.completion, answer.chunks)

    def stream(
        self,
        question: str,
        k: int = 4,
        *,
        where: Mapping[str, str] | None = None,
        config: GenerationConfig | None = None,
        reuse: bool | None = None,
    ) -> AnswerStream:
        """Answer a question from the ``k`` nearest chunks, giving text as it comes.

        Args:
            question: The question.
            k: Most chunks to read.
            where: Metadata that a chunk's document must have.
            config: How to choose tokens and when to stop.
            reuse: ``False`` computes every token of the same prompt.

        Raises:
            LayoutError: Chunks and question do not fit the model's context.
        """
        watch = self.engine.start_watch()
        with watch.measure(Phase.RETRIEVE):
            chunks = self.search(question, k, where=where)
        with watch.measure(Phase.PLAN):
            messages = self.prompt_format.messages(question, [chunk.text for chunk in chunks])
            find = InOrder([(chunk.id, chunk.text) for chunk in chunks])
            request = self._plan(self._cut(messages, find))
        return AnswerStream(self.engine.run(request, config, watch=watch, reuse=reuse), chunks)

    def generate(
        self,
        prompt: str | Sequence[ChatMessage],
        config: GenerationConfig | None = None,
        *,
        reuse: bool | None = None,
    ) -> Completion:
        """Run a prompt that somebody else put together; see ``stream_prompt``."""
        with self.stream_prompt(prompt, config, reuse=reuse) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream_prompt(
        self,
        prompt: str | Sequence[ChatMessage],
        config: GenerationConfig | None = None,
        *,
        reuse: bool | None = None,
    ) -> CompletionStream:
        """Run a prompt that somebody else put together; chunks in it are recognised and reused.

        Args:
            prompt: Plain text, or a conversation; chunks stand in it verbatim, whatever surrounds
                them.
            config: How to choose tokens and when to stop.
            reuse: ``False`` computes every token of the same prompt.

        Raises:
            PromptError: The prompt is empty.
            LayoutError: It does not fit the model's context.
        """
        watch = self.engine.start_watch()
        with watch.measure(Phase.PLAN):
            request = self.plan(prompt)
        return self.engine.run(request, config, watch=watch, reuse=reuse)

    def plan(self, prompt: str | Sequence[ChatMessage]) -> Request:
        """Decide which tokens of a prompt are cached: those of chunks that stand in it."""
        return self._plan(self._cut(prompt, self._lookup.find))

    def adopt_prefix(self, head: str | Sequence[ChatMessage]) -> Future[int]:
        """Encode all chunks behind another prefix too, in the background.

        Prompts that begin with it get exact first chunks; until it is done they are served from
        the corpus's own prefix, with the remark ``other-prefix``.

        Args:
            head: What stands before the first chunk: plain text, or a conversation whose last
                message is cut off there.

        Returns:
            Resolves to the number of chunks encoded.

        Raises:
            PromptError: The head has no token.
        """
        return self._adopt(head_of(self._cut(_open_ended(head), InOrder([(_MARK, _MARK)]))))

    def learn_prefix(self, prompt: str | Sequence[ChatMessage]) -> Future[int] | None:
        """Adopt the text before the first recognised chunk of a prompt.

        Returns:
            As ``adopt_prefix``; ``None`` where no chunk stands in the prompt, or its head is known.
        """
        cut = self._cut(prompt, self._lookup.find)
        head = head_of(cut)
        is_known = any(prefix.token_ids == head for prefix in self._prefixes)
        if is_known or not head or all(isinstance(piece, tuple) for piece in cut):
            return None
        return self._adopt(head)

    def close(self) -> None:
        """Finish background work and close the catalog. Idempotent."""
        self._background.shutdown()
        self._catalog.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _ingest(self) -> Ingest:
        """Taking in, behind the prefixes of this moment."""
        return Ingest(self.engine, self._catalog, self._chunker, self._prefixes)

    def _plan(self, cut: Sequence[CutPiece]) -> Request:
        return self._planner.plan(cut, self._chunk_tokens, prefixes=self._prefixes)

    def _chunk_tokens(self, chunk_id: str) -> TokenIds:
        return self._ingest.tokens_of(ChunkId(chunk_id), self._lookup.text(chunk_id))

    def _cut(self, prompt: str | Sequence[ChatMessage], find: Finder) -> list[CutPiece]:
        if isinstance(prompt, str):
            return cut_plain_text(self.engine, prompt, find)
        return cut_conversation(self.engine, self.engine.chat_format.render(prompt), find)

    def _open_prefixes(self) -> tuple[CorpusPrefix, ...]:
        """The prefix of the prompt format, then those adopted earlier that are encoded."""
        messages = self.prompt_format.messages("", [_MARK])
        head = head_of(self._cut(messages, InOrder([(_MARK, _MARK)])))
        self._catalog.prefixes.record(self._text_of(head), head, role=PrefixRole.DEFAULT)
        records = self._catalog.prefixes.all()
        own = corpus_prefix(self.engine, records[0])
        adopted = [corpus_prefix(self.engine, record) for record in records[1:]]
        return (own, *(prefix for prefix in adopted if self._is_encoded(prefix)))

    def _is_encoded(self, prefix: CorpusPrefix) -> bool:
        """Whether all live chunks have an entry behind a prefix, by this model."""
        fingerprint = self.engine.loaded.fingerprint
        recorded = {
            entry.chunk_id
            for entry in self._catalog.entries.of_prefix(prefix.record.id)
            if entry.fingerprint == fingerprint
        }
        return recorded.issuperset(chunk_id for chunk_id, _ in self._catalog.live_texts())

    def _text_of(self, token_ids: TokenIds) -> str:
        """Text of a prefix, control tokens shown."""
        return self.engine.loaded.tokenizer.backend.decode(
            list(token_ids), skip_special_tokens=False
        )

    def _adopt(self, head: TokenIds) -> Future[int]:
        if not head:
            raise PromptError("a prefix needs at least one token; the head is empty")
        record = self._catalog.prefixes.record(self._text_of(head), head, role=PrefixRole.ADOPTED)
        prefix = corpus_prefix(self.engine, record)

        def encode() -> int:
            num_encoded = self._ingest.encode_live(prefix)
            with self._lock:
                if all(known.record.id != record.id for known in self._prefixes):
                    self._prefixes = (*self._prefixes, prefix)
            return num_encoded

        return self._background.submit(encode)

    def _check_slots(self) -> None:
        """The slot length belongs to the corpus: entries of another one would not fit."""
        wanted = self.engine.config.slot_tokens
        stored = self._catalog.setting(_SLOT_SETTING)
        if stored is None and wanted is not None:
            self._catalog.put_setting(_SLOT_SETTING, str(wanted))
        elif stored is not None and stored != str(wanted):
            raise ConfigError(
                f"the corpus was created with slots of {stored} tokens; this engine is configured "
                f"for {wanted}. Use slot_tokens={stored}, or another folder"
            )


def _documents(documents: Iterable[Document | str]) -> Iterator[Document]:
    for document in documents:
        yield Document(document) if isinstance(document, str) else document


def _open_ended(head: str | Sequence[ChatMessage]) -> str | Sequence[ChatMessage]:
    """A prompt that goes on behind its head with a mark."""
    if isinstance(head, str):
        return head + _MARK
    *before, last = head
    return [*before, replace(last, content=last.content + _MARK)]
