"""Documents to chunks to entries: reading, chunking, the catalog, retrieval and recognition."""

from __future__ import annotations

from pc_rag.corpus.catalog import Catalog, chunk_id_of
from pc_rag.corpus.chunking import Chunker, TextChunk
from pc_rag.corpus.corpus import Corpus
from pc_rag.corpus.documents import Document, document_id
from pc_rag.corpus.embedding import (
    CallableEmbedder,
    Embedder,
    as_embedder,
    default_embedder,
    sentence_transformer,
)
from pc_rag.corpus.prompt_format import PromptFormat
from pc_rag.corpus.readers import PathReader, SkippedFile, python_reference, read_paths
from pc_rag.corpus.recognition import Recognized, Recognizer
from pc_rag.corpus.reports import (
    Answer,
    AnswerStream,
    CorpusStats,
    GcReport,
    IngestEstimate,
    IngestProgress,
    IngestReport,
    RetrievedChunk,
    ScaffoldReport,
)
from pc_rag.corpus.retrieval import ScoredId, VectorIndex
from pc_rag.corpus.upkeep import ReconcileReport, Upkeep

__all__ = [
    "Answer",
    "AnswerStream",
    "CallableEmbedder",
    "Catalog",
    "Chunker",
    "Corpus",
    "CorpusStats",
    "Document",
    "Embedder",
    "GcReport",
    "IngestEstimate",
    "IngestProgress",
    "IngestReport",
    "PathReader",
    "PromptFormat",
    "Recognized",
    "Recognizer",
    "ReconcileReport",
    "RetrievedChunk",
    "ScaffoldReport",
    "ScoredId",
    "SkippedFile",
    "TextChunk",
    "Upkeep",
    "VectorIndex",
    "as_embedder",
    "chunk_id_of",
    "default_embedder",
    "document_id",
    "python_reference",
    "read_paths",
    "sentence_transformer",
]
