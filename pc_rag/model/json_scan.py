"""Where a JSON object or list ends in streamed text."""

from __future__ import annotations

import json
import math
import string
from enum import Enum, auto
from typing import Any, NoReturn

_WORDS = frozenset(string.ascii_letters + string.digits + "+-.,: \t\r\n")
"""What may stand outside strings, besides quotes and brackets."""
_FIRST_TEXT = " "
"""Characters below this one must be escaped in a string."""


class Scan(Enum):
    """What a character tells."""

    MORE = auto()
    """The value goes on."""
    DONE = auto()
    """The value is complete; it may still be malformed."""
    BROKEN = auto()
    """No JSON value goes on like this."""


class JsonScanner:
    """Finds the end of a value that begins with a bracket, one character at a time.

    Constant work for each character and no recursion, whatever a model writes.

    Args:
        max_depth: Brackets within brackets that are followed.

    Attributes:
        first_text: The first string of the value once it is complete: of an object, its first key.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._first: list[str] = []
        self.first_text: str | None = None

    def advance(self, character: str) -> Scan:
        """Take the next character."""
        if self._is_in_string:
            return self._advance_in_string(character)
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
            if self._depth > self._max_depth:
                return Scan.BROKEN
        elif character in "}]":
            self._depth -= 1
            return Scan.MORE if self._depth > 0 else Scan.DONE
        elif character not in _WORDS:
            return Scan.BROKEN
        return Scan.MORE

    def _advance_in_string(self, character: str) -> Scan:
        if character < _FIRST_TEXT:
            return Scan.BROKEN
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            if self.first_text is None:
                self.first_text = "".join(self._first)
            return Scan.MORE
        if self.first_text is None:
            self._first.append(character)
        return Scan.MORE


def parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON as the standard has it: finite numbers, and text that can be encoded.

    Args:
        text: One whole value whose depth is known to be harmless.

    Raises:
        ValueError: It is not JSON; the message says where.
    """
    value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it escapes half of a character (a lone surrogate)") from error
    return value


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
