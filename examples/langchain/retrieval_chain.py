"""An unchanged ``create_retrieval_chain``; its documents' KV is read, not computed.

python examples/langchain/retrieval_chain.py
"""

from __future__ import annotations

from island import QUESTION, filled_store, show_hits
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import ChatPromptTemplate
from langchain_pc_rag import CacheHitHandler, ChatPcRag


def main() -> None:
    """Ask one question."""
    llm = ChatPcRag(model="smollm2", max_tokens=40)  # the changed line
    retriever = filled_store(llm).as_retriever(search_kwargs={"k": 3})

    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Answer in one short sentence from this context:\n\n{context}"),
            ("human", "{input}"),
        ]
    )
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt))

    hits = CacheHitHandler()
    result = chain.invoke({"input": QUESTION}, config={"callbacks": [hits]})
    show_hits(hits, result["answer"])
    llm.close()


if __name__ == "__main__":
    main()
