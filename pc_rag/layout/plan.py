"""The plan of one request: which tokens are read from stored KV, and which are computed.

A plan is pure data. Every policy (slots, packed or reserved positions, repair, what to do on a
miss) has been decided once a plan exists, and no tensor has been touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TypeAlias

from pc_rag.errors import LayoutError
from pc_rag.types import HitKind, ModuleKey, Span, TokenIds


class FreshKind(StrEnum):
    """Why a token is computed in this request."""

    TEXT = "text"
    """Question, separators, modules that are not stored: computed in every request."""
    ARGUMENT = "argument"
    """Text of this request at the reserved positions of a parameter."""
    REPAIR = "repair"
    """A stored token recomputed so that it sees the other chunks."""
    UNCACHED = "uncached"
    """A stored token computed because reuse is off."""
    PART = "part"
    """Text of this request that is a part of a chunk. Stored tokens of it attended what is not
    there, so it is computed as all text is; only metrics tell it apart."""
    UNPLACED = "unplaced"
    """A stored token of a module that no entry can stand for here, as positions are fixed."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One use of an entry at one place of a prompt: its parts are one occurrence.

    Attributes:
        key: The entry.
        start: Position ID in this request of the entry's row 0, read or not; negative where what
            stands before the first row read is shorter than in the entry. Parts of one entry that
            lie as far from each other as they were encoded have it in common, and keep that where
            gaps between them are closed.
    """

    key: ModuleKey
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """Tokens whose KV is read from an entry.

    Attributes:
        label: Name of the module or id of the chunk, for metrics.
        key: The entry.
        token_ids: The tokens read; as many as ``span`` and ``rows`` hold.
        span: Position IDs they take in this request.
        rows: Which rows of the entry they are.
        encoded_start: Position ID of the entry's row 0 when it was encoded. The keys move by
            ``span.start - (encoded_start + rows.start)``.
        hit_kind: How the KV relates to full prefill.
        num_closed: Position IDs by which it stands nearer to the first part of its occurrence than
            it was encoded; see ``RequestPlan.without_gaps``.
    """

    label: str
    key: ModuleKey
    token_ids: TokenIds
    span: Span
    rows: Span
    encoded_start: int
    hit_kind: HitKind = HitKind.COMPOSED
    num_closed: int = 0

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.span) == len(self.rows):
            raise LayoutError(
                f"{self.label!r}: {len(self.token_ids)} tokens, {len(self.span)} position IDs and "
                f"{len(self.rows)} rows; they must be equal"
            )

    @property
    def shift(self) -> int:
        """Position IDs that the keys move by; 0 where they lie where they were encoded."""
        return self.span.start - (self.encoded_start + self.rows.start)

    @property
    def occurrence(self) -> Occurrence:
        """The use of the entry that it is a part of."""
        return Occurrence(self.key, self.span.start - self.rows.start + self.num_closed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """A leading run of tokens whose KV the exact prefix cache still holds.

    Attributes:
        token_ids: The tokens; as many as ``span`` holds.
        span: Position IDs they take, equal to those they were computed at.
        kind: Why they would be computed otherwise.
        label: Name of the module or chunk they belong to; empty for the request's own text.
        occurrence: The use of an entry whose rows they stand for; ``None`` where there is none.
    """

    token_ids: TokenIds
    span: Span
    kind: FreshKind = FreshKind.TEXT
    label: str = ""
    occurrence: Occurrence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Tokens computed in this request's one forward pass.

    Attributes:
        token_ids: The tokens; as many as ``span`` holds.
        span: Position IDs they take.
        kind: Why they are computed.
        label: Name of the module or chunk they belong to; empty for the request's own text.
        occurrence: The use of an entry whose rows they stand for; ``None`` where there is none.
    """

    token_ids: TokenIds
    span: Span
    kind: FreshKind = FreshKind.TEXT
    label: str = ""
    occurrence: Occurrence | None = None


Part: TypeAlias = Cached | Reused | Fresh


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """An ordered list of parts, by rising position ID.

    Raises:
        LayoutError: Parts overlap, run backwards, or hold another number of tokens than IDs.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        previous_end = 0
        for part in self.parts:
            if len(part.token_ids) != len(part.span):
                raise LayoutError(
                    f"a part of {len(part.token_ids)} tokens has {len(part.span)} position IDs"
                )
            if part.span.start < previous_end:
                raise LayoutError(
                    f"a part starts at position ID {part.span.start}, before the previous part's "
                    f"end {previous_end}"
                )
            previous_end = part.span.end

    @property
    def token_ids(self) -> TokenIds:
        """Every token of the prompt, in order."""
        return tuple(chain.from_iterable(part.token_ids for part in self.parts))

    @property
    def position_ids(self) -> tuple[int, ...]:
        """The position ID of every token, in order; may have gaps."""
        return tuple(
            chain.from_iterable(range(part.span.start, part.span.end) for part in self.parts)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt: cached, reused and fresh."""
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def end(self) -> int:
        """The first position ID behind the prompt."""
        return self.parts[-1].span.end if self.parts else 0

    @property
    def cached(self) -> tuple[Cached, ...]:
        """The parts read from entries."""
        return tuple(part for part in self.parts if isinstance(part, Cached))

    @property
    def fresh(self) -> tuple[Fresh, ...]:
        """The parts computed in this request."""
        return tuple(part for part in self.parts if isinstance(part, Fresh))

    @property
    def num_cached_tokens(self) -> int:
        """Tokens read from entries or reused by the exact prefix cache."""
        return sum(len(part.token_ids) for part in self.parts if not isinstance(part, Fresh))

    @property
    def num_repaired_tokens(self) -> int:
        """Stored tokens recomputed in this request."""
        return sum(len(p.token_ids) for p in self.fresh if p.kind is FreshKind.REPAIR)

    def without_gaps(self) -> RequestPlan:
        """The plan with the same tokens, each part right behind the one before it.

        For models whose positions are distances (``Placement.FREE``), where a gap would be one
        between tokens that follow each other. Parts of one occurrence stay one occurrence.
        """
        closed_before: dict[Occurrence, int] = {}
        parts: list[Part] = []
        end = 0
        for part in self.parts:
            num_closed = part.span.start - end
            span = Span(end, end + len(part.span))
            end = span.end
            occurrence = part.occurrence
            if occurrence is None:
                parts.append(replace(part, span=span))
                continue
            before = closed_before.setdefault(occurrence, num_closed)
            if isinstance(part, Cached):
                within = part.num_closed + num_closed - before
                parts.append(replace(part, span=span, num_closed=within))
            else:
                moved = Occurrence(occurrence.key, occurrence.start - before)
                parts.append(replace(part, span=span, occurrence=moved))
        return RequestPlan(tuple(parts))

    def without_reuse(self) -> RequestPlan:
        """The uncached arm: the same token ids at the same position IDs, all of them fresh.

        What repair cut off a module is one part with it again: here nothing is repaired.
        """
        merged: list[Fresh] = []
        before: Part | None = None
        for part in self.parts:
            fresh = _as_fresh(part)
            if before is not None and _goes_on(before, part):
                first = merged.pop()
                fresh = replace(
                    first,
                    token_ids=first.token_ids + fresh.token_ids,
                    span=Span(first.span.start, fresh.span.end),
                )
            merged.append(fresh)
            before = part
        return RequestPlan(tuple(merged))


_TEXT_KINDS = frozenset({FreshKind.TEXT, FreshKind.PART, FreshKind.ARGUMENT})
"""Kinds of what no entry holds."""


def _as_fresh(part: Part) -> Fresh:
    kind = FreshKind.UNCACHED
    if not isinstance(part, Cached) and part.kind in _TEXT_KINDS:
        kind = part.kind
    return Fresh(
        token_ids=part.token_ids,
        span=part.span,
        kind=kind,
        label=part.label,
        occurrence=part.occurrence,
    )


def _goes_on(before: Part, part: Part) -> bool:
    """Whether a part is the rest of the module that the part before it began.

    Repair cuts off a module's first tokens, and the end of the plan its very last one.
    """
    if part.label != before.label or part.span.start != before.span.end:
        return False
    is_stored = all(
        isinstance(each, Cached) or each.kind not in _TEXT_KINDS for each in (before, part)
    )
    return is_stored and part.occurrence is not None and part.occurrence == before.occurrence


def split_cached(part: Cached, num_leading: int) -> tuple[Cached | None, Cached | None]:
    """Cut a cached part behind its first ``num_leading`` tokens; an empty side is ``None``."""
    cut = min(max(num_leading, 0), len(part.token_ids))

    def piece(first: int, last: int) -> Cached | None:
        if first == last:
            return None
        return replace(
            part,
            token_ids=part.token_ids[first:last],
            span=Span(part.span.start + first, part.span.start + last),
            rows=Span(part.rows.start + first, part.rows.start + last),
        )

    return piece(0, cut), piece(cut, len(part.token_ids))
