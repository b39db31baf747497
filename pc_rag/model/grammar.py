"""What an answer may look like: a grammar as a value, which needs no model and no library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from pc_rag.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUM_CHARACTERS_SHOWN = 60


class GrammarKind(StrEnum):
    """How ``Grammar.source`` is to be read."""

    JSON = "json"
    """A JSON Schema, as JSON text."""
    REGEX = "regex"
    """A regular expression for the whole answer."""
    CHOICE = "choice"
    """A JSON list of strings, one of which is the answer."""
    LARK = "lark"
    """A grammar in Lark's notation, whose ``start`` rule is the answer."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may look like. Made by its class methods; equal ones are compiled once.

    The model chooses among the tokens that keep the answer inside the grammar, and may end it only
    where the grammar is complete. Nothing makes it get there: a weak model can write an endless
    string where the grammar allows one. ``max_new_tokens`` ends such an answer with
    ``FinishReason.LENGTH``, and its text is then a beginning only; bound strings with
    ``maxLength``, arrays with ``maxItems`` and objects with ``additionalProperties: false``.

    Attributes:
        kind: How ``source`` is read.
        source: The schema, pattern, options or rules.
        prefix: Template text in front of a JSON answer.
        suffix: Template text behind it.
    """

    kind: GrammarKind
    source: str
    prefix: str = ""
    suffix: str = ""

    @classmethod
    def json(
        cls, schema: Mapping[str, Any] | None = None, *, prefix: str = "", suffix: str = ""
    ) -> Self:
        """JSON that is valid under a schema, on one line, with ``", "`` and ``": "`` between.

        Properties come in the schema's order. A schema's own ``x-guidance`` object replaces the
        settings for whitespace.

        Args:
            schema: A JSON Schema whose root is an object (the schema's, not the answer's);
                ``None`` allows any JSON object.
            prefix: Template text that the answer starts with: a control token named in it, such as
                the opener of a tool call, is generated as that one token.
            suffix: Likewise behind the JSON. It must not hold the token that ends an answer: that
                one comes by itself.

        Raises:
            ConfigError: The schema is no JSON object or cannot be written as JSON; a text is no
                string.
        """
        if schema is None:
            schema = {"type": "object"}
        if not isinstance(schema, Mapping):
            raise ConfigError(
                f"a JSON schema must be a JSON object (a mapping); got "
                f"{type(schema).__name__} {_shorten(repr(schema))}. Pass it as a dict"
            )
        try:
            source = json.dumps(dict(schema), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the JSON schema {_shorten(repr(schema))} cannot be written as JSON: {error}. "
                "Use plain dicts, lists, strings, finite numbers, booleans and None only"
            ) from error
        for name, text in (("prefix", prefix), ("suffix", suffix)):
            _check_text(f"the {name} of a JSON grammar", text)
        return cls(GrammarKind.JSON, source, prefix, suffix)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        r"""Text that a regular expression matches from its start to its end.

        The syntax is Rust's, without look-around and back-references.

        Raises:
            ConfigError: The pattern is no string, or is empty.
        """
        _check_text("a regex", pattern, may_be_empty=False)
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Self:
        """Exactly one of some texts; repeated ones count once.

        Raises:
            ConfigError: There is no option, or one is no string or is empty.
        """
        if isinstance(options, str):
            raise ConfigError(
                f"options must be a list of strings; got the string {_shorten(repr(options))}"
            )
        distinct = tuple(dict.fromkeys(options))
        if not distinct:
            raise ConfigError("a choice needs at least one option; got none")
        for option in distinct:
            _check_text("an option of a choice", option, may_be_empty=False)
        return cls(GrammarKind.CHOICE, json.dumps(distinct))

    @classmethod
    def lark(cls, source: str) -> Self:
        """Text of a context-free grammar in llguidance's dialect of Lark; it starts at ``start``.

        Control tokens are written by their id, ``<[123]>``; their names stand for nothing.

        Raises:
            ConfigError: The source is no string, or is empty.
        """
        _check_text("a lark grammar", source, may_be_empty=False)
        return cls(GrammarKind.LARK, source)

    def __str__(self) -> str:
        return f"{self.kind} grammar {_shorten(self.source)}"


def _check_text(name: str, text: object, *, may_be_empty: bool = True) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{name} must be a string; got {type(text).__name__} {text!r}")
    if not text and not may_be_empty:
        raise ConfigError(f"{name} must not be empty; got ''")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} must be valid Unicode; got {_shorten(ascii(text))}") from error


def _shorten(text: str) -> str:
    if len(text) <= _NUM_CHARACTERS_SHOWN:
        return text
    return text[:_NUM_CHARACTERS_SHOWN] + "..."
