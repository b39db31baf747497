"""What names an entry: all that decides its keys and values, hashed over a fixed encoding."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pc_rag.types import Fingerprint, ModuleKey, Span, StorageDtype, TokenIds, Visibility

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT_VERSION = 1
"""Version of the key encoding and of the file format; raised when either changes."""

_CONTENT_ID_HEX_DIGITS = 16


def _digest(*fields: bytes) -> str:
    """SHA-256 over length-prefixed fields, so that no two field lists share an encoding."""
    digest = hashlib.sha256()
    for data in fields:
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def _pack_ids(token_ids: Iterable[int]) -> bytes:
    ids = tuple(token_ids)
    return struct.pack(f"<{len(ids)}q", *ids)


@dataclass(frozen=True, slots=True)
class VisibilityContext:
    """What a module attended while it was encoded.

    Attributes:
        visibility: The kind of visibility.
        digest: SHA-256 of the attended tokens and their position IDs; empty under ``module``.
    """

    visibility: Visibility
    digest: str = ""

    @classmethod
    def module(cls) -> VisibilityContext:
        """The context of a module that attends itself only."""
        return cls(Visibility.MODULE)

    @classmethod
    def of(
        cls, visibility: Visibility, token_ids: Iterable[int], position_ids: Iterable[int]
    ) -> VisibilityContext:
        """The context of a module that attends the given tokens at the given position IDs."""
        ids = tuple(token_ids)
        if not ids:
            return cls.module()
        return cls(visibility, _digest(_pack_ids(ids), _pack_ids(position_ids)))

    @classmethod
    def of_entries(cls, visibility: Visibility, keys: Iterable[ModuleKey]) -> VisibilityContext:
        """The context of a module that attends entries which did not all attend each other.

        Their tokens alone do not tell their KV then: another entry of the same tokens at the same
        place may have attended what lies before it.
        """
        return cls(visibility, _digest(b"entries", *(key.encode() for key in keys)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryAddress:
    """Everything that decides an entry's keys and values.

    Attributes:
        fingerprint: The model that encoded it.
        token_ids: The module's tokens.
        context: What it attended.
        start: First position ID it was encoded at.
        dtype: Numeric type it is stored in.
        tenant: Salt that keeps tenants apart; set by the host's configuration.
        key: SHA-256 over all of the above and the format version.
        content_id: 16 hex digits over token ids alone: entries of the same text for another model,
            prefix, start or dtype share it, which lets a store say why it misses.
    """

    fingerprint: Fingerprint
    token_ids: TokenIds
    context: VisibilityContext
    start: int
    dtype: StorageDtype
    tenant: str = ""
    key: ModuleKey = field(init=False)
    content_id: str = field(init=False)

    def __post_init__(self) -> None:
        packed = _pack_ids(self.token_ids)
        key = _digest(
            struct.pack("<Q", FORMAT_VERSION),
            self.fingerprint.encode(),
            packed,
            self.context.visibility.encode(),
            self.context.digest.encode(),
            struct.pack("<q", self.start),
            self.dtype.encode(),
            self.tenant.encode(),
        )
        content_id = _digest(self.tenant.encode(), packed)[:_CONTENT_ID_HEX_DIGITS]
        object.__setattr__(self, "key", ModuleKey(key))
        object.__setattr__(self, "content_id", content_id)

    @property
    def span(self) -> Span:
        """Position IDs it was encoded at."""
        return Span(self.start, self.start + len(self.token_ids))
