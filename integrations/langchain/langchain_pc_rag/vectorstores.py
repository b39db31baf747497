"""A vector store whose documents are encoded when they are added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_pc_rag._checks import check_corpus, check_vectorstore
from langchain_pc_rag._ingestion import Ingestion, required_ids
from pc_rag.errors import ConfigError, IngestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStoreRetriever

    from pc_rag.corpus import Corpus

_Scored = list[tuple[Document, float]]


class PromptCacheVectorStore(VectorStore):
    """Any vector store, with every document that it is given encoded in a corpus first.

    Searches, filters, scores and whatever else the store can do are the store's own. What is
    deleted is no longer recognised in prompts; ``corpus.gc()`` reclaims its bytes, when you call
    it. Text that the corpus knows is not encoded again, so an edit of metadata costs nothing.

    Where a call fails, is cancelled or interrupted, the corpus follows what the store then holds,
    if the store can look documents up by their ids. Calls for the same ids take turns in this
    process, but for synchronous ones on the thread of a running event loop, which cannot wait.

    Args:
        vectorstore: Holds the documents. What is added to it directly is not encoded.
        corpus: Holds the keys and values of their texts, each text one chunk.
        namespace: Put before ids in the corpus. Stores that share a corpus need different ones
            where their ids may be alike; otherwise a document of one replaces the other's.

    Raises:
        ConfigError: No vector store, or no corpus.
    """

    def __init__(self, vectorstore: VectorStore, corpus: Corpus, *, namespace: str = "") -> None:
        check_vectorstore(type(self).__name__, vectorstore)
        check_corpus(type(self).__name__, corpus)
        self.vectorstore = vectorstore
        self.corpus = corpus
        self._ingestion = Ingestion(vectorstore, corpus, namespace)

    def __getattr__(self, name: str) -> Any:
        """What only this kind of store has is the store's own.

        It goes past the corpus: what such a method adds is not encoded.
        """
        if name.startswith("_") or name == "vectorstore":  # also while a copy is being made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.vectorstore, name)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """A store made of texts.

        Args:
            texts: The texts.
            embedding: What an ``InMemoryVectorStore`` embeds with; not used where ``vectorstore``
                is given.
            metadatas: Of each text.
            ids: Of each text; the store gives them by default.
            **kwargs: ``corpus`` has to be given; ``vectorstore`` and ``namespace`` are those of the
                constructor, the first an ``InMemoryVectorStore`` by default. The rest goes to
                ``add_texts``.

        Raises:
            ConfigError: There is no corpus.
            IngestError: As for ``add_texts``.
        """
        store = cls._made(embedding, kwargs)
        store.add_texts(texts, metadatas, ids=ids, **kwargs)
        return store

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """As ``from_texts``."""
        store = cls._made(embedding, kwargs)
        await store.aadd_texts(texts, metadatas, ids=ids, **kwargs)
        return store

    @classmethod
    def _made(cls, embedding: Embeddings, options: dict[str, Any]) -> Self:
        """An empty store of what ``options`` name, which is taken out of them."""
        corpus = options.pop("corpus", None)
        if corpus is None:
            raise ConfigError(
                f"{cls.__name__}.from_texts got no corpus; pass corpus=, a pc_rag.Corpus that "
                f"keeps the documents' keys and values"
            )
        vectorstore = options.pop("vectorstore", None)
        if vectorstore is None:  # not "or": an empty store may be false
            vectorstore = InMemoryVectorStore(embedding)
        return cls(vectorstore, corpus, namespace=options.pop("namespace", ""))

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Encode documents, then add them, replacing those of the same id.

        Args:
            documents: The documents; not modified.
            **kwargs: ``ids`` go before the documents' own; the rest is the store's.

        Returns:
            Their ids, as the store says.

        Raises:
            PromptCacheError: A document cannot be encoded; the store is as it was.
        """
        ids = _ids_of(documents, kwargs)
        return self._ingestion.add(documents, ids, kwargs)

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """As ``add_documents``; encoding does not hold the event loop."""
        ids = _ids_of(documents, kwargs)
        return await self._ingestion.aadd(documents, ids, kwargs)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Encode texts, then add them; see ``add_documents``.

        Raises:
            IngestError: The numbers of texts, metadatas and ids differ.
        """
        documents = _documents(texts, metadatas, ids)
        return self.add_documents(documents, **kwargs)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As ``add_texts``."""
        documents = _documents(texts, metadatas, ids)
        return await self.aadd_documents(documents, **kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents from the store; prompts with their text are prefilled from then on.

        Args:
            ids: Which; ids without a document are no failure.
            **kwargs: The store's own.

        Returns:
            Whether they are gone.

        Raises:
            ValueError: There are no ids: what else the store would delete by cannot be told to the
                corpus.
        """
        return not self._ingestion.delete(required_ids(ids), **kwargs).failed

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """As ``delete``."""
        deletion = await self._ingestion.adelete(required_ids(ids), **kwargs)
        return not deletion.failed

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The store's documents of these ids."""
        return self.vectorstore.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """As ``get_by_ids``."""
        return await self.vectorstore.aget_by_ids(ids)

    @property
    def embeddings(self) -> Embeddings | None:
        """What the store embeds with."""
        return self.vectorstore.embeddings

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """A retriever over this store, of the kind that the wrapped one makes.

        What is added through it is encoded, unless the wrapped store makes retrievers of its own.
        """
        if type(self.vectorstore).as_retriever is not VectorStore.as_retriever:
            return self.vectorstore.as_retriever(**kwargs)
        return super().as_retriever(**kwargs)

    def search(self, query: str, search_type: str, **kwargs: Any) -> list[Document]:
        """See the store."""
        return self.vectorstore.search(query, search_type, **kwargs)

    async def asearch(self, query: str, search_type: str, **kwargs: Any) -> list[Document]:
        """See the store."""
        return await self.vectorstore.asearch(query, search_type, **kwargs)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """See the store."""
        return self.vectorstore.similarity_search(query, k=k, **kwargs)

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """See the store."""
        return await self.vectorstore.asimilarity_search(query, k=k, **kwargs)

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> _Scored:
        """See the store."""
        return self.vectorstore.similarity_search_with_score(*args, **kwargs)

    async def asimilarity_search_with_score(self, *args: Any, **kwargs: Any) -> _Scored:
        """See the store."""
        return await self.vectorstore.asimilarity_search_with_score(*args, **kwargs)

    def similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> _Scored:
        """See the store."""
        return self.vectorstore.similarity_search_with_relevance_scores(query, k=k, **kwargs)

    async def asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> _Scored:
        """See the store."""
        return await self.vectorstore.asimilarity_search_with_relevance_scores(query, k=k, **kwargs)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        """See the store."""
        return self.vectorstore.similarity_search_by_vector(embedding, k=k, **kwargs)

    async def asimilarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        """See the store."""
        return await self.vectorstore.asimilarity_search_by_vector(embedding, k=k, **kwargs)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """See the store."""
        return self.vectorstore.max_marginal_relevance_search(
            query, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """See the store."""
        return await self.vectorstore.amax_marginal_relevance_search(
            query, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        """See the store."""
        return self.vectorstore.max_marginal_relevance_search_by_vector(
            embedding, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    async def amax_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        """See the store."""
        return await self.vectorstore.amax_marginal_relevance_search_by_vector(
            embedding, k=k, fetch_k=fetch_k, lambda_mult=lambda_mult, **kwargs
        )

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self.vectorstore._select_relevance_score_fn()  # noqa: SLF001 - the store's scores are its own


def _ids_of(documents: Sequence[Document], options: dict[str, Any]) -> list[str | None]:
    """The ids of documents as the store will take them: those of the call go first."""
    given = options.get("ids")
    own = [document.id for document in documents]
    if not given:
        return list(own)
    if len(given) != len(own):
        return list(given)
    return [a or b for a, b in zip(given, own, strict=True)]


def _documents(
    texts: Iterable[str], metadatas: list[dict[str, Any]] | None, ids: list[str] | None
) -> list[Document]:
    texts = list(texts)
    metadatas = metadatas or [{} for _ in texts]
    for name, values in (("metadatas", metadatas), ("ids", ids or texts)):
        if len(values) != len(texts):
            raise IngestError(
                f"{len(values)} {name} for {len(texts)} texts; give one for each, or none at all"
            )
    known: list[str] | list[None] = ids or [None] * len(texts)
    return [
        Document(id=document_id, page_content=text, metadata=metadata)
        for text, metadata, document_id in zip(texts, metadatas, known, strict=True)
    ]
