"""What the sequences of a batch attend: stored KV that several of them read in place, and tails.

    shared       sequence 0       sequence 1       sequence 2
    module A --- sees it at 0 --- sees it at 0 --- sees it at 40 (its queries are rotated)
    module B     (does not) ----- sees it at 90 -- sees it at 0
                 tail             tail             tail

Stored KV that only one sequence sees is settled into that sequence's tail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.model.assembly import fresh_tokens, segment_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pc_rag.kv.entry import Entry
    from pc_rag.layout.plan import Cached, RequestPlan
    from pc_rag.model.batch.tails import SequenceTail
    from pc_rag.model.runner import Runner
    from pc_rag.types import ModuleKey, Span


@dataclass(frozen=True, slots=True, eq=False)
class StoredPiece:
    """Stored KV of consecutive tokens, read in place by every sequence that sees it.

    Attributes:
        layer_keys: One ``[1, num_kv_heads, num_tokens, head_dim]`` view per layer. Never written.
        layer_values: Alike.
    """

    layer_keys: tuple[torch.Tensor, ...]
    layer_values: tuple[torch.Tensor, ...]


class SharedKV:
    """The entries that several sequences of a batch see, each held once.

    Args:
        entries: They must stay leased for as long as this is used.
        dtype: Compute dtype. Entries of another one are converted, once for all sequences.
    """

    def __init__(self, entries: Mapping[ModuleKey, Entry], dtype: torch.dtype) -> None:
        self._kv = {
            key: (entry.keys.to(dtype), entry.values.to(dtype)) for key, entry in entries.items()
        }
        self._pieces: dict[tuple[ModuleKey, int, int, int], StoredPiece] = {}

    def __contains__(self, key: ModuleKey) -> bool:
        return key in self._kv

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values that are read."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._kv.values())

    def piece(self, part: Cached, occurrence: int) -> StoredPiece:
        """The rows that a part reads; one and the same for every sequence that reads them.

        Args:
            part: Of an entry that is here.
            occurrence: How often its sequence has read these rows before. A token that sees them
                at two places sees two pieces.
        """
        place = (part.key, part.rows.start, part.rows.end, occurrence)
        if place not in self._pieces:
            rows = slice(part.rows.start, part.rows.end)
            keys, values = self._kv[part.key]
            self._pieces[place] = StoredPiece(
                keys[:, None, :, rows].unbind(0), values[:, None, :, rows].unbind(0)
            )
        return self._pieces[place]


@dataclass(frozen=True, slots=True, eq=False)
class SharedView:
    """A piece as one sequence sees it.

    Attributes:
        piece: What is seen.
        start: Position ID of its first token in this sequence.
        shift: Position IDs that its keys moved by.
    """

    piece: StoredPiece
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class SettledRows:
    """Stored KV that was copied to the tail.

    Attributes:
        start: Position ID of its first token.
        rows: Where it lies.
    """

    start: int
    rows: slice


@dataclass(frozen=True, slots=True, eq=False)
class BatchSequence:
    """Everything that one sequence of a batch can attend.

    Attributes:
        tail: Its own rows: what was settled, then what it computed.
        shared: Stored KV that it shares.
        settled: What of the tail was settled.
        token_ids: Fresh tokens of its prompt, by rising position ID.
        position_ids: Theirs.
    """

    tail: SequenceTail
    shared: tuple[SharedView, ...]
    settled: tuple[SettledRows, ...]
    token_ids: list[int]
    position_ids: list[int]


def assemble_sequence(
    plan: RequestPlan,
    tail: SequenceTail,
    shared: SharedKV,
    entries: Mapping[ModuleKey, Entry],
    runner: Runner,
) -> BatchSequence:
    """Bring the stored KV of a plan to a sequence.

    Args:
        plan: The request.
        tail: Empty; has room for all tokens that are not shared.
        shared: What is read in place.
        entries: All others that the plan reads. They are copied, and not needed any more after.
        runner: Whose position encoding is used.

    Raises:
        EntryNotFound: A cached part is neither shared nor among ``entries``.
    """
    views: list[SharedView] = []
    settled: list[SettledRows] = []
    seen: Counter[tuple[ModuleKey, Span]] = Counter()
    for part in plan.cached:
        if not part.token_ids:
            continue
        if part.key in shared:
            piece = shared.piece(part, seen[part.key, part.rows])
            views.append(SharedView(piece, part.span.start, part.shift))
            seen[part.key, part.rows] += 1
        else:
            rows = tail.settle(segment_of(part, entries, runner.dtype), runner.positions)
            settled.append(SettledRows(part.span.start, rows))
    return BatchSequence(tail, tuple(views), tuple(settled), *fresh_tokens(plan))
