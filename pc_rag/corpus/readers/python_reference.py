"""The Python language reference, which every interpreter carries as ``pydoc_data.topics``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pc_rag.corpus.documents import Document
from pc_rag.errors import ConfigError, IngestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SOURCE = "python-reference"


def _topics() -> Mapping[str, str]:
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ModuleNotFoundError as error:
        raise IngestError(
            "this Python comes without pydoc_data.topics; install the full standard library, or "
            "index files of your own"
        ) from error
    topics: Mapping[str, str] = module.topics
    return topics


def python_reference_topics() -> tuple[str, ...]:
    """Names of all topics, sorted.

    Raises:
        IngestError: This Python comes without its reference.
    """
    return tuple(sorted(_topics()))


def python_reference(selection: Sequence[str] | None = None) -> Iterator[Document]:
    """One document a topic, with id and source ``python-reference/<topic>``.

    Args:
        selection: Topics in the order wanted; ``None`` for all of them, sorted.

    Raises:
        ConfigError: A topic does not exist; names those that do.
        IngestError: This Python comes without its reference.
    """
    topics = _topics()
    names = python_reference_topics() if selection is None else tuple(selection)
    unknown = [name for name in names if name not in topics]
    if unknown:
        raise ConfigError(
            f"the Python reference has no topic {', '.join(map(repr, unknown))}; "
            f"choose from: {', '.join(sorted(topics))}"
        )
    return (_document(name, topics[name]) for name in names)


def _document(topic: str, text: str) -> Document:
    name = f"{SOURCE}/{topic}"
    return Document(text, id=name, source=name, metadata={"topic": topic})
