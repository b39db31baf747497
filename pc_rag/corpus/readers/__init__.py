"""From files and folders to documents; one file a format."""

from __future__ import annotations

from pc_rag.corpus.readers.paths import PathReader, SkippedFile, read_paths
from pc_rag.corpus.readers.python_reference import python_reference, python_reference_topics

__all__ = [
    "PathReader",
    "SkippedFile",
    "python_reference",
    "python_reference_topics",
    "read_paths",
]
