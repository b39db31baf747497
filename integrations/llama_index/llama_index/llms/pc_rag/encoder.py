"""A transformation that encodes nodes when they are ingested."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.utils import get_tqdm_iterable
from llama_index.llms.pc_rag._nodes import documents_of, owner_of, wanted_of
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from pc_rag.corpus import Corpus, IngestProgress, IngestReport, ReconcileReport
from pc_rag.errors import ConfigError
from pc_rag.serving.finishing import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llama_index.core.storage.docstore.types import BaseDocumentStore

    from pc_rag.corpus import Document
    from pc_rag.corpus.publishing import PreparedDocument

_STATE = ("fingerprint", "store_generation", "revision")
"""What the serialised form tells of the corpus; not read back."""


class PromptCacheEncoder(TransformComponent):
    """Encodes nodes, each as one chunk, and returns them as they are.

    A step of an ``IngestionPipeline``, or of ``transformations=`` of an index, behind whatever
    changes the text or the metadata of nodes; an embedding may stand before or behind it. A node
    without text, such as one of an image, is passed on and has no chunk.

    All nodes of a source document are one document of the corpus. A changed one replaces its former
    version in one step, once all of it is encoded; until then, and where encoding fails, the former
    one answers. So nodes of one source belong into one call; ``ensure_encoded`` takes parts. Node
    ids are never a key: the same folder read again encodes nothing.

    A pipeline's cache skips a transformation that it has seen with the same nodes. The key holds
    the corpus's revision, so that it skips this one only where nothing changed since: neither a
    document, nor the model, nor the store. What went with a deleted store is encoded again at the
    next call, also where a pipeline's docstore leaves it no nodes; where the corpus's own folder
    was deleted too, and the pipeline has a docstore, ``reconcile`` names what is missing.

    ``num_workers`` above 1 is refused, since a model cannot go to other processes. Copies share the
    corpus. Any number of threads may call one encoder.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    corpus: Corpus | None = Field(default=None, exclude=True, repr=False)
    """Holds the keys and values of the nodes. Lent."""
    llm: Any = Field(default=None, exclude=True, repr=False)
    """A ``PcRagLLM``, or another object with ``open_corpus()``, in place of ``corpus``; its model
    is loaded at the first call."""
    metadata_mode: MetadataMode = MetadataMode.LLM
    """Which metadata stands before the text of a chunk. ``LLM`` is what LlamaIndex puts into
    prompts. ``NONE`` encodes the text alone: no edit of metadata encodes anything, and the header
    is computed with every prompt."""
    namespace: str = ""
    """Put before document ids in the corpus. Pipelines and indexes that share a corpus need
    different ones: each takes away what its own docstore no longer has."""
    show_progress: bool = Field(default=False, exclude=True)
    """Whether a progress bar is shown, where the call does not say."""

    _report: IngestReport | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_corpus(self) -> Self:
        if (self.corpus is None) is (self.llm is None):
            raise ConfigError(
                f"{type(self).__name__} needs one of corpus= and llm=: a Corpus, or a PcRagLLM "
                "whose corpus is taken"
            )
        if self.llm is not None and not callable(getattr(self.llm, "open_corpus", None)):
            raise ConfigError(
                f"{type(self).__name__}: llm is a {type(self.llm).__name__}, which has no corpus; "
                "pass a PcRagLLM, or corpus="
            )
        return self

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises the transformation."""
        return "PromptCacheEncoder"

    @property
    def report(self) -> IngestReport | None:
        """What the call that ended last did; ``None`` before the first."""
        return self._report

    def open_corpus(self) -> Corpus:
        """The corpus; loads the model at the first call where ``llm`` was given."""
        if self.corpus is not None:
            return self.corpus
        corpus: Corpus = self.llm.open_corpus()
        return corpus

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode what the store lacks.

        Args:
            nodes: All nodes of their source documents. Not modified.
            **kwargs: ``show_progress``; others belong to other transformations.

        Returns:
            ``nodes``.

        Raises:
            IngestError: Something else than nodes.
            LayoutError: A node is longer than any prompt can hold; nothing was encoded.
            StoreIOError: The store's medium failed; documents that were complete are there.
        """
        corpus = self.open_corpus()
        prepared = corpus.prepare(self._documents_of(nodes))
        # First, so that what a full store evicts for these nodes is not taken for lost.
        restored = corpus.upkeep.restore(owner_of(self.namespace))
        is_shown = kwargs.get("show_progress", self.show_progress)
        with _progress(corpus, lambda: prepared, is_shown=is_shown) as on_progress:
            report = corpus.add(prepared, on_progress=on_progress)
        self._report = restored + report
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As ``__call__``, in a thread; a cancelled task ends when the thread has."""
        return await ended(asyncio.to_thread(self, nodes, **kwargs))

    def ensure_encoded(
        self, nodes: Sequence[BaseNode], *, show_progress: bool = False
    ) -> IngestReport:
        """Make sure that nodes are encoded, and drop nothing.

        For nodes that came past the transformation, and for what a full store evicted. Nodes that
        the corpus does not know come behind the chunks that it has of their document.

        Args:
            nodes: Any, also some of a document. Not modified.
            show_progress: Show a progress bar; the field of this name does so for every call.

        Returns:
            What was encoded, nothing where all is there; and what a store that is too small for
            it dropped (``num_dropped``, ``num_evicted``).

        Raises:
            IngestError: Something else than nodes.
            LayoutError: A node is longer than any prompt can hold.
            StoreIOError: The store's medium failed.
        """
        corpus, documents = self.open_corpus(), self._documents_of(nodes)
        is_shown = show_progress or self.show_progress
        with _progress(corpus, lambda: corpus.prepare(documents), is_shown=is_shown) as on_progress:
            return corpus.upkeep.ensure(documents, on_progress=on_progress)

    def reconcile(
        self, docstore: BaseDocumentStore | Sequence[BaseNode], *, drops_all: bool = False
    ) -> ReconcileReport:
        """Let the corpus hold the documents that a docstore has, in this namespace, and no others.

        Call it after deletions: ``index.delete_ref_doc(..., delete_from_docstore=True)``, or a
        pipeline with ``docstore_strategy="upserts_and_delete"``. Nodes in the docstore of an index
        are compared and encoded where they differ; the docstore of a pipeline knows documents, not
        their nodes, so what the corpus has of those stays. A docstore that only has the hash of a
        document has it, too. ``corpus.gc()`` reclaims the bytes of what was removed.

        Args:
            docstore: Of a pipeline or an index; or nodes, such as ``vector_store.get_nodes()`` for
                an index whose vector store keeps the texts: its docstore has only hashes, which
                stay when documents are deleted.
            drops_all: Whether an empty docstore is believed, and everything removed.

        Returns:
            With the ids of the docstore. Of ``missing`` documents nothing is in the corpus; run
            their nodes through the transformation again.

        Raises:
            IngestError: The docstore is empty and the corpus is not, or it is no docstore.
            StoreIOError: The store's medium failed; nothing was removed.
        """
        upkeep, where = self.open_corpus().upkeep, owner_of(self.namespace)
        start = len(self.namespace)
        wanted = wanted_of(
            docstore,
            [record.id[start:] for record in upkeep.documents(where)],
            mode=self.metadata_mode,
            namespace=self.namespace,
        )
        report = upkeep.reconcile(wanted, where=where, drops_all=drops_all)
        return replace(
            report,
            removed=tuple(id_[start:] for id_ in report.removed),
            missing=tuple(id_[start:] for id_ in report.missing),
        )

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The settings and the state of the corpus, by which a pipeline's cache knows them.

        Loads the model at the first call where ``llm`` was given.
        """
        corpus = self.open_corpus()
        state = (
            corpus.engine.loaded.fingerprint,
            corpus.engine.store.generation,
            corpus.upkeep.revision,
        )
        return super().to_dict(**kwargs) | dict(zip(_STATE, state, strict=True))

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """An encoder of these settings; ``corpus`` or ``llm`` have to be given anew."""
        return super().from_dict({k: v for k, v in data.items() if k not in _STATE}, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the corpus."""
        return self.__copy__()

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            ConfigError: Always: what it would need is a model in another process.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be pickled: its model and store live in this process. "
            "Run the pipeline without num_workers, or run the splitters and extractors with "
            "num_workers in one pipeline and this transformation in a second one without"
        )

    def _documents_of(self, nodes: Sequence[BaseNode]) -> list[Document]:
        return documents_of(nodes, mode=self.metadata_mode, namespace=self.namespace)


@contextmanager
def _progress(
    corpus: Corpus, prepared: Callable[[], Sequence[PreparedDocument]], *, is_shown: bool
) -> Iterator[Callable[[IngestProgress], None] | None]:
    """A progress bar over the chunks to encode; nothing is prepared for none."""
    if not is_shown:
        yield None
        return
    num_chunks = corpus.estimate(prepared()).num_chunks
    chunks = iter(
        get_tqdm_iterable(range(num_chunks + 1), show_progress=True, desc="Encoding chunks")
    )
    next(chunks)
    yield lambda _: next(chunks, None)
    for _ in chunks:  # the bar ends at its full length
        pass
