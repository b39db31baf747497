"""Which whitespace of a document is layout of its source, and which is text.

Only space, tab and line feed count as whitespace here (the parser has turned CR LF into line
feeds): a no-break space, or a carriage return written as a character reference, is visible text.
"""

from __future__ import annotations

import re

_WHITESPACE = " \t\n"
_INDENTATION = re.compile(r"[ \t]*")
_LEADING_BLANK_LINES = re.compile(r"\A(?:[ \t]*\n)+")


def is_blank(text: str) -> bool:
    """Whether the text has nothing visible."""
    return not text.strip(_WHITESPACE)


def indentation(text: str, start: int = 0) -> str:
    """The spaces and tabs at an offset of a text."""
    match = _INDENTATION.match(text, start)
    return match.group() if match else ""


def clean_text(
    text: str,
    *,
    first_indent: str,
    ends_block: bool,
    follows_parameter: bool = False,
    precedes_parameter: bool = False,
) -> str:
    """The text between two tags, without the layout of its source.

    * Text with nothing visible is dropped.
    * Blank lines behind the tag before are dropped; the line break and the indentation in front of
      the tag behind become one line break, or nothing where that tag ends a block.
    * The indentation that all lines share is removed; text that goes on behind a tag shares the
      indentation of the line the tag stands on. So lines keep their indentation to each other.

    A parameter is read as text, so beside one spaces are text, and behind one a line break is.

    Args:
        text: Everything between two tags; comments and processing instructions do not end it.
        first_indent: Indentation of the source line on which the text begins.
        ends_block: The tag behind closes a turn or the document, which end without a line break.
        follows_parameter: The tag before is a parameter's.
        precedes_parameter: The tag behind is a parameter's.

    Returns:
        The text, empty where all of it was layout.
    """
    if is_blank(text):
        if "\n" in text:
            return "\n" if follows_parameter and not ends_block else ""
        return text if follows_parameter or precedes_parameter else ""
    visible = text.rstrip(_WHITESPACE)
    if "\n" in text[len(visible) :]:
        text = visible if ends_block else visible + "\n"
    body = text if follows_parameter else _LEADING_BLANK_LINES.sub("", text)
    if body != text:
        return _without_margin(body.split("\n"), [])
    head, *rest = text.split("\n")
    return "\n".join((head, _without_margin(rest, [first_indent]))) if rest else head


def _without_margin(lines: list[str], indents: list[str]) -> str:
    indents = [*indents, *(indentation(line) for line in lines if not is_blank(line))]
    margin = _common_prefix(indents)
    return "\n".join(
        line[len(margin) :] if line.startswith(margin) else line.lstrip(" \t") for line in lines
    )


def _common_prefix(texts: list[str]) -> str:
    """What all texts begin with: what the first and the last of them in sorted order share."""
    first, last = min(texts, default=""), max(texts, default="")
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:length]
