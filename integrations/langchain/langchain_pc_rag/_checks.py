"""What a user is likely to hand over in place of what is wanted."""

from __future__ import annotations

from langchain_core.vectorstores import VectorStore

from pc_rag.corpus import Corpus
from pc_rag.errors import ConfigError


def check_corpus(owner: str, corpus: object) -> None:
    """Refuse what is no corpus.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(corpus, Corpus):
        raise ConfigError(
            f"{owner}: corpus is a {type(corpus).__name__}; give a pc_rag.Corpus, such as "
            "ChatPcRag(...).open_corpus()"
        )


def check_vectorstore(owner: str, vectorstore: object) -> None:
    """Refuse what is no vector store.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(vectorstore, VectorStore):
        raise ConfigError(
            f"{owner}: vectorstore is a {type(vectorstore).__name__}; give a vector store of "
            "LangChain, such as InMemoryVectorStore(embeddings)"
        )
