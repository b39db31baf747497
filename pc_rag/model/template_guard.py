"""Strings that somebody else wrote, hidden from a chat template behind sentinels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pc_rag.model.template_skeleton import has_mark, value_sentinel

if TYPE_CHECKING:
    from pc_rag.model.conversation import ToolCall
    from pc_rag.model.tokenizer import TextTokenizer

_NUM_ID_CHARS = 9
"""Some templates refuse identifiers of calls that are not nine letters or digits."""
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords of a JSON schema whose value names schemas."""
_NESTED = frozenset(
    {
        "additionalProperties",
        "allOf",
        "anyOf",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "oneOf",
        "prefixItems",
        "propertyNames",
        "then",
    }
)
"""Keywords whose value is a schema, or a list of schemas."""
_PLAIN = frozenset(
    {
        "$id",
        "$ref",
        "$schema",
        "const",
        "default",
        "deprecated",
        "description",
        "enum",
        "examples",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "nullable",
        "pattern",
        "readOnly",
        "required",
        "title",
        "type",
        "uniqueItems",
        "writeOnly",
    }
)
"""Other keywords."""


class TemplateGuard:
    """Puts sentinels in the place of strings; equal strings have one sentinel.

    Args:
        tokenizer: Tells which strings imitate control tokens.
        hides_all: Hide the others as well, but for the words of a JSON schema in their places.
            Identifiers are replaced, since templates check them, and not hidden.

    Attributes:
        values: The hidden strings, by the number of their sentinel.
    """

    def __init__(self, tokenizer: TextTokenizer, *, hides_all: bool) -> None:
        self._tokenizer = tokenizer
        self._hides_all = hides_all
        self._numbers: dict[str, int] = {}
        self.values: list[str] = []

    def call(self, call: ToolCall) -> dict[str, Any]:
        """A call as ``call_entry`` takes it."""
        return {
            "id": self.identifier(call.id),
            "name": self.protect(call.name),
            "arguments": self.protect(call.arguments),
        }

    def tool(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A tool, in the form of ``tool_entry``."""
        function = entry["function"]
        guarded = {
            "name": self.protect(function["name"]),
            "description": self.protect(function["description"]),
            "parameters": self._schema(function["parameters"]),
        }
        return {**entry, "function": guarded}

    def identifier(self, text: str) -> str:
        """What ties a tool's answer to its call."""
        return short_id(text) if text and self._hides_all else self.protect(text)

    def protect(self, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        """A value with its strings hidden, keys included."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def _schema(self, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if isinstance(value, (list, tuple)):
            return [self._schema(item) for item in value]
        if not isinstance(value, Mapping):
            return self.protect(value)
        return dict(self._schema_item(key, item) for key, item in value.items())

    def _schema_item(self, key: Any, item: Any) -> tuple[Any, Any]:  # noqa: ANN401 - likewise
        if key == "type" and _is_type(item):
            return key, item
        if key in _NAMED and isinstance(item, Mapping):
            return key, {self.protect(name): self._schema(inner) for name, inner in item.items()}
        if key in _NESTED:
            return key, self._schema(item)
        return (key if key in _PLAIN else self.protect(key)), self.protect(item)

    def _protect_text(self, text: str) -> str:
        is_hidden = has_mark(text) or self._tokenizer.imitates_control(text)
        if not text or not (is_hidden or self._hides_all):
            return text
        if text not in self._numbers:
            self._numbers[text] = len(self.values)
            self.values.append(text)
        return value_sentinel(self._numbers[text])


def _is_type(value: object) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, str) and item in _TYPES for item in values)


def short_id(call_id: str) -> str:
    """Nine letters and digits in the place of an identifier of a call."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:_NUM_ID_CHARS]
