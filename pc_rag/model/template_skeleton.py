"""A rendered chat template without what was said: sentinels in, template text and places out.

Two kinds of sentinels stand in a rendering. ``pcRagContent3...End`` is the content of message 3.
``pcRagValue3...End`` is a string of a tool or of a call (``template_input``). Both carry one of
each character that escaping changes, so that the rendering shows how the template would have
escaped the real text: as JSON, safe for HTML, or not at all.

How contents are trimmed is seen as well. Strings of tools and calls are written whole: a template
that trims, indents, wraps or sorts such strings does so to those that it sees, not to those behind
a sentinel. In a Python value they always stand between single quotes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "pcRag"
"""Begins every sentinel; a string that holds it is not shown to a template."""
_PROBES = "\"<>&'\u00e9"
"""Characters that some escaping changes. The quote and the letter tell kinds of JSON apart."""
_SEPARATOR = "Z"
"""Between probes; no escaped form holds it."""
_SEEN = _SEPARATOR.join([""] + ["(.{1,12}?)"] * len(_PROBES) + [""])
_CONTENT_PATTERN = re.compile(rf"{MARK}Content(\d+)({_SEEN.replace('(', '(?:')})End")
_VALUE_PATTERN = re.compile(rf"{MARK}Value(\d+)({_SEEN.replace('(', '(?:')})End")
_SEEN_PATTERN = re.compile(_SEEN)
_MAX_JSON_DEPTH = 3
"""JSON within JSON within JSON; deeper quoting is taken as text."""
PAD = "\n\t \t\n"
"""Stands on both sides of a padded sentinel: newlines outside, so that both kinds of trim show."""


class Trim(IntEnum):
    """What a template cuts off one side of a content."""

    WHITESPACE = 0
    NEWLINES = 1
    NOTHING = 2


_LEFT_REST = {Trim.WHITESPACE: "", Trim.NEWLINES: PAD.lstrip("\n"), Trim.NOTHING: PAD}
_RIGHT_REST = {Trim.WHITESPACE: "", Trim.NEWLINES: PAD.rstrip("\n"), Trim.NOTHING: PAD}


@dataclass(frozen=True, slots=True)
class Escape:
    """How a template writes a text at one place.

    Attributes:
        num_json: How often it is written as a JSON string, the quotes left out; mostly 0 or 1.
        is_ascii: Whether that JSON is ASCII only.
        others: Code points that are written otherwise, and how.
        is_python: Whether it is written as a part of a Python value, between single quotes.
    """

    num_json: int = 0
    is_ascii: bool = False
    others: tuple[tuple[int, str], ...] = ()
    is_python: bool = False

    def apply(self, text: str) -> str:
        """The text as the template would have written it."""
        if self.is_python:
            return repr("'\"" + text)[len("''\"'") : -1]  # with both, Python takes single quotes
        for _ in range(self.num_json):
            text = json.dumps(text, ensure_ascii=self.is_ascii)[1:-1]
        return text.translate(dict(self.others)) if self.others else text


@dataclass(frozen=True, slots=True)
class Place:
    """Where a content stands.

    Attributes:
        message: Index of the message.
        escape: How the template writes it.
        left: What is cut off its left side.
        right: What is cut off its right side.
    """

    message: int
    escape: Escape = Escape()
    left: Trim = Trim.NOTHING
    right: Trim = Trim.NOTHING

    def fit(self, content: str) -> str:
        """A content as it stands here: trimmed and escaped."""
        if self.left is not Trim.NOTHING:
            content = content.lstrip(None if self.left is Trim.WHITESPACE else "\n")
        if self.right is not Trim.NOTHING:
            content = content.rstrip(None if self.right is Trim.WHITESPACE else "\n")
        return self.escape.apply(content)

    def locate(self, content: str, offset: int) -> int:
        """Where a place of a content lies in ``fit(content)``.

        A place in what is cut off lies at that end; one that cannot be told, because of how the
        content is escaped, at the end.

        Args:
            content: The content.
            offset: Characters of it before the place.
        """
        num_cut = 0
        if self.left is not Trim.NOTHING:
            kept = content.lstrip(None if self.left is Trim.WHITESPACE else "\n")
            num_cut = len(content) - len(kept)
        if offset <= num_cut:
            return 0
        fitted = self.fit(content)
        before = self.escape.apply(content[num_cut:offset])
        return len(before) if fitted.startswith(before) else len(fitted)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A rendered conversation without its contents.

    Attributes:
        controls: Template text before, between and behind the contents; one more than ``places``.
        places: Where the contents stand.
    """

    controls: tuple[str, ...]
    places: tuple[Place, ...]


def content_sentinel(index: int) -> str:
    """What stands for the content of a message."""
    return f"{MARK}Content{index}{_probes()}End"


def value_sentinel(index: int) -> str:
    """What stands for a string of a tool or of a call."""
    return f"{MARK}Value{index}{_probes()}End"


def has_mark(text: str) -> bool:
    """Whether a text holds a sentinel, a part of one, or what a template made of one."""
    return MARK.lower() in text.lower()


def _probes() -> str:
    return _SEPARATOR.join(["", *_PROBES, ""])


def find_skeleton(bare: str, padded: str) -> Skeleton:
    """Take a rendering apart.

    Args:
        bare: A rendering with sentinels as contents.
        padded: The same with ``PAD`` on both sides of each; shows what the template trims.
    """
    controls, places = split_contents(bare)
    padded_controls, _ = split_contents(padded)
    return Skeleton(controls, _with_trims(controls, padded_controls, places))


def split_contents(rendered: str) -> tuple[tuple[str, ...], tuple[Place, ...]]:
    """Template text and places of a rendering; trims are not known yet."""
    parts = _CONTENT_PATTERN.split(rendered)
    places = tuple(
        Place(int(index), _find_escape(seen))
        for index, seen in zip(parts[1::3], parts[2::3], strict=True)
    )
    return tuple(parts[::3]), places


def split_values(control: str, value_of: Callable[[int], str]) -> tuple[str, ...]:
    """Template text and strings of tools or calls in turn, beginning and ending with template text.

    Args:
        control: Template text that may hold sentinels of values.
        value_of: The string a sentinel stands for.
    """
    parts = _VALUE_PATTERN.split(control)
    texts = [parts[0]]
    for index, seen, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        texts += [_find_escape(seen).apply(value_of(int(index))), text]
    return tuple(texts)


def _find_escape(seen: str) -> Escape:
    """What happened to the probes of a sentinel."""
    match = _SEEN_PATTERN.fullmatch(seen)
    if match is None:
        return Escape()
    shown = dict(zip(_PROBES, match.groups(), strict=True))
    quote, letter = shown.pop('"'), shown.pop("\u00e9")
    quoted = '"'
    if (quote, shown["'"]) == ('"', "\\'"):
        return Escape(is_python=True)
    num_json = 0
    for depth in range(1, _MAX_JSON_DEPTH + 1):
        quoted = json.dumps(quoted)[1:-1]
        if quote == quoted:
            num_json = depth
    if num_json == 0:
        shown['"'] = quote
    others = tuple((ord(char), text) for char, text in shown.items() if text != char)
    return Escape(num_json, num_json > 0 and letter != "\u00e9", others)


def _with_trims(
    controls: tuple[str, ...], padded: tuple[str, ...], places: tuple[Place, ...]
) -> tuple[Place, ...]:
    """What the template cuts, from the rests of the padding beside each control text.

    ::

        padded:   ... sentinel | rest of the right pad | control | rest of the left pad | sentinel
    """
    if len(padded) != len(controls):
        return places
    lefts = [Trim.NOTHING] * len(places)
    rights = [Trim.NOTHING] * len(places)
    for index, (control, seen) in enumerate(zip(controls, padded, strict=True)):
        before, after = places[max(index - 1, 0) : index], places[index : index + 1]
        right_rests, left_rests = _rests(_RIGHT_REST, before), _rests(_LEFT_REST, after)
        for (right, right_rest), (left, left_rest) in product(
            right_rests.items(), left_rests.items()
        ):
            if seen == right_rest + control + left_rest:
                rights[index - 1 : index] = [right] * len(before)
                lefts[index : index + 1] = [left] * len(after)
                break
    return tuple(
        Place(place.message, place.escape, left, right)
        for place, left, right in zip(places, lefts, rights, strict=True)
    )


def _rests(rests: dict[Trim, str], beside: tuple[Place, ...]) -> dict[Trim, str]:
    """What may be left of the padding, as the template writes it at a place."""
    if not beside:
        return {Trim.NOTHING: ""}
    return {trim: beside[0].escape.apply(rest) for trim, rest in rests.items()}
