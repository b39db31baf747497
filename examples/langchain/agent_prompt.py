"""An unchanged two-step agent: ``create_agent`` whose ``dynamic_prompt`` holds what was retrieved.

python examples/langchain/agent_prompt.py
"""

from __future__ import annotations

from island import QUESTION, filled_store, show_hits
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_pc_rag import CacheHitHandler, ChatPcRag


def main() -> None:
    """Ask one question."""
    llm = ChatPcRag(model="smollm2", max_tokens=40)  # the changed line
    retriever = filled_store(llm).as_retriever(search_kwargs={"k": 3})

    @dynamic_prompt
    def with_context(request: ModelRequest) -> str:
        documents = retriever.invoke(request.state["messages"][-1].text)
        context = "\n\n".join(document.page_content for document in documents)
        return f"Answer in one short sentence from this context:\n\n{context}"

    agent = create_agent(llm, tools=[], middleware=[with_context])

    hits = CacheHitHandler()
    messages = {"messages": [{"role": "user", "content": QUESTION}]}
    result = agent.invoke(messages, config={"callbacks": [hits]})
    show_hits(hits, result["messages"][-1].text)
    llm.close()


if __name__ == "__main__":
    main()
