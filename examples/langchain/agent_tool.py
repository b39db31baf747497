"""An unchanged agent with a retriever tool; the documents in the tool's answer are hits.

The default model's own chat template knows no tools, so it is given one that does. The model is
small, so its first step is forced to be a search; the call is held to the tool's schema.

python examples/langchain/agent_tool.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from island import QUESTION, filled_store, show_hits
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.documents import Document
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_pc_rag import CacheHitHandler, ChatPcRag
from pydantic import Field

TEMPLATE = Path(__file__).with_name("chatml_tools.jinja")


def main() -> None:
    """Ask one question."""
    llm = ChatPcRag(model="smollm2", max_tokens=60, chat_template=TEMPLATE.read_text())
    store = filled_store(llm)

    @tool(response_format="content_and_artifact")
    def search(query: Annotated[str, Field(max_length=40)]) -> tuple[str, list[Document]]:
        """Search what is known about the island."""
        documents = store.as_retriever(search_kwargs={"k": 2}).invoke(query)
        found = "\n\n".join(
            f"Source: {document.metadata}\nContent: {document.page_content}"
            for document in documents
        )
        return found, documents

    @wrap_model_call
    def search_first(
        request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
    ) -> ModelResponse:
        has_searched = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(tool_choice="none" if has_searched else "any"))

    agent = create_agent(llm, tools=[search], middleware=[search_first])

    hits = CacheHitHandler()
    messages = {"messages": [{"role": "user", "content": QUESTION}]}
    result = agent.invoke(messages, config={"callbacks": [hits]})
    calls = [call for message in result["messages"] for call in getattr(message, "tool_calls", [])]
    print(f"called: {[(call['name'], call['args']) for call in calls]}")
    show_hits(hits, result["messages"][-1].text)
    llm.close()


if __name__ == "__main__":
    main()
