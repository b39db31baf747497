"""What can become of a model call and of a retrieved document."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pc_rag.types import HitKind, MissReason

if TYPE_CHECKING:
    from pc_rag.metrics import ModuleUse


class CallOutcome(StrEnum):
    """What a call of a language model told us; every call has exactly one."""

    REPORTED = "reported"
    """Its metrics were read."""
    REPLAYED = "replayed"
    """The framework's response cache gave the answer: no model ran, so there was nothing to hit."""
    UNREPORTED = "unreported"
    """It brought no metrics of ours: another model."""
    UNREADABLE = "unreadable"
    """It brought metrics that are malformed."""
    CANCELLED = "cancelled"
    """Its consumer left before the metrics came."""
    FAILED = "failed"
    """It raised an error."""


class DocumentOutcome(StrEnum):
    """What became of a retrieved document."""

    HIT = "hit"
    """A prompt of the run read its stored KV."""
    PARTIAL = "partial"
    """A prompt of the run holds a part of it, as when a caller splits chunks."""
    MISS = "miss"
    """A prompt of the run held it, and it was not served; see its ``miss_reason``."""
    NOT_IN_PROMPT = "not in the prompt"
    """No prompt of the run holds its text: it was left out, or rewritten on the way."""
    TOO_SHORT = "too short to be recognised"
    """A prompt holds its text, which is only recognised where content blocks name it."""
    NOT_INDEXED = "not indexed"
    """A prompt holds its text, and the corpus does not know it as a chunk."""
    UNKNOWN = "unknown"
    """A prompt holds its text, and its call told nothing: it failed, its consumer left, or it asked
    another model."""


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """A document that was retrieved.

    Attributes:
        text: Its text as it is expected in a prompt, stripped as a chunk's is.
        source: Its id or its metadata's source, for people; empty where it has none.
        other_texts: Other forms that a prompt may hold instead, each stripped: its text without
            the metadata above it.
    """

    text: str
    source: str
    other_texts: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Every form, the expected one first."""
        return (self.text, *self.other_texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentUse:
    """What became of one retrieved document.

    Attributes:
        chunk_id: Id of the chunk that its text is.
        source: Its id or its metadata's source, for people; empty where it has none.
        outcome: Hit, partial, miss, or not there.
        miss_reason: Why it was missed; ``None`` where it was not, or not there.
    """

    chunk_id: str
    source: str
    outcome: DocumentOutcome
    miss_reason: MissReason | None = None


def outcome_of(use: ModuleUse) -> DocumentOutcome:
    """What a prompt's use of a document as a module says about the document."""
    if use.hit_kind is HitKind.PARTIAL or use.miss_reason is MissReason.SPLIT:
        return DocumentOutcome.PARTIAL
    return DocumentOutcome.HIT if use.is_hit else DocumentOutcome.MISS


def is_cancellation(error: BaseException | None) -> bool:
    """Whether an error says that the consumer left: a closed stream or a cancelled task."""
    return isinstance(error, (GeneratorExit, asyncio.CancelledError))
