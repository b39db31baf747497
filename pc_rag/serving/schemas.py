"""JSON schemas as callers of language models mean them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPEN_KEYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions"})
"""Keywords whose value maps names to schemas."""
_SCHEMAS = frozenset({"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"})
"""Keywords whose value is a schema or a list of them."""
_COMBINED = "allOf"


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects hold what they name and nothing else.

    JSON Schema lets an object hold more than its ``properties``; who asks a model for named fields
    does not mean that. Objects that say themselves what else they hold stay as they are, and so do
    the parts of an ``allOf``, which would shut each other out.

    Args:
        schema: Not modified.
    """
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            closed[key] = {name: _closed_inside(each) for name, each in value.items()}
        else:
            closed[key] = _closed_inside(value) if key in _SCHEMAS else value
    is_open = isinstance(schema.get("properties"), Mapping) and _COMBINED not in schema
    if is_open and not any(key in schema for key in _OPEN_KEYS):
        closed["additionalProperties"] = False
    return closed


def _closed_inside(value: Any) -> Any:  # noqa: ANN401 - a schema, a list of them, or a boolean
    if isinstance(value, Mapping):
        return closed_schema(value)
    if isinstance(value, list):
        return [_closed_inside(each) for each in value]
    return value
