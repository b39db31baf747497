"""Values that every room shares: spans, keys, and the enums of the project's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypeAlias

TokenIds: TypeAlias = tuple[int, ...]
"""Token ids in order. Made once, concatenated, never re-tokenised."""

ModuleKey = NewType("ModuleKey", str)
"""Hex SHA-256 that names one entry: everything that decides its keys and values is inside."""

Fingerprint = NewType("Fingerprint", str)
"""Hex SHA-256 of a model: architecture, weights, tokenizer, chat template, compute dtype."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range ``[start, end)`` of position IDs or of rows.

    Raises:
        ValueError: ``start`` is negative or larger than ``end``.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"span [{self.start}, {self.end}) is not ordered and non-negative")

    def __len__(self) -> int:
        return self.end - self.start


class Visibility(StrEnum):
    """What a module could attend when it was encoded."""

    MODULE = "module"
    """Itself only (the paper)."""
    PREFIX = "prefix"
    """Itself and the always-included text before it."""
    SCAFFOLD = "scaffold"
    """The modules of its scaffold."""


class PositionPolicy(StrEnum):
    """How spans are given out."""

    PACKED = "packed"
    """Spans follow each other without gaps."""
    RESERVED = "reserved"
    """The paper's: every union reserves its longest member; gaps stay."""


class Placement(StrEnum):
    """Where an entry can stand, by how the model tells positions apart."""

    ROTATE = "rotate"
    """Anywhere: keys are rotated by the difference of position IDs (RoPE)."""
    FREE = "free"
    """Anywhere, as it is: keys carry no position (ALiBi, or none at all)."""
    FIXED = "fixed"
    """Only where it was encoded: positions are part of the states (learned positions). Then a
    module is encoded once for each start that it is asked for at."""


class HitKind(StrEnum):
    """How served KV relates to a full prefill."""

    EXACT = "exact"
    """What full prefill computes: it saw all that stands before it, where it stands. Identical but
    for the rounding of a storage dtype that is narrower than the compute dtype."""
    COMPOSED = "composed"
    """Placed entries: each saw its own visibility, not the other chunks."""
    PARTIAL = "partial"
    """The prompt holds only the head of the module: those tokens came from its entry, placed. The
    reason is ``MissReason.SPLIT``."""


class MissReason(StrEnum):
    """Why a module was not served from the store."""

    NOT_STORED = "not-stored"
    FINGERPRINT = "fingerprint"
    """Stored for another model, tokenizer, dtype or tenant."""
    OTHER_PREFIX = "other-prefix"
    """Stored behind another prefix."""
    CORRUPT = "corrupt"
    """The stored file was damaged; it is quarantined."""
    IO = "io"
    """The medium failed or timed out."""
    REPAIRED = "repaired"
    """The repair policy recomputed every token of it."""
    REUSE_OFF = "reuse-off"
    """The request asked for the uncached arm."""
    SPLIT = "split"
    """The prompt holds only a part of it, as when a caller splits chunks. A head is a partial hit
    all the same; a tail is computed, because its tokens attended a head that is not there."""
    UNPLACED = "unplaced"
    """The model's positions are fixed (``Placement.FIXED``), and what it attends cannot stand
    before it here, or all of it does not end within the model's positions: it was computed."""


class Tier(StrEnum):
    """Where an entry's bytes lie."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class StorageDtype(StrEnum):
    """Numeric type of stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    """A tool that answers a call."""


CHAT_ROLES = frozenset({Role.SYSTEM, Role.USER, Role.ASSISTANT})
"""Roles that every chat template knows, and those that PML has tags for."""


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    """A stop string or an end-of-sequence token."""
    LENGTH = "length"
    """``max_new_tokens`` or the context ran out."""
    CANCELLED = "cancelled"
    """The consumer closed the stream."""
