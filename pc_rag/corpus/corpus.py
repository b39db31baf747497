"""The corpus: documents in, answers out, with the retrieved chunks' KV read from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pc_rag.corpus.documents import as_documents
from pc_rag.corpus.embedding import lazy_embedder
from pc_rag.corpus.garbage import collect_garbage
from pc_rag.corpus.opening import CorpusParts
from pc_rag.corpus.prompt_format import PromptFormat
from pc_rag.corpus.reports import Answer, AnswerStream, CorpusStats, ScaffoldReport
from pc_rag.metrics import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from pc_rag.corpus.catalog.records import DocumentRecord
    from pc_rag.corpus.documents import Document
    from pc_rag.corpus.embedding import Embedder, EmbedFunction
    from pc_rag.corpus.ingest import OnProgress
    from pc_rag.corpus.publishing import PreparedDocument
    from pc_rag.corpus.reports import GcReport, IngestEstimate, IngestReport, RetrievedChunk
    from pc_rag.engine import Completion, CompletionStream, PromptCache, Request
    from pc_rag.model.conversation import TextPrompt
    from pc_rag.model.sampling import GenerationConfig


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
        has_retrieval: ``False`` where chunks are retrieved elsewhere, as in a framework's vector
            store: nothing is embedded, and ``search``, ``answer`` and ``stream`` are refused.
            Chunks in prompts are recognised as always.

    Attributes:
        upkeep: Keeps the corpus in step with an owner of its documents, such as a framework.

    Raises:
        ConfigError: The folder was made with another slot length, ``embedding`` does not say which
            model it is or is given without retrieval, or ``chunk_tokens`` is not positive.
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
        has_retrieval: bool = True,
    ) -> None:
        self.engine = engine
        self.prompt_format = prompt_format or PromptFormat()
        self._parts = parts = CorpusParts(
            engine,
            folder,
            prompt_format=self.prompt_format,
            embedder=lazy_embedder(embedding, has_retrieval=has_retrieval),
            chunk_tokens=engine.config.chunk_tokens if chunk_tokens is None else chunk_tokens,
        )
        self._catalog, self._lookup, self._prompts = parts.catalog, parts.lookup, parts.prompts
        self._ingest, self._scaffolds = parts.ingest, parts.scaffolds
        self._prefixes, self._warmer = parts.prefixes, parts.warmer
        self.upkeep = parts.upkeep(self.add)

    @property
    def prefix(self) -> str:
        """The text before the first chunk, control text of the chat template included."""
        return self._prefixes.encoded[0].record.text

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Texts that all chunks are encoded behind, the corpus's own first.

        That of a former prompt format is served but not listed: later chunks come to it on demand.
        """
        return tuple(prefix.record.text for prefix in self._prefixes.encoded)

    def prepare(self, documents: Iterable[Document | str]) -> list[PreparedDocument]:
        """Split and tokenise documents, so that ``estimate`` can tell what adding them needs.

        Raises:
            IngestError: Not a list of documents.
            LayoutError: A chunk is longer than a slot of the corpus.
        """
        return list(self._ingest.prepare(as_documents(documents)))

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
            LayoutError: As above: a chunk is longer than a slot of the corpus.
            StoreIOError: The store's medium failed.
        """
        return self._ingest.add(
            self._ingest.as_prepared(documents),
            on_progress=on_progress,
            on_published=self._lookup.published,
            pinned=pinned,
        )

    def documents(self, *, id_beginning: str = "") -> tuple[DocumentRecord, ...]:
        """The documents whose ids begin like this, by id."""
        return self._catalog.documents(id_beginning=id_beginning)

    def remove(self, document_id: str) -> bool:
        """Remove a document; its chunks are no longer found. ``gc`` reclaims their bytes."""
        return self._catalog.remove_document(document_id)

    def gc(self) -> GcReport:
        """Delete the chunks that no document owns any more, their entries, and expired ones.

        The scaffolds of such chunks go with them.
        """
        return collect_garbage(self._catalog, self.engine.store, entries_of=self._ingest.entries_of)

    @property
    def scaffolds(self) -> tuple[tuple[str, ...], ...]:
        """The ids of the chunks of each scaffold, in the order they came.

        One of which a chunk is gone, as its document changed or was removed, is not among them;
        ``gc`` reclaims its bytes.
        """
        return tuple(scaffold.chunk_ids for scaffold in self._scaffolds.live)

    def scaffold(self, chunk_ids: Sequence[str], *, pinned: bool = False) -> ScaffoldReport:
        """Encode chunks that belong together as one entry too, behind every prefix.

        In it each chunk attended those before it, with the separator of ``prompt_format`` between.
        It is read where all stand in a prompt in this order: as a whole where just the separator
        stands between them, chunk by chunk where other text does. Otherwise, and where another
        chunk stands between, each is read from its own entry, which it keeps.

        Args:
            chunk_ids: At least two, as ``search`` returns them. What is encoded already is not
                encoded again.
            pinned: Never evict the entry.

        Raises:
            IngestError: Fewer than two chunks, one twice, one that no document has, or what is no
                list of ids.
            LayoutError: They are longer than the context. Under ``reserved`` positions they take
                as many slots as they are chunks.
            StoreFull: The store has no room; nothing is left of it.
        """
        return self._scaffolds.add(chunk_ids, pinned=pinned)

    def unscaffold(self, chunk_ids: Sequence[str]) -> bool:
        """Drop a scaffold and its entries; the chunks keep theirs. Whether there was one.

        Raises:
            IngestError: What is given is no list of ids.
        """
        return self._scaffolds.remove(chunk_ids)

    def stats(self) -> CorpusStats:
        """What the corpus and its store hold."""
        return CorpusStats(
            catalog=self._catalog.stats(),
            store=self.engine.store.stats(),
            bytes_per_token=self.engine.bytes_per_token,
            num_prefixes=len(self._prefixes.encoded),
        )

    def starts(self, chunk_id: str) -> tuple[int, ...]:
        """Position IDs at which the store holds entries of a chunk, rising; of no chunk, none.

        Several where positions are fixed (learned ones), or behind prefixes of several lengths.
        """
        return self._ingest.entries.starts(chunk_id)

    def search(
        self, question: str, k: int = 4, *, where: Mapping[str, str] | None = None
    ) -> tuple[RetrievedChunk, ...]:
        """The ``k`` chunks nearest to a question, best first.

        Args:
            question: Any text.
            k: Most chunks to return; none where it is less than 1.
            where: Metadata that a chunk's document must have.

        Raises:
            ConfigError: The corpus was opened without retrieval.
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

        Chunks stand in the prompt best first; but where all of a scaffold are retrieved they stand
        side by side in its order, at the place of the best of them.

        Args:
            question: The question.
            k: Most chunks to read.
            where: Metadata that a chunk's document must have.
            config: How to choose tokens and when to stop.
            reuse: ``False`` computes every token of the same prompt.

        Raises:
            ConfigError: The corpus was opened without retrieval.
            LayoutError: Chunks and question do not fit the model's context.
        """
        watch = self.engine.start_watch()
        with watch.measure(Phase.RETRIEVE):
            found = {chunk.id: chunk for chunk in self.search(question, k, where=where)}
        with watch.measure(Phase.PLAN):
            chunks = tuple(found[id_] for id_ in self._scaffolds.arranged(tuple(found)))
            texts = {chunk.id: chunk.text for chunk in chunks}
            request = self._prompts.question(question, texts)
        return AnswerStream(self.engine.run(request, config, watch=watch, reuse=reuse), chunks)

    def generate(
        self,
        prompt: TextPrompt,
        config: GenerationConfig | None = None,
        *,
        reuse: bool | None = None,
        template: str | None = None,
    ) -> Completion:
        """Run a prompt that somebody else put together; see ``stream_prompt``."""
        with self.stream_prompt(prompt, config, reuse=reuse, template=template) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream_prompt(
        self,
        prompt: TextPrompt,
        config: GenerationConfig | None = None,
        *,
        reuse: bool | None = None,
        template: str | None = None,
    ) -> CompletionStream:
        """Run a prompt that somebody else put together; chunks in it are recognised and reused.

        Args:
            prompt: Plain text, or a conversation; chunks stand in it verbatim, whatever surrounds
                them. Those that a message names (``ChatMessage.chunks``) are found even if they are
                too short to be recognised. Of a chunk that was split, a long enough head is read
                from its entry; metrics say ``split``. Up to its last ``CachePoint`` it is kept as
                it stands.
            config: How to choose tokens and when to stop.
            reuse: ``False`` computes every token of the same prompt.
            template: Label in the metrics, so that hit rates can be told apart by prompt template;
                ``"corpus"`` by default.

        Raises:
            PromptError: The prompt is empty.
            LayoutError: It does not fit the model's context.
        """
        watch = self.engine.start_watch()
        with watch.measure(Phase.PLAN):
            request = self.plan(prompt)
        return self.engine.run(request, config, watch=watch, reuse=reuse, template=template)

    def plan(self, prompt: TextPrompt) -> Request:
        """Decide which tokens of a prompt are cached: those of chunks that stand in it."""
        return self._prompts.plan(prompt)

    def holds(self, text: str) -> bool:
        """Whether a text, save whitespace at its ends, is a chunk of a document."""
        return self._lookup.find_whole(text) is not None

    def warm(self, texts: Iterable[str]) -> Future[int]:
        """Bring the entries of the chunks in some texts into the nearest tier, in the background.

        For chunks that a prompt is about to hold, and the scaffolds of which all chunks are among
        them. What is missing is encoded, behind every prefix of ``prefixes``. One thread works, an
        entry at a time; a request waits for one encoding at most. Calls with the same texts are
        done as one while they wait. Of more than 32 that wait the oldest are cancelled, and so are
        all when corpus or process end. Entries brought near count as hits of the store.

        Args:
            texts: Retrieved texts, or whole prompts: a text is a chunk, or chunks (or heads of
                chunks) stand in it.

        Returns:
            Resolves to the number of chunks warmed, or to the error that ended it.

        Raises:
            PromptError: A single text, or something else than a collection of texts.
            StoreError: The corpus is closed, or the process ends.
        """
        return self._warmer.warm(texts)

    def adopt_prefix(self, head: TextPrompt) -> Future[int]:
        """Encode all chunks behind another prefix too, in the background.

        Prompts that begin with it get exact first chunks; until it is done they are served from
        the corpus's own prefix, with the remark ``other-prefix``.

        Args:
            head: What stands before the first chunk: plain text, or a conversation whose last
                message is cut off there.

        Returns:
            Resolves to the number of entries encoded: of chunks, and of scaffolds.

        Raises:
            PromptError: The head has no token.
            ConfigError: Chunks are encoded behind four prefixes already.
        """
        return self._prefixes.adopt(self._prompts.head(head))

    def learn_prefix(self, prompt: TextPrompt) -> Future[int] | None:
        """Adopt the text before the first recognised chunk, or part of a chunk, of a prompt.

        Meant to be called after every request that reports ``other-prefix``: where there is no room
        it costs nothing, otherwise about what planning the prompt does (milliseconds).

        Returns:
            As ``adopt_prefix``; ``None`` where no whole chunk stands in the prompt (a part may be a
            quotation), its head is known, or there is no room for another prefix.
        """
        if self._prefixes.is_full:
            return None
        head = self._prompts.head_before_chunk(prompt)
        return self._prefixes.try_adopt(head) if head else None

    def forget_prefix(self, text: str) -> int:
        """Drop an adopted prefix and the entries behind it, or one of a former prompt format.

        An adoption of it that has not begun is cancelled; one that has is waited for.

        Args:
            text: One of ``prefixes``, that of a former prompt format, or one whose adoption failed;
                the corpus's own is kept.

        Returns:
            How many entries left the store.
        """
        return self._prefixes.forget(text)

    def close(self) -> None:
        """Finish background work and close the catalog. Idempotent."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
