"""Nodes of LlamaIndex, pipelines over them, and a corpus that counts what it encodes."""

from __future__ import annotations

from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.llms.pc_rag import PromptCacheEncoder

from pc_rag.corpus import Corpus, chunk_id_of
from pc_rag.kv.disk_tier import DiskTier
from pc_rag.kv.memory_tier import MemoryTier
from pc_rag.kv.tiered_store import TieredStore
from tests.support.corpora import SHORT, chunk_uses, tiny_engine
from tests.support.engines import SpyStore

LONG = " ".join(f"Line {number} tells of the number {number}." for number in range(12))
"""Several nodes of ``splitter``."""


class Opened:
    """A corpus in a folder, over a store that counts; closed and opened again at will."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.store = SpyStore(TieredStore([MemoryTier(1 << 30), DiskTier(folder / "kv")]))
        self.engine = tiny_engine(self.store, **options)
        self.corpus = Corpus(self.engine, folder / "catalog", has_retrieval=False)
        self.encoder = PromptCacheEncoder(corpus=self.corpus)
        with self.engine.source.acquire(*self._prefix()):
            pass  # the prefix is encoded here, so that what is counted later are chunks

    def _prefix(self):
        request = self.corpus.plan("x")
        return list(request.recipes), request.recipes

    def encodes(self, work):
        """How many entries were made and stored while something was done."""
        before = self.store.calls["put"]
        work()
        return self.store.calls["put"] - before

    def served(self, *texts):
        """The texts of whose chunks a prompt reads the entries."""
        uses = chunk_uses(self.corpus.generate(" | ".join(texts), SHORT))
        known = {chunk_id_of(text): text for text in texts}
        return [known[use.label] for use in uses if use.is_hit]

    def chunks(self, id_):
        return self.corpus.upkeep.chunk_texts(id_)

    def close(self):
        self.corpus.close()
        self.engine.close()
        self.store.close()


def document(text, id_="d", **metadata):
    return Document(text=text, doc_id=id_, metadata=metadata)


def node(text, id_="d", **metadata):
    source = RelatedNodeInfo(node_id=id_)
    return TextNode(text=text, metadata=metadata, relationships={NodeRelationship.SOURCE: source})


def splitter():
    return SentenceSplitter(chunk_size=16, chunk_overlap=0, tokenizer=str.split)


def pipeline(held, *, cache=False, **options):
    return IngestionPipeline(
        transformations=[splitter(), held.encoder], disable_cache=not cache, **options
    )
