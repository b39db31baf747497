"""The document: what a reader yields and a corpus takes in."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pc_rag.errors import IngestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHUNK_SEPARATOR = "\n\n"
"""Stands between the chunks in the text of a document that was split elsewhere."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its origin.

    Attributes:
        text: The text, any length.
        id: Name under which a later version replaces this one. ``None`` derives one; see
            ``document_id``.
        source: Where the text comes from: a file's path, an address; empty where unknown.
        metadata: Facts to filter by. Copied, so later changes to the mapping do not show.
        is_whole: Never split the text: stripped at both ends it is one chunk, whatever its length.
            For texts that were split elsewhere.
        chunks: The chunks of a text that was split elsewhere, in order, taken as they are; ``None``
            where the corpus splits. See ``of_chunks``, which makes such a document.

    Raises:
        IngestError: A text is not valid Unicode, the id is empty, a metadata key or value is not a
            string, or ``chunks`` do not belong to ``text`` or are given for a whole document.
    """

    text: str
    id: str | None = None
    source: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = False
    chunks: tuple[str, ...] | None = None

    @classmethod
    def of_chunks(
        cls,
        texts: Iterable[str],
        *,
        id: str | None = None,  # noqa: A002 - the field's name
        source: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> Self:
        """A document that was split elsewhere.

        Args:
            texts: Each, stripped at both ends, is one chunk, whatever its length; those of white
                space only are left out.
            id: As of any document.
            source: Likewise.
            metadata: Likewise.

        Raises:
            IngestError: As of any document; or a single text, or something else than texts.
        """
        chunks = tuple(stripped for text in _as_texts(texts) if (stripped := text.strip()))
        return cls(
            CHUNK_SEPARATOR.join(chunks),
            id=id,
            source=source,
            metadata=metadata or {},
            chunks=chunks,
        )

    def __post_init__(self) -> None:
        name = self.source or self.id or "document without a source"
        if self.id == "":
            raise IngestError(f"{name}: the id is empty; pass None to have one derived")
        for key, value in self.metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise IngestError(
                    f"{name}: metadata {key!r} = {value!r} is not a pair of strings; convert it, "
                    f"for example with str()"
                )
        for part, text in (("text", self.text), ("id", self.id or ""), ("source", self.source)):
            _check_unicode(text, f"{name!a}: {part}")
        for key, value in self.metadata.items():
            _check_unicode(key + value, f"{name!a}: metadata {key!a}")
        object.__setattr__(self, "metadata", dict(self.metadata))
        self._check_chunks(name)

    def _check_chunks(self, name: str) -> None:
        if self.chunks is None:
            return
        if self.is_whole:
            raise IngestError(
                f"{name}: is_whole makes the text one chunk, and {len(self.chunks)} chunks are "
                "given; leave out one of them"
            )
        is_stripped = all(chunk and chunk == chunk.strip() for chunk in self.chunks)
        if not is_stripped or self.text != CHUNK_SEPARATOR.join(self.chunks):
            raise IngestError(
                f"{name}: text is not the {len(self.chunks)} chunks, stripped and joined; make the "
                "document with Document.of_chunks"
            )


def _check_unicode(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise IngestError(
            f"{place}: character {error.start} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}, which no tokenizer or catalog can encode; "
            f"decode text with errors='replace', and rename files whose names are not UTF-8"
        ) from error


def document_id(document: Document) -> str:
    """The document's id, or one derived from its source, text and metadata.

    Metadata takes part because the same text may stand under two tenants: without it the second
    document would replace the first. So a document whose metadata will be edited needs an id of its
    own to be recognised as the same one; without it the edit is a second document that shares every
    chunk.
    """
    if document.id is not None:
        return document.id
    digest = hashlib.sha256()
    pairs = (text for pair in sorted(document.metadata.items()) for text in pair)
    # One more part than pairs give, so that it is taken for none of them.
    lengths = (len(chunk) for chunk in document.chunks or ())
    borders = () if document.chunks is None else (" ".join(map(str, lengths)),)
    for part in (document.source, document.text, *pairs, *borders):
        data = part.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def content_digest(document: Document) -> str:
    """Hex SHA-256 of a document's text, or of its chunks where it was split elsewhere."""
    if document.chunks is None:
        return hashlib.sha256(document.text.encode()).hexdigest()
    digest = hashlib.sha256()
    for chunk in document.chunks:
        data = chunk.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.hexdigest()


def as_documents(documents: Iterable[Document | str]) -> Iterator[Document]:
    """Documents as they are, plain texts as documents.

    Raises:
        IngestError: A single one: to Python a text is an iterable of texts, and each of its
            characters would become a document. Raised where it is reached: something that is
            neither a document nor a text.
    """
    refuse_single(documents)
    return map(_as_document, documents)


def _as_texts(texts: object) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise IngestError(f"chunks: got a single {type(texts).__name__}; pass a list of texts")
    found = list(texts)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise IngestError(f"chunks: number {number} is a {type(text).__name__}, not a text")
    return found


def _as_document(document: object) -> Document:
    if isinstance(document, str):
        return Document(document)
    if not isinstance(document, Document):
        raise IngestError(
            f"documents: {document!r:.60} is a {type(document).__name__}; pass Document or str"
        )
    return document


def refuse_single(documents: object) -> None:
    """Raise where something is no collection of documents; see ``as_documents``.

    Raises:
        IngestError: A text, or anything else that cannot be iterated over.
    """
    if isinstance(documents, str) or not isinstance(documents, Iterable):
        raise IngestError(
            f"documents: got a single {type(documents).__name__}; pass a list of documents"
        )
