"""Metrics as plain values and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.errors import PromptCacheError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Plain: TypeAlias = "str | int | float | bool | list[Plain] | dict[str, Plain] | None"
"""What JSON can say."""


def to_plain(value: object) -> Plain:
    """Turn a metrics object into values that JSON can say.

    Dataclasses become dictionaries of their fields, enums their values, tuples lists.

    Raises:
        PromptCacheError: A value of another kind, or a number that is not finite, stands inside.
    """
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        raise PromptCacheError(f"{value} cannot be exported; JSON has finite numbers only")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    raise PromptCacheError(
        f"a {type(value).__name__} cannot be exported; metrics hold numbers, texts, enums, "
        "mappings, tuples and dataclasses"
    )


def plain_fields(instance: DataclassInstance) -> dict[str, Plain]:
    """The fields of a dataclass by name, each as ``to_plain`` gives it."""
    return {
        each.name: to_plain(getattr(instance, each.name)) for each in dataclasses.fields(instance)
    }


def to_json(value: object, *, indent: int | None = None) -> str:
    """A metrics object as JSON text; objects with a ``to_dict`` bring their derived numbers.

    Raises:
        PromptCacheError: A value that JSON cannot say stands inside.
    """
    to_dict = getattr(value, "to_dict", None)
    plain = to_dict() if callable(to_dict) else to_plain(value)
    return json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False)
