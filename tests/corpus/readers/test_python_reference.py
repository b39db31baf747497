"""The language reference of the running interpreter."""

from __future__ import annotations

import pytest

from pc_rag.corpus.readers import python_reference, python_reference_topics
from pc_rag.errors import ConfigError


def test_topics_come_in_order_when_they_are_selected():
    """Id and source name the topic."""
    first, second = python_reference(["with", "assert"])
    assert first.id == first.source == "python-reference/with"
    assert second.metadata == {"topic": "assert"}
    assert "assert" in second.text


def test_every_topic_is_a_document_when_nothing_is_selected():
    """All topics, sorted, none empty."""
    documents = list(python_reference())
    assert [document.metadata["topic"] for document in documents] == list(python_reference_topics())
    assert all(document.text.strip() for document in documents)


def test_topic_is_refused_when_it_does_not_exist():
    """At the call, with the topics that do."""
    with pytest.raises(ConfigError, match="no topic 'walrus'; choose from: assert"):
        python_reference(["walrus"])
