"""What a prompt is cut into: text, parts of chunks, and places of chunks and scaffolds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.layout import MemberRows
from pc_rag.types import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pc_rag.corpus.parts import HeadTokens, PartText
    from pc_rag.types import TokenIds


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk that stands in a prompt.

    Attributes:
        chunk_id: The chunk.
        text: What stands there: its text, or a mark in its place, or the text of its head.
        head: Its tokens, where only a head of it stands there.
    """

    chunk_id: str
    text: str
    head: HeadTokens | None = None


@dataclass(frozen=True, slots=True)
class KnownScaffold:
    """A scaffold, as prompts see it.

    Attributes:
        id: Its id.
        chunk_ids: Its chunks in order.
        separator_ids: The tokens between them.
    """

    id: str
    chunk_ids: tuple[str, ...]
    separator_ids: TokenIds


@dataclass(frozen=True, slots=True)
class ScaffoldPlace:
    """Chunks of a scaffold that stand in a prompt one behind the other, its separator between them.

    All its chunks stand in the prompt in its order; where other text separates some of them, it has
    several places.

    Attributes:
        scaffold: The scaffold.
        chunks: The places of all its chunks.
        members: Which of them stand here.
    """

    scaffold: KnownScaffold
    chunks: tuple[ChunkPlace, ...]
    members: Span

    def joint_ids(self, chunk_tokens: Callable[[ChunkPlace], TokenIds]) -> TokenIds:
        """The tokens of the scaffold's entry, given those of its chunks."""
        return join_tokens(map(chunk_tokens, self.chunks), self.scaffold.separator_ids)

    def rows(self, chunk_tokens: Callable[[ChunkPlace], TokenIds]) -> tuple[MemberRows, ...]:
        """The rows of that entry that are read here, by chunk: each with the separator behind it.

        That behind the last one is not read.
        """
        num_between = len(self.scaffold.separator_ids)
        rows: list[MemberRows] = []
        start = 0
        for number, chunk in enumerate(self.chunks):
            num_tokens = len(chunk_tokens(chunk))
            if self.members.start <= number < self.members.end:
                num_behind = 0 if number == self.members.end - 1 else num_between
                span = Span(start, start + num_tokens + num_behind)
                rows.append(MemberRows(chunk.chunk_id, span))
            start += num_tokens + num_between
        return tuple(rows)


CutPiece: TypeAlias = "TokenIds | PartText | ChunkPlace | ScaffoldPlace"
"""A prompt in order: token ids of its own text, of parts of chunks in it, and places."""


def join_tokens(chunks: Iterator[TokenIds], separator_ids: TokenIds) -> TokenIds:
    """The tokens of chunks with those of a separator between them."""
    joint: list[int] = []
    for number, token_ids in enumerate(chunks):
        joint += (*separator_ids, *token_ids) if number else token_ids
    return tuple(joint)


def place_scaffolds(
    cut: Sequence[CutPiece], scaffolds: Mapping[str, Sequence[KnownScaffold]]
) -> list[CutPiece]:
    """Read chunks that stand in a prompt from the scaffolds they belong to.

    A scaffold is read where all its chunks stand whole in its order, no other chunk between them.
    Of several that would share a chunk the one with the most chunks is; of equals rather one that
    is separated as it was encoded, then the one that stands first.

    Args:
        cut: The prompt, without scaffolds.
        scaffolds: By id of their first chunk.
    """
    places = [(i, piece) for i, piece in enumerate(cut) if isinstance(piece, ChunkPlace)]
    found = [
        _Found(scaffold, tuple(i for i, _ in run), tuple(place for _, place in run))
        for number, (_, first) in enumerate(places)
        for scaffold in scaffolds.get(first.chunk_id, ())
        if _fits(scaffold, run := places[number : number + len(scaffold.chunk_ids)])
    ]
    found.sort(key=lambda each: (-len(each.chunks), len(each.groups(cut)), each.indices))
    placed: dict[int, ScaffoldPlace] = {}
    taken: set[int] = set()
    dropped: set[int] = set()
    for each in found:
        if taken.isdisjoint(each.indices):
            taken.update(each.indices)
            for group in each.groups(cut):
                first, last = each.indices[group.start], each.indices[group.end - 1]
                placed[first] = ScaffoldPlace(each.scaffold, each.chunks, group)
                dropped.update(range(first + 1, last + 1))
    return [placed.get(i, piece) for i, piece in enumerate(cut) if i not in dropped]


def side_by_side(
    chunk_ids: Sequence[str], scaffolds: Mapping[str, Sequence[KnownScaffold]]
) -> list[str]:
    """Retrieved chunks, those of scaffolds together.

    The chunks of a scaffold that is there as a whole come in its order to the place of the first of
    them. Of several that would share a chunk, the one with the most chunks does; of equals the one
    that is retrieved first.

    Args:
        chunk_ids: What was retrieved, each once.
        scaffolds: By id of their first chunk.
    """
    rank = {chunk_id: number for number, chunk_id in enumerate(chunk_ids)}
    whole = [
        scaffold
        for chunk_id in chunk_ids
        for scaffold in scaffolds.get(chunk_id, ())
        if rank.keys() >= set(scaffold.chunk_ids)
    ]
    whole.sort(key=lambda s: (-len(s.chunk_ids), min(rank[each] for each in s.chunk_ids)))
    groups: dict[str, tuple[str, ...]] = {}
    for scaffold in whole:
        if groups.keys().isdisjoint(scaffold.chunk_ids):
            groups.update(dict.fromkeys(scaffold.chunk_ids, scaffold.chunk_ids))
    ordered = (each for id_ in chunk_ids for each in groups.get(id_, (id_,)))
    return list(dict.fromkeys(ordered))


@dataclass(frozen=True, slots=True)
class _Found:
    """A scaffold whose chunks all stand in a prompt; ``indices`` say where."""

    scaffold: KnownScaffold
    indices: tuple[int, ...]
    chunks: tuple[ChunkPlace, ...]

    def groups(self, cut: Sequence[CutPiece]) -> list[Span]:
        """Which chunks stand together, the scaffold's separator between them."""
        cuts = [
            number
            for number, (before, behind) in enumerate(pairwise(self.indices), 1)
            if not _is_text(cut[before + 1 : behind], self.scaffold.separator_ids)
        ]
        return [Span(*ends) for ends in pairwise([0, *cuts, len(self.chunks)])]


def _fits(scaffold: KnownScaffold, run: Sequence[tuple[int, ChunkPlace]]) -> bool:
    ids = tuple(place.chunk_id for _, place in run)
    return ids == scaffold.chunk_ids and all(place.head is None for _, place in run)


def _is_text(pieces: Sequence[CutPiece], token_ids: TokenIds) -> bool:
    """Whether pieces are text of the prompt with just these tokens."""
    between: list[int] = []
    for piece in pieces:
        if not isinstance(piece, tuple):
            return False
        between += piece
    return tuple(between) == token_ids
