"""A chain of LangChain's expression language, streamed, and its own head learned.

python examples/langchain/lcel.py
"""

from __future__ import annotations

from island import QUESTION, filled_store, show_hits
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_pc_rag import CacheHitHandler, ChatPcRag, TTFTHandler


def joined(documents: list[Document]) -> str:
    """The documents as the prompt holds them."""
    return "\n\n".join(document.page_content for document in documents)


def main() -> None:
    """Ask one question twice: before and after the chain's own head was learned."""
    llm = ChatPcRag(model="smollm2", max_tokens=40, learn_prefix=True)  # the changed line
    retriever = filled_store(llm).as_retriever(search_kwargs={"k": 3})

    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "You are brief. Answer from this context:\n\n{context}"),
            ("human", "{question}"),
        ]
    )
    chain = (
        {"context": retriever | joined, "question": RunnablePassthrough()}
        | prompt
        | llm
        | StrOutputParser()
    )

    for moment in ("before", "after"):
        hits, ttft = CacheHitHandler(), TTFTHandler()
        pieces = chain.stream(QUESTION, config={"callbacks": [hits, ttft]})
        print(f"{moment} the head was learned")
        show_hits(hits, "".join(pieces))
        print(ttft.report())
        if llm.prefix_learning is not None:
            print(f"learned: {llm.prefix_learning.result()} chunks are encoded behind the head")
    llm.close()


if __name__ == "__main__":
    main()
