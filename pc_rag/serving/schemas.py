"""JSON schemas as callers of language models mean them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPEN_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COMBINED = "allOf"


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects hold what they name and nothing else.

    JSON Schema lets an object hold more than its ``properties``; who asks a model for named fields
    does not mean that. Objects that say themselves what else they hold stay as they are, and so do
    the parts of an ``allOf``, which would shut each other out.

    Args:
        schema: Not modified.
    """
    closed = {
        key: value if key == _COMBINED else _closed_inside(value) for key, value in schema.items()
    }
    is_open = isinstance(schema.get("properties"), Mapping) and _COMBINED not in schema
    if is_open and not any(key in schema for key in _OPEN_KEYS):
        closed["additionalProperties"] = False
    return closed


def _closed_inside(value: Any) -> Any:  # noqa: ANN401 - any part of a schema
    if isinstance(value, Mapping):
        return closed_schema(value)
    if isinstance(value, list):
        return [_closed_inside(each) for each in value]
    return value
