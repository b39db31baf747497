"""Schemas whose objects hold what they name."""

from __future__ import annotations

import copy

import pytest

from pc_rag.serving.schemas import closed_schema

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (POINT, CLOSED),
        ({"type": "array", "items": POINT}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$defs": {"P": POINT}, "$ref": "#/$defs/P"},
            {"$defs": {"P": CLOSED}, "$ref": "#/$defs/P"},
        ),
        ({**POINT, "additionalProperties": True}, {**POINT, "additionalProperties": True}),
        ({**POINT, "patternProperties": {"a": {}}}, {**POINT, "patternProperties": {"a": {}}}),
        ({"allOf": [POINT, POINT]}, {"allOf": [POINT, POINT]}),
        ({"type": "object"}, {"type": "object"}),
        ({"enum": [POINT]}, {"enum": [POINT]}),
        ({"default": POINT, "const": POINT}, {"default": POINT, "const": POINT}),
    ],
)
def test_object_is_closed_when_it_does_not_say_what_else_it_holds(schema, closed):
    """Wherever it stands; the given schema is not changed."""
    before = copy.deepcopy(schema)
    assert closed_schema(schema) == closed
    assert schema == before


def test_field_keeps_its_schema_when_it_is_called_properties():
    """A field's name is no keyword."""
    schema = {"type": "object", "properties": {"properties": {"type": "string"}}}
    assert closed_schema(schema) == {**schema, "additionalProperties": False}
