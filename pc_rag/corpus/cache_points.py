"""Cache points of a prompt: where its tokens are cut, and the chain of entries up to the last one.

::

    prompt   |-- tokens up to the last point ------------|-- what follows --|
    chain    |  [0, p1)  |  [p1, p2) behind [0, p1)      |

Every entry of the chain attended all before it, so the chain is what full prefill would compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pc_rag.corpus.planning import find_apart
from pc_rag.engine.request import EntryRecipe
from pc_rag.kv.key import VisibilityContext
from pc_rag.layout import EntryPiece
from pc_rag.model.chat import ChatPiece, PieceKind
from pc_rag.types import Visibility

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.corpus.places import CutPiece
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.types import TokenIds

MAX_POINTS = 4
"""Points of a prompt that count, as many as prompts for hosted models may have: each entry is one
more piece for every layer to attend. Of more, the first ones and the last count: entries up to the
first stay the same while a conversation grows."""

MIN_SEGMENT_TOKENS = 16
"""A shorter entry saves less than reading it costs; it becomes a part of the next."""

_LABEL = "(cache point)"
"""No chunk's id: those are hexadecimal."""


@dataclass(frozen=True, slots=True)
class TokenPoint:
    """A cache point as tokens see it.

    Attributes:
        end: Tokens of the prompt before it.
        ttl_seconds: See ``CachePoint``.
    """

    end: int
    ttl_seconds: float


@dataclass(frozen=True, slots=True)
class CutPrompt:
    """A prompt in order, and its cache points.

    Attributes:
        pieces: Token ids and places of chunks; the first holds all tokens up to the last point.
        points: By rising place; none before the first token.
    """

    pieces: Sequence[CutPiece]
    points: Sequence[TokenPoint] = ()


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One entry of a chain.

    Attributes:
        label: In metrics.
        recipe: How it is made.
        ttl_seconds: How long it is kept; ``None`` for the prefix of a corpus, which stays.
    """

    label: str
    recipe: EntryRecipe
    ttl_seconds: float | None

    @property
    def end(self) -> int:
        """The first position ID behind it: tokens of the prompt up to its end."""
        return self.recipe.address.span.end

    @property
    def piece(self) -> EntryPiece:
        """It, as a part of the prompt's prefix."""
        address = self.recipe.address
        return EntryPiece(
            label=self.label,
            key=address.key,
            token_ids=address.token_ids,
            encoded_start=address.start,
            context_is_prefix=True,
            is_prefix=True,
        )


def cut_at_points(
    tokenizer: TextTokenizer, pieces: Sequence[ChatPiece]
) -> tuple[list[ChatPiece], tuple[TokenPoint, ...]]:
    """Cut a rendered conversation into tokens at its cache points.

    Args:
        tokenizer: Makes the tokens of contents that are cut.
        pieces: The conversation.

    Returns:
        The pieces, the tokens of those up to the last point as one, without text, in which no
        chunk is looked for; and the points.
    """
    last = max((index for index, piece in enumerate(pieces) if piece.points), default=-1)
    kept: list[int] = []
    points: list[TokenPoint] = []
    rest: list[ChatPiece] = []
    for index, piece in enumerate(pieces[: last + 1]):
        # As the template was rendered: BOS was put in front afterwards.
        is_first = tuple(kept) in ((), tokenizer.bos_ids)
        start = 0
        for point in piece.points:
            kept += _tokens(tokenizer, piece, start, point.offset, is_first=is_first)
            start = point.offset
            if kept:
                points.append(TokenPoint(len(kept), point.ttl_seconds))
        if index < last:
            kept += _tokens(tokenizer, piece, start, len(piece.text), is_first=is_first)
        elif start < len(piece.text):
            ids = _tokens(tokenizer, piece, start, len(piece.text), is_first=is_first)
            chunks = _chunks_behind(piece, start)
            rest.append(ChatPiece(piece.kind, piece.text[start:], ids, chunks))
    before = [ChatPiece(PieceKind.CONTROL, "", tuple(kept))] if kept else []
    return [*before, *rest, *pieces[last + 1 :]], tuple(points)


def _tokens(
    tokenizer: TextTokenizer, piece: ChatPiece, start: int, end: int, *, is_first: bool
) -> TokenIds:
    if start >= end:
        return ()
    if end - start == len(piece.text):
        return piece.token_ids
    return tokenizer.encode_text(piece.text[start:end], is_first=is_first and not start)


def _chunks_behind(piece: ChatPiece, start: int) -> tuple[str, ...]:
    """The chunks that a content names and that do not begin before a place in it."""
    end = 0
    for index, named in enumerate(piece.chunks):
        found = find_apart(piece.text, named.strip(), end) if named.strip() else -1
        if found >= start:
            return piece.chunks[index:]
        end = end if found < 0 else found + len(named.strip())
    return ()


def counting_ends(points: Sequence[TokenPoint], *, start: int) -> tuple[int, ...]:
    """Where the entries of a prompt's points end, behind tokens that are there already.

    Args:
        points: By rising place.
        start: Tokens of the prompt that other entries hold.
    """
    ends: list[int] = []
    for point in points:
        if point.end - (ends[-1] if ends else start) >= MIN_SEGMENT_TOKENS:
            ends.append(point.end)
    if len(ends) > MAX_POINTS:
        ends = [*ends[: MAX_POINTS - 1], ends[-1]]
    return tuple(ends)


def chain_of(
    engine: PromptCache,
    head: TokenIds,
    ends: Sequence[int],
    points: Sequence[TokenPoint],
    *,
    known: CorpusPrefix | None,
) -> tuple[ChainLink, ...]:
    """The chain of entries that holds a prompt's first tokens.

    Args:
        engine: Whose model, dtype and tenant the entries are of.
        head: The prompt's first tokens.
        ends: Where entries end, rising; behind the known prefix.
        points: Say how long entries are kept: as long as the longest point that needs them.
        known: A prefix of the corpus that the prompt begins with.
    """
    links: list[ChainLink] = []
    if known is not None and known.recipe is not None:
        links.append(ChainLink("(prefix)", known.recipe, None))
    num_known = len(links)
    for number, end in enumerate(ends, 1):
        start = links[-1].end if links else 0
        context = VisibilityContext.of(Visibility.PREFIX, head[:start], range(start))
        address = engine.address(head[start:end], start=start, context=context)
        keys = tuple(link.recipe.address.key for link in links)
        label = _LABEL if len(ends) == 1 else f"{_LABEL[:-1]} {number})"
        ttl = max(point.ttl_seconds for point in points if point.end >= end)
        links.append(ChainLink(label, EntryRecipe(address, keys), ttl))
    return tuple(links) if len(links) > num_known else ()
