"""From retrieved chunks and the text around them to the plan of a request. No PML involved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.errors import LayoutError
from pc_rag.layout.plan import Cached, Fresh, FreshKind, RequestPlan
from pc_rag.layout.repair import with_fresh_end
from pc_rag.types import HitKind, PositionPolicy, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.layout.plan import Part
    from pc_rag.types import ModuleKey, TokenIds


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of this request: headers, separators, the question.

    Attributes:
        token_ids: Its tokens; may be empty.
        label: Id of the chunk that it is a part of, for metrics; empty for all other text.
    """

    token_ids: TokenIds
    label: str = ""


@dataclass(frozen=True, slots=True)
class MemberRows:
    """One chunk of a scaffold, in the scaffold's entry.

    Attributes:
        label: Id of the chunk, for metrics.
        rows: Its rows, and those of the separator behind it where that is read too.
    """

    label: str
    rows: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPiece:
    """A stored prefix, chunk or scaffold.

    Attributes:
        label: Id of the chunk or scaffold, or name of the prefix; for metrics.
        key: Its entry.
        token_ids: All tokens of the entry; may be empty.
        encoded_start: Position ID of its first token when it was encoded.
        context_is_prefix: What it attended when it was encoded is exactly the prefix of this
            prompt: the same tokens at the same position IDs, or nothing where there is no prefix.
        is_prefix: It is (a part of) the prefix, not a chunk; stands before every chunk.
        num_read: Leading tokens that stand in the prompt and are read; ``None`` for all. They
            attended nothing behind them, so their KV is what it is in the whole.
        members: Of a scaffold: the chunks that stand here one behind the other, whose rows follow
            each other. Where others of its chunks stand elsewhere they are pieces of their own.
    """

    label: str
    key: ModuleKey
    token_ids: TokenIds
    encoded_start: int
    context_is_prefix: bool
    is_prefix: bool = False
    num_read: int | None = None
    members: tuple[MemberRows, ...] = ()

    @property
    def reads(self) -> tuple[MemberRows, ...]:
        """What is read, by label: of a chunk or prefix its first tokens, of a scaffold members."""
        if self.members:
            return self.members
        num_tokens = len(self.token_ids)
        end = num_tokens if self.num_read is None else min(self.num_read, num_tokens)
        return (MemberRows(self.label, Span(0, end)),)

    @property
    def rows(self) -> Span:
        """The rows that are read."""
        return Span(self.reads[0].rows.start, self.reads[-1].rows.end)

    @property
    def read_ids(self) -> TokenIds:
        """The tokens that are read."""
        return self.token_ids[self.rows.start : self.rows.end]

    @property
    def is_head(self) -> bool:
        """Whether only a chunk's first tokens are read."""
        return not self.members and len(self.rows) < len(self.token_ids)


Piece: TypeAlias = TextPiece | EntryPiece


def plan_chunks(
    pieces: Sequence[Piece],
    *,
    policy: PositionPolicy,
    slot_tokens: int | None = None,
    max_position: int | None = None,
) -> RequestPlan:
    """Place a prefix, chunks and the text between them.

    Under ``packed`` spans follow each other. Under ``reserved`` the i-th chunk lies in slot i of
    ``slot_tokens`` position IDs behind the prefix, the text in front of it in the same slot; text
    that does not fit there beside its chunk pushes what follows back, until a gap takes it up::

        |prefix|text, chunk 0, gap |text, chunk 1, gap |chunk 2|question|
               |<-- slot_tokens -->|<-- slot_tokens -->|

    Members of a scaffold that stand one behind the other take as many slots as they would apart;
    they lie as they were encoded, without gaps between them, and what is behind does not move.

    A piece is exact where all before it is exact, is just what it attended, and it did not move:
    the prefix at position 0, and the first chunk or scaffold right behind its prefix. A head of a
    chunk is a partial hit. The last token of the plan is always fresh.

    Args:
        pieces: The prompt in order; concatenating the ids read gives the plan's ids.
        policy: How spans are given out.
        slot_tokens: Position IDs of a slot; needed under ``reserved``, unused under ``packed``.
        max_position: Position IDs that the model has; ``None`` where it sets no limit.

    Raises:
        LayoutError: A chunk is longer than the slot, a prefix stands behind a chunk, there is no
            slot length under ``reserved``, or the prompt needs more position IDs than there are.
        PromptError: The pieces have no token.
    """
    if policy is PositionPolicy.RESERVED and (slot_tokens is None or slot_tokens < 1):
        raise LayoutError(
            f"policy 'reserved' needs a slot length of at least 1 token; got {slot_tokens}"
        )
    _check_order(pieces)
    placer = _Placer(slot_tokens if policy is PositionPolicy.RESERVED else None)
    for piece in pieces:
        placer.place(piece)
    plan = with_fresh_end(RequestPlan(placer.finish()))
    if max_position is not None and plan.end > max_position:
        raise LayoutError(
            f"context overflow: the prompt has {plan.num_tokens} tokens and needs position IDs up "
            f"to {plan.end}, the model has {max_position}; retrieve fewer chunks, or shorten the "
            f"text by {plan.end - max_position} tokens"
        )
    return plan


def _check_order(pieces: Sequence[Piece]) -> None:
    first_chunk: str | None = None
    for piece in pieces:
        if not isinstance(piece, EntryPiece):
            continue
        if not piece.is_prefix:
            first_chunk = first_chunk or piece.label
        elif first_chunk is not None:
            raise LayoutError(
                f"prefix {piece.label!r} stands behind chunk {first_chunk!r}; put prefixes first"
            )


class _Placer:
    """Gives spans to pieces, one after the other.

    Text waits for the piece behind it, because under ``reserved`` it lies in that piece's slot.
    """

    def __init__(self, slot_tokens: int | None) -> None:
        self._slot_tokens = slot_tokens
        self._parts: list[Part] = []
        self._waiting: list[TextPiece] = []
        self._cursor = 0
        self._prefix_end = 0
        self._num_chunks = 0
        self._is_exact = True

    def place(self, piece: Piece) -> None:
        if isinstance(piece, TextPiece):
            if piece.token_ids:
                self._waiting.append(piece)
        elif piece.is_prefix:
            self._place_text()
            self._place_entry(piece)
            self._prefix_end = self._cursor
        else:
            self._enter_slot(piece)
            self._place_text()
            self._place_entry(piece)
            self._num_chunks += len(piece.reads)

    def finish(self) -> tuple[Part, ...]:
        self._place_text()
        return tuple(self._parts)

    def _enter_slot(self, piece: EntryPiece) -> None:
        if self._slot_tokens is None:
            return
        # Of several members each fits a slot; what separates them is like text between chunks.
        if len(piece.reads) == 1 and len(piece.read_ids) > self._slot_tokens:
            raise LayoutError(
                f"chunk {piece.reads[0].label!r} has {len(piece.read_ids)} tokens, a slot holds "
                f"{self._slot_tokens}; split the chunk, or create the corpus with longer slots"
            )
        slot_start = self._prefix_end + self._num_chunks * self._slot_tokens
        self._cursor = max(self._cursor, slot_start)

    def _place_text(self) -> None:
        for piece in self._waiting:
            span = Span(self._cursor, self._cursor + len(piece.token_ids))
            kind = FreshKind.PART if piece.label else FreshKind.TEXT
            self._parts.append(
                Fresh(token_ids=piece.token_ids, span=span, kind=kind, label=piece.label)
            )
            self._cursor = span.end
            self._is_exact = False
        self._waiting.clear()

    def _place_entry(self, piece: EntryPiece) -> None:
        rows = piece.rows
        if not rows:
            return
        is_unmoved = not rows.start and piece.encoded_start == self._cursor
        is_exact = self._is_exact and is_unmoved and self._saw_all(piece)
        hit_kind = HitKind.EXACT if is_exact else HitKind.COMPOSED
        for read in piece.reads:
            span = Span(self._cursor, self._cursor + len(read.rows))
            self._parts.append(
                Cached(
                    label=read.label,
                    key=piece.key,
                    token_ids=piece.token_ids[read.rows.start : read.rows.end],
                    span=span,
                    rows=read.rows,
                    encoded_start=piece.encoded_start,
                    hit_kind=HitKind.PARTIAL if piece.is_head else hit_kind,
                )
            )
            self._cursor = span.end
        self._is_exact = is_exact and piece.is_prefix

    def _saw_all(self, piece: EntryPiece) -> bool:
        """Whether it attended all that lies before it, given that all of that is prefix."""
        return piece.context_is_prefix or not self._parts
