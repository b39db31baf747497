"""Plain text from bytes. Markdown, reStructuredText and source code are plain text too.

Markup is kept as written. Models read Markdown and reStructuredText as well as prose, headings and
code blocks keep their meaning, and no text is lost; a reStructuredText parser would drop what it
does not know (every Sphinx role and directive) and would have to be kept from including files.
"""

from __future__ import annotations

from pc_rag.errors import IngestError

_NUM_SNIFFED_BYTES = 8192


def decode_text(data: bytes, source: str) -> str:
    r"""Decode UTF-8, with or without a byte order mark; line ends become ``\n``.

    Args:
        data: The file's bytes.
        source: Its name, for the message.

    Raises:
        IngestError: The bytes are binary or not UTF-8; says at which byte.
    """
    refuse_binary(data, source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Counted behind a byte order mark, which utf-8-sig removes before it decodes.
        offset = error.start + len(data) - len(error.object)
        raise IngestError(
            f"{source}: byte {offset} (0x{data[offset]:02X}) is not UTF-8 ({error.reason}); "
            f"save the file as UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def refuse_binary(data: bytes, source: str) -> None:
    """Refuse bytes with a NUL near the start, as git does.

    Raises:
        IngestError: There is one; says at which byte.
    """
    offset = data.find(b"\0", 0, _NUM_SNIFFED_BYTES)
    if offset >= 0:
        raise IngestError(
            f"{source}: byte {offset} is NUL, so this is binary or UTF-16; save text as UTF-8"
        )
