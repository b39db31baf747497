"""LangChain's ``index()``: updates and deletions, and what is encoded for them.

python examples/langchain/indexing.py
"""

from __future__ import annotations

from island import TEXTS
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_pc_rag import ChatPcRag, PcRagEmbeddings, PromptCacheIndex


def main() -> None:
    """Index, index again, edit, and drop documents."""
    llm = ChatPcRag(model="smollm2")
    corpus = llm.open_corpus()
    documents = PromptCacheIndex(
        vectorstore=InMemoryVectorStore(PcRagEmbeddings()), corpus=corpus, k=2
    )
    records = InMemoryRecordManager(namespace="island")
    records.create_schema()
    source = [Document(text, metadata={"source": f"{i}.txt"}) for i, text in enumerate(TEXTS)]
    edited = [
        source[0],
        Document("The ferry is free on Sundays. " + TEXTS[1], metadata={"source": "1.txt"}),
        Document(TEXTS[2], metadata={"source": "2.txt", "checked": "yes"}),
    ]

    for name, batch in (("first", source), ("again", source), ("edited", edited)):
        before = _num_entries(corpus)
        result = index(batch, records, documents, cleanup="full", source_id_key="source")
        print(f"{name}: {result}, encoded {_num_entries(corpus) - before}")
    print(f"after gc: {corpus.gc()}")
    print(f"found: {documents.invoke('Is the ferry free?')[0].page_content[:30]!r}")
    llm.close()


def _num_entries(corpus: object) -> int:
    return corpus.stats().store[0].num_entries


if __name__ == "__main__":
    main()
