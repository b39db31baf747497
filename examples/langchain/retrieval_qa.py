"""An unchanged ``RetrievalQA`` on the string model; its documents' KV is read, not computed.

python examples/langchain/retrieval_qa.py
"""

from __future__ import annotations

from island import QUESTION, filled_store, show_hits
from langchain_classic.chains import RetrievalQA
from langchain_pc_rag import CacheHitHandler, PcRagLLM


def main() -> None:
    """Ask one question."""
    llm = PcRagLLM(model="smollm2", max_tokens=24, stop=["\n"])  # the changed line
    retriever = filled_store(llm).as_retriever(search_kwargs={"k": 3})

    chain = RetrievalQA.from_chain_type(llm, chain_type="stuff", retriever=retriever)

    hits = CacheHitHandler()
    result = chain.invoke({"query": QUESTION}, config={"callbacks": [hits]})
    show_hits(hits, result["result"])
    llm.close()


if __name__ == "__main__":
    main()
