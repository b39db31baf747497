"""Nodes and docstores of LlamaIndex as documents of a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.schema import Document as SourceDocument
from llama_index.core.storage.docstore.types import BaseDocumentStore
from pydantic import BaseModel

from pc_rag.corpus import Document
from pc_rag.errors import IngestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OWNER = "llama_index"


def owner_of(namespace: str) -> dict[str, str]:
    """Metadata that the documents of a namespace have in the corpus, and no others."""
    return {_OWNER: namespace}


def source_id_of(node: BaseNode) -> str:
    """The id of the document that a node belongs to: its own where it has no source."""
    return node.ref_doc_id or node.node_id


def chunk_text_of(node: BaseNode, mode: MetadataMode) -> str:
    """The text of a node's chunk, as LlamaIndex puts it into prompts; empty where it has no text.

    A header alone is no text: a node without any, such as one of an image, has no chunk.
    """
    if not node.get_content(metadata_mode=MetadataMode.NONE).strip():
        return ""
    return node.get_content(metadata_mode=mode).strip()


def documents_of(
    nodes: Iterable[BaseNode], *, mode: MetadataMode, namespace: str
) -> list[Document]:
    """One document for each source, with its nodes as chunks in their order.

    Args:
        nodes: Not modified.
        mode: Which metadata a chunk's header holds.
        namespace: Put before ids.

    Raises:
        IngestError: Something else than nodes.
    """
    by_source: dict[str, list[BaseNode]] = {}
    for node in nodes:
        if not isinstance(node, BaseNode):
            raise IngestError(
                f"nodes: got a {type(node).__name__}; pass nodes, of what a retriever found "
                "[each.node for each in found]"
            )
        by_source.setdefault(source_id_of(node), []).append(node)
    return [
        Document.of_chunks(
            [chunk_text_of(node, mode) for node in members],
            id=namespace + source_id,
            source=_path_of(members[0]),
            metadata=owner_of(namespace),
        )
        for source_id, members in by_source.items()
    ]


def wanted_of(
    held: BaseDocumentStore | Iterable[BaseNode],
    encoded: Iterable[str],
    *,
    mode: MetadataMode,
    namespace: str,
) -> dict[str, Document | None]:
    """What a docstore has, or some nodes are, by id in the corpus.

    Of an index a docstore holds nodes, which are the chunks. Of a pipeline it holds the documents
    that went in, whose chunks it does not know: those are ``None``, and so is what it has only a
    hash of.

    Args:
        held: The docstore, or the nodes.
        encoded: Ids in the docstore of what the corpus has now.
        mode: As for ``documents_of``.
        namespace: Likewise.

    Raises:
        IngestError: It is none of both.
    """
    if isinstance(held, BaseDocumentStore):
        return _wanted_of_docstore(held, encoded, mode, namespace)
    if not isinstance(held, Iterable) or isinstance(held, BaseModel):  # those iterate over fields
        raise IngestError(
            f"docstore: got a {type(held).__name__}; pass a docstore, such as index.docstore, or "
            "a list of nodes, such as index.vector_store.get_nodes()"
        )
    documents = documents_of(held, mode=mode, namespace=namespace)
    return {document.id or "": document for document in documents}


def _wanted_of_docstore(
    docstore: BaseDocumentStore, encoded: Iterable[str], mode: MetadataMode, namespace: str
) -> dict[str, Document | None]:
    infos = docstore.get_all_ref_doc_info() or {}
    places = {
        node_id: place for info in infos.values() for place, node_id in enumerate(info.node_ids)
    }
    held = docstore.docs.values()
    nodes = [node for node in held if node.ref_doc_id or not isinstance(node, SourceDocument)]
    # In the order in which they were split; a docstore of a database may list them in any.
    nodes.sort(key=lambda node: places.get(node.node_id, 0))
    documents = documents_of(nodes, mode=mode, namespace=namespace)
    known: Mapping[str, Document] = {document.id or "": document for document in documents}
    ids = dict.fromkeys([*map(source_id_of, held), *infos])
    hashed = _hashed_sources(docstore, [id_ for id_ in encoded if id_ not in ids])
    ids |= dict.fromkeys(id_ for id_ in hashed if id_ not in places)
    return {id_: known.get(id_) for id_ in (namespace + each for each in ids)}


def _hashed_sources(docstore: BaseDocumentStore, asked: Iterable[str]) -> list[str]:
    """Documents that a docstore knows by their hash, where it was told to keep no text.

    Args:
        docstore: Lists one document for each hash.
        asked: Asked for by name, since several documents may have one hash.
    """
    listed = docstore.get_all_document_hashes().values()
    return [*listed, *(id_ for id_ in asked if docstore.get_document_hash(id_) is not None)]


def _path_of(node: BaseNode) -> str:
    path = node.metadata.get("file_path")
    return path if isinstance(path, str) else ""
