"""Small bounded JSON Schemas, and whether a value conforms to one: the slow truth of grammars."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

PATTERN = "^[a-c]{1,3}[0-9]$"

_BOUNDS = st.tuples(st.integers(-120, 120), st.integers(0, 300))

leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "string", "pattern": PATTERN}),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    _BOUNDS.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
    st.lists(
        st.one_of(st.text(max_size=4), st.integers(-99, 99), st.booleans()),
        min_size=1,
        max_size=4,
        unique_by=repr,
    ).map(lambda values: {"enum": values}),
)
"""Schemas of short values."""


def _array(items: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return bounds.map(
        lambda b: {"type": "array", "items": items, "minItems": b[0], "maxItems": b[0] + b[1]}
    )


def _object(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.sets(st.sampled_from(sorted(properties))).map(
        lambda required: {
            "type": "object",
            "properties": properties,
            "required": sorted(required),
            "additionalProperties": False,
        }
    )


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        inner.flatmap(_array),
        st.dictionaries(
            st.sampled_from(["a", "b", "name", "größe"]), inner, min_size=1, max_size=3
        ).flatmap(_object),
    ),
    max_leaves=4,
)
"""Schemas whose every answer is short: a few hundred bytes."""


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is valid under a schema that ``schemas`` draws."""
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(conforms(value[name], schema["properties"][name]) for name in value)
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(conforms(item, schema["items"]) for item in value)
        )
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return (
            isinstance(value, str)
            and len(value) <= schema.get("maxLength", len(value))
            and re.search(schema.get("pattern", ""), value) is not None
        )
    return value is None if kind == "null" else isinstance(value, bool)
