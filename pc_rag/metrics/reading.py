"""Reading plain values back: what ``to_dict`` wrote, checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from pc_rag.errors import PromptCacheError

Kind = TypeVar("Kind", bound=StrEnum)

_MISSING = object()


class Reader:
    """The values of one plain dictionary by key; keys that nobody asks for are left alone.

    Every method raises ``PromptCacheError`` that names the key where the key is missing or its
    value is of another kind.

    Args:
        plain: The dictionary, as JSON gives it.
        where: What it describes, for messages.

    Raises:
        PromptCacheError: ``plain`` is no mapping.
    """

    def __init__(self, plain: object, where: str) -> None:
        if not isinstance(plain, Mapping):
            raise PromptCacheError(f"{where}: expected a mapping, got a {type(plain).__name__}")
        self._plain = plain
        self._where = where

    def _get(self, key: str) -> object:
        value = self._plain.get(key, _MISSING)
        if value is _MISSING:
            raise PromptCacheError(
                f"{self._where}: the key {key!r} is missing; give what to_dict() wrote, whole"
            )
        return value

    def _refuse(self, key: str, value: object, expected: str) -> PromptCacheError:
        return PromptCacheError(
            f"{self._where}: {key!r} is {value!r}; expected {expected}, as to_dict() writes it"
        )

    def whole(self, key: str) -> int:
        """A whole number."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refuse(key, value, "a whole number")
        return value

    def optional_whole(self, key: str) -> int | None:
        """A whole number, or nothing."""
        return None if self._get(key) is None else self.whole(key)

    def number(self, key: str) -> float:
        """A number."""
        return self._as_number(key, self._get(key))

    def optional_number(self, key: str) -> float | None:
        """A number, or nothing."""
        return None if self._get(key) is None else self.number(key)

    def late_number(self, key: str) -> float | None:
        """A number, or nothing; also no such key, as before there was one."""
        return None if self._plain.get(key) is None else self.number(key)

    def _as_number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._refuse(key, value, "a number")
        try:
            return float(value)
        except OverflowError as error:
            raise self._refuse(key, value, "a number that a float can hold") from error

    def text(self, key: str) -> str:
        """A text."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self._refuse(key, value, "a text")
        return value

    def kind(self, key: str, kinds: type[Kind]) -> Kind:
        """A member of an enum, by its value."""
        return self._as_kind(key, self._get(key), kinds)

    def optional_kind(self, key: str, kinds: type[Kind]) -> Kind | None:
        """A member of an enum, or nothing."""
        return None if self._get(key) is None else self.kind(key, kinds)

    def _as_kind(self, key: str, value: object, kinds: type[Kind]) -> Kind:
        if isinstance(value, str) and value in {each.value for each in kinds}:
            return kinds(value)
        raise self._refuse(key, value, f"one of {', '.join(kinds)}")

    def numbers_by_kind(self, key: str, kinds: type[Kind]) -> dict[Kind, float]:
        """A number for members of an enum."""
        value = self._get(key)
        if not isinstance(value, Mapping):
            raise self._refuse(key, value, "a mapping")
        return {
            self._as_kind(key, name, kinds): self._as_number(key, each)
            for name, each in value.items()
        }

    def items(self, key: str) -> list[object]:
        """A list of anything."""
        value = self._get(key)
        if not isinstance(value, (list, tuple)):
            raise self._refuse(key, value, "a list")
        return list(value)
