"""Corpus chunks inside messages: content blocks that say which chunk they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.prompts import format_document

from pc_rag.corpus import chunk_id_of
from pc_rag.corpus.planning import find_apart
from pc_rag.errors import PromptError
from pc_rag.model.conversation import CachePoint, parse_ttl

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from langchain_core.documents import Document
    from langchain_core.messages import BaseMessage
    from langchain_core.prompts import BasePromptTemplate

ContentBlock: TypeAlias = dict[str, Any]
"""A content block of a LangChain message."""

_MARK = "pc_rag"
"""The key of a block under which its chunk is named."""

_CACHE_MARK = "cache_control"
"""The key of a block behind which the prompt is to be kept, as chat models of Anthropic know it."""

_DEFAULT_TTL = "5m"

_SKIPPED = frozenset(
    {
        "reasoning",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_call",
        "tool_call_chunk",
        "invalid_tool_call",
        "input_json_delta",
        "function_call",
    }
)
"""Blocks that are no text of the prompt: thoughts, which templates drop from earlier turns, and
calls of tools, which a message carries in its ``tool_calls`` too."""


def format_chunks(
    documents: Iterable[Document],
    *,
    separator: str = "\n\n",
    document_prompt: BasePromptTemplate[str] | None = None,
) -> list[ContentBlock]:
    """Content blocks of a message that hold documents, each text with the key of its chunk.

    A model of this package reads the stored keys and values of such a block without looking for
    the text in the prompt. To any other model the blocks are plain text: joined, they are what a
    "stuff documents" chain writes.

    Args:
        documents: Retrieved documents, in the order of the prompt; not modified.
        separator: Between two documents.
        document_prompt: Writes a document; ``page_content`` alone by default. Where it does not
            write ``page_content`` verbatim the document becomes plain text.

    Returns:
        Text blocks, none of them empty; none where there is no document.
    """
    pieces: list[ContentBlock] = []
    for index, document in enumerate(documents):
        if index:
            pieces.append(text_block(separator))
        text = document.page_content
        if document_prompt is not None:
            text = format_document(document, document_prompt)
        pieces += mark_chunks(text, [document])
    return _merged(pieces)


def mark_chunks(text: str, documents: Sequence[Document]) -> list[ContentBlock]:
    """Content blocks of a text in which documents stand, in their order.

    Args:
        text: Any text.
        documents: Those of them whose ``page_content``, save whitespace at its ends, stands
            verbatim in the text, behind the one before, become blocks with the key of their chunk.
            A short one is rather found where its ends cut no word.

    Returns:
        Text blocks, none of them empty; joined, they are the text.
    """
    blocks: list[ContentBlock] = []
    end = 0
    for document in documents:
        chunk = document.page_content.strip()  # as a corpus keeps it
        start = find_apart(text, chunk, end) if chunk else -1
        if start >= 0:
            blocks += [text_block(text[end:start]), _chunk_block(chunk)]
            end = start + len(chunk)
    return _merged([*blocks, text_block(text[end:])])


def message_chunks(message: BaseMessage) -> tuple[str, tuple[str, ...]]:
    """The text of a message, and the texts of the chunks that its content blocks name.

    A block whose text is no longer that of its chunk, as when somebody edited it on the way, is
    plain text. Thoughts and calls of tools are left out; a refusal is what the model said.

    Returns:
        The texts of the content's blocks, joined; and the chunks' texts, in order.

    Raises:
        PromptError: The content has a block that is no text, such as an image.
    """
    if isinstance(message.content, str):
        return message.content, ()
    texts: list[str] = []
    chunks: list[str] = []
    for block in message.content:
        text = block if isinstance(block, str) else _text_of(block, message.type)
        texts.append(text)
        if isinstance(block, dict) and _is_chunk(block, text):
            chunks.append(text)
    return "".join(texts), tuple(chunks)


def message_points(message: BaseMessage) -> tuple[CachePoint, ...]:
    """Cache points of a message: behind each block with ``cache_control`` of type ``ephemeral``.

    Returns:
        Their places in the text of ``message_chunks``.

    Raises:
        PromptError: A ``ttl`` that is no time, or a block that is no text.
    """
    points: list[CachePoint] = []
    offset = 0
    for block in () if isinstance(message.content, str) else message.content:
        offset += len(block if isinstance(block, str) else _text_of(block, message.type))
        mark = block.get(_CACHE_MARK) if isinstance(block, dict) else None
        if isinstance(mark, dict) and mark.get("type") == "ephemeral":
            points.append(CachePoint(offset, parse_ttl(mark.get("ttl", _DEFAULT_TTL))))
    return tuple(points)


def text_block(text: str) -> ContentBlock:
    """A content block of plain text."""
    return {"type": "text", "text": text}


def join_blocks(parts: Iterable[Sequence[ContentBlock]], *, separator: str) -> list[ContentBlock]:
    """Text blocks of several parts in one list, a separator between parts that are not empty."""
    blocks: list[ContentBlock] = []
    for part in parts:
        blocks += [text_block(separator), *part] if blocks and part else part
    return _merged(blocks)


def chunk_texts(blocks: Iterable[ContentBlock]) -> list[str]:
    """The texts of the chunks among text blocks, in order."""
    return [block["text"] for block in blocks if _is_chunk(block, block["text"])]


def _chunk_block(text: str) -> ContentBlock:
    return {**text_block(text), _MARK: {"chunk": chunk_id_of(text)}}


def _is_chunk(block: ContentBlock, text: str) -> bool:
    mark = block.get(_MARK)
    return isinstance(mark, dict) and mark.get("chunk") == chunk_id_of(text)


def _text_of(block: ContentBlock, speaker: str) -> str:
    kind = block.get("type")
    if kind in _SKIPPED:
        return ""
    text = block.get("refusal" if kind == "refusal" else "text")
    if kind in ("text", "text-plain", "refusal") and isinstance(text, str):
        return text
    raise PromptError(
        f"content of a {speaker} message: a block of type {kind!r} holds no text; a text model "
        f"takes text blocks only, no images, audio, video or files: write what it says as a block "
        f"of type 'text'"
    )


def _merged(blocks: Iterable[ContentBlock]) -> list[ContentBlock]:
    """The same blocks with runs of plain text made one, and without empty ones."""
    merged: list[ContentBlock] = []
    for block in blocks:
        is_run = merged and _MARK not in block and _MARK not in merged[-1]
        if is_run:
            merged[-1] = text_block(merged[-1]["text"] + block["text"])
        elif block["text"]:
            merged.append(block)
    return merged
