"""Documents of which only a part is at hand, put beside what the corpus has of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.corpus.documents import Document, document_id
from pc_rag.errors import IngestError

if TYPE_CHECKING:
    from pc_rag.corpus.catalog import Catalog


def beside_known(document: Document, catalog: Catalog) -> Document:
    """A document with the chunks that the corpus has of it, and those it lacks behind them.

    In the order given where all known ones are among them. Of a known document, source and
    metadata stay as they are.

    Raises:
        IngestError: The document was not split elsewhere: which chunks it lacks is not known.
    """
    id_ = document_id(document)
    if document.chunks is None:
        raise IngestError(
            f"document {id_!r} has no chunks of its own; make it with Document.of_chunks, or add it"
        )
    record = catalog.document(id_)
    if record is None:
        return document
    known = [chunk.text for chunk in catalog.chunks_of(id_)]
    lacking = [text for text in dict.fromkeys(document.chunks) if text not in set(known)]
    is_whole = set(known) <= set(document.chunks)
    return Document.of_chunks(
        document.chunks if is_whole else [*known, *lacking],
        id=id_,
        source=record.source,
        metadata=record.metadata,
    )
