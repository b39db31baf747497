"""What a name is, and how names and texts of a document are shown in messages."""

from __future__ import annotations

import re

from pc_rag.types import CHAT_ROLES

PARAMETER_TAGS = ("param", "parameter")
"""Two spellings of one tag."""

SCHEMA_TAGS = ("module", "union", "scaffold", *PARAMETER_TAGS, *sorted(CHAT_ROLES))
"""What a schema may hold."""

RESERVED_NAMES = frozenset({"schema", "prompt", *SCHEMA_TAGS})
"""Names that no module or scaffold may have, because prompts name them by tags."""

MAX_NAME_LENGTH = 255
"""Characters of a name."""

MAX_PATH_LENGTH = 1_000
"""Characters of a path, dots included. Every module keeps its path, so this bounds a schema's
memory."""

NAME_RULE = (
    "a name begins with a letter or underscore and goes on with letters, digits, '_', '-' and '.', "
    f"{MAX_NAME_LENGTH} characters at most"
)

# XML's name characters without the colon: every module name is a tag in prompts.
_NAME_START = (
    "A-Z_a-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02ff\u0370-\u037d\u037f-\u1fff\u200c-\u200d"
    "\u2070-\u218f\u2c00-\u2fef\u3001-\ud7ff\uf900-\ufdcf\ufdf0-\ufffd\U00010000-\U000effff"
)
_NAME = re.compile(rf"[{_NAME_START}][{_NAME_START}\-.0-9\u00b7\u0300-\u036f\u203f-\u2040]*")


def is_name(name: str) -> bool:
    """Whether a name begins with a letter or underscore, then has letters, digits, ``_-.``.

    It has at most ``MAX_NAME_LENGTH`` characters.
    """
    return len(name) <= MAX_NAME_LENGTH and _NAME.fullmatch(name) is not None


def is_path(path: str) -> bool:
    """Whether a text can be names joined by dots, ``MAX_PATH_LENGTH`` characters at most.

    Names may hold dots themselves, so only a schema tells where one ends.
    """
    return len(path) <= MAX_PATH_LENGTH and _NAME.fullmatch(path) is not None


def shorten(text: str, limit: int = 60) -> str:
    """What a message shows of a text: ``limit`` characters at most."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
