"""LangChain's own unit suite of what a chat model promises."""

from __future__ import annotations

from langchain_pc_rag import ChatPcRag
from langchain_tests.unit_tests import ChatModelUnitTests


class TestChatPcRag(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatPcRag

    @property
    def init_from_env_params(self):
        variables = {"PC_RAG_MODEL": "some-model", "PC_RAG_STORE": "a-folder"}
        return variables, {}, {"model": "some-model", "store": "a-folder"}
