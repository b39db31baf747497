"""LangChain's own integration suite of what a chat model promises, on two local models.

Both models' chat templates know no tools, so the suite's tests of tools are skipped; tools are
tested with forced output in ``test_langchain_tools.py``.
"""

from __future__ import annotations

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_pc_rag import ChatPcRag
from langchain_pc_rag.messages import to_conversation
from langchain_tests.integration_tests import ChatModelIntegrationTests


class _LocalModelTests(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatPcRag

    @property
    def has_tool_calling(self):
        """The templates of the models under test know no tools."""
        return False

    @property
    def has_structured_output(self):
        return True

    @property
    def supports_json_mode(self):
        return True

    @property
    def supported_usage_metadata_details(self):
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def _ask(self, *, stream, loses_entries=False):
        llm = ChatPcRag(**self.chat_model_params)
        text = "The suite's own chunk, long enough to be recognised in a prompt. " * 3
        corpus = llm.open_corpus()
        corpus.add([text])
        messages = [SystemMessage(f"Use this: {text}"), HumanMessage("Why?")]
        if loses_entries:
            for key in corpus.plan(to_conversation(messages)).recipes:
                corpus.engine.store.remove(key)
        if not stream:
            return llm.invoke(messages)
        chunks = list(llm.stream(messages))
        return sum(chunks[1:], start=chunks[0])

    def invoke_with_cache_read_input(self, *, stream=False):
        message = self._ask(stream=stream)
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    def invoke_with_cache_creation_input(self, *, stream=False):
        message = self._ask(stream=stream, loses_entries=True)
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 0
        return message


class TestTinyModel(_LocalModelTests):
    """Random weights: what it says means nothing, but has to have the right form."""

    @pytest.fixture(autouse=True)
    def _folders(self, tiny_folder, other_folder):
        self._model, self._other = str(tiny_folder), str(other_folder)

    @property
    def chat_model_params(self):
        # Hot, so that a string that is held to a schema finds its end.
        return {"model": self._model, "temperature": 3.0, "seed": 0, "max_tokens": 1500}

    @property
    def model_override_value(self):
        return self._other


@pytest.mark.slow
class TestSmolLM2(_LocalModelTests):
    """The default model."""

    @property
    def chat_model_params(self):
        # Without a penalty this small model repeats itself until its tokens run out.
        return {"model": "smollm2", "max_tokens": 200, "repetition_penalty": 1.1}

    @property
    def model_override_value(self):
        return "smollm2"
