"""From a prompt and the chunks that stand in it to a request.

A prompt is cut where chunks stand, and heads of chunks. What lies between is tokenised as the
request's own text, tails of chunks included; the chunks' tokens are those they were encoded with.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from pc_rag.corpus.parts import PartText, label_parts
from pc_rag.corpus.places import ChunkPlace, ScaffoldPlace
from pc_rag.corpus.prefixes import chunk_recipe, longest_prefix_of, recipe_table
from pc_rag.corpus.recognition import ChunkPart, Recognized
from pc_rag.engine.anchoring import anchored
from pc_rag.engine.request import Request
from pc_rag.layout import EntryPiece, TextPiece, apply_repair, parse_repair, plan_chunks
from pc_rag.model.chat import ChatPiece, PieceKind
from pc_rag.types import MissReason, Placement, Visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pc_rag.corpus.cache_points import ChainLink
    from pc_rag.corpus.parts import HeadTokens
    from pc_rag.corpus.places import CutPiece
    from pc_rag.corpus.prefixes import CorpusPrefix
    from pc_rag.engine import PromptCache
    from pc_rag.engine.request import EntryRecipe
    from pc_rag.kv.key import EntryAddress
    from pc_rag.types import TokenIds

    Finder: TypeAlias = Callable[[str], Sequence[Recognized]]
    HeadFitter: TypeAlias = Callable[[Recognized], HeadTokens | None]

_TEMPLATE = "corpus"
_PREFIX_LABEL = "(prefix)"
"""No chunk's id: those are hexadecimal."""


def place_mark(index: int) -> str:
    """Stands for the i-th chunk while a prompt is cut; private-use characters.

    Prompts that we put together ourselves are cut by marks, not by the chunks' texts: such a text
    may stand in the words around it too (a chunk ``Context`` behind a header ``Context:``).
    """
    return f"\ue000pc-rag chunk {index}\ue000"


class InOrderFinder:
    """Finds given texts in the order given; the finder of prompts that we put together ourselves.

    Args:
        chunks: Pairs of id and text, as they stand in the prompt.
    """

    def __init__(self, chunks: Sequence[tuple[str, str]]) -> None:
        self._left = list(chunks)

    def __call__(self, text: str) -> list[Recognized]:
        """The next chunks, as many as follow each other in ``text``."""
        found: list[Recognized] = []
        end = 0
        while self._left:
            chunk_id, chunk_text = self._left[0]
            start = text.find(chunk_text, end)
            if start < 0:
                break
            end = start + len(chunk_text)
            found.append(Recognized(chunk_id, start, end))
            del self._left[0]
        return found


class NamedFirstFinder:
    """Finds chunks that a message names, and others between them; the finder of one content.

    Named texts are looked for in order, each behind the one before, without the whitespace at its
    ends, which a chunk has not. One that is not there (trimmed into by the template), or that is no
    chunk, is passed over: what stands there is text like any other, in which a part may be found.

    Args:
        named: Texts as a message names them.
        chunk_of: The id of the chunk that a text is; ``None`` where it is none.
        find: Finds chunks in the text between.
    """

    def __init__(
        self, named: Sequence[str], chunk_of: Callable[[str], str | None], find: Finder
    ) -> None:
        self._named = named
        self._chunk_of = chunk_of
        self._find = find

    def __call__(self, text: str) -> list[Recognized]:
        """The chunks in a text, from left to right."""
        found: list[Recognized] = []
        end = 0
        for each in self._places(text):
            found += self._between(text, end, each.start)
            found.append(each)
            end = each.end
        return [*found, *self._between(text, end, len(text))]

    def _places(self, text: str) -> Iterator[Recognized]:
        end = 0
        for named in self._named:
            stripped = named.strip()
            start = find_apart(text, stripped, end) if stripped else -1
            if start < 0:
                continue
            end = start + len(stripped)
            chunk_id = self._chunk_of(stripped)
            if chunk_id is not None:
                yield Recognized(chunk_id, start, end)

    def _between(self, text: str, start: int, end: int) -> Iterator[Recognized]:
        for each in self._find(text[start:end]) if start < end else ():
            yield replace(each, start=start + each.start, end=start + each.end)


def find_apart(text: str, wanted: str, start: int) -> int:
    """Where a text stands first, from ``start`` on; rather where its ends cut no word.

    A short one may stand in a word before (a chunk ``text`` behind a header ``Context:``).
    """
    apart = re.compile(rf"(?<!\w){re.escape(wanted)}(?!\w)").search(text, start)
    return text.find(wanted, start) if apart is None else apart.start()


def _no_head(_: Recognized) -> None:
    """No head is read from an entry."""


def cut_conversation(
    engine: PromptCache,
    pieces: Sequence[ChatPiece],
    find: Finder,
    *,
    chunk_of: Callable[[str], str | None] = lambda _: None,
    fit_head: HeadFitter = _no_head,
) -> list[CutPiece]:
    """Cut a rendered conversation at the chunks in its messages.

    Chunks are looked for in the messages only, so that no text of a chunk can stand for control
    tokens of the template; and not in the model's own answers, whose tokens are made.

    Args:
        engine: Whose tokenizer makes the tokens between chunks.
        pieces: The conversation.
        find: Finds chunks in a message.
        chunk_of: The id of the chunk that a text is, for texts that a message names.
        fit_head: The tokens of a head that was found; ``None`` where it is computed as text.
    """
    bos_ids = engine.loaded.tokenizer.bos_ids
    cut: list[CutPiece] = []
    for piece in pieces:
        find_here = NamedFirstFinder(piece.chunks, chunk_of, find) if piece.chunks else find
        found = find_here(piece.text) if piece.kind is PieceKind.CONTENT else ()
        if found:
            # As the template was rendered: BOS was put in front afterwards.
            is_first = all(before == bos_ids for before in cut)
            cut.extend(_cut_text(engine, piece.text, found, fit_head, is_first=is_first))
        else:
            cut.append(piece.token_ids)
    return cut


def cut_plain_text(
    engine: PromptCache, text: str, find: Finder, *, fit_head: HeadFitter = _no_head
) -> list[CutPiece]:
    """Cut a plain text prompt at the chunks in it; BOS comes first where the model wants one."""
    bos_ids = engine.loaded.tokenizer.bos_ids
    own: list[CutPiece] = [bos_ids] if bos_ids else []
    return own + list(_cut_text(engine, text, find(text), fit_head, is_first=True))


def head_of(cut: Sequence[CutPiece]) -> TokenIds:
    """The tokens before the first chunk or part of one; all of them where there is none."""
    head: list[int] = []
    for piece in cut:
        if not isinstance(piece, tuple):
            break
        head.extend(piece)
    return tuple(head)


def _cut_text(
    engine: PromptCache,
    text: str,
    found: Sequence[Recognized],
    fit_head: HeadFitter,
    *,
    is_first: bool,
) -> Iterator[CutPiece]:
    start = 0
    parts: list[Recognized] = []  # since ``start``, computed with the text that they stand in

    def own_text(end: int) -> Iterator[TokenIds | PartText]:
        moved = [replace(p, start=p.start - start, end=p.end - start) for p in parts]
        tokenizer = engine.loaded.tokenizer
        return label_parts(tokenizer, text[start:end], moved, is_first=is_first and not start)

    for each in found:
        head = fit_head(each) if each.part is ChunkPart.HEAD else None
        if each.part is not ChunkPart.WHOLE and head is None:
            parts.append(each)
            continue
        yield from own_text(each.start)
        start, parts = each.end if head is None else each.start + head.num_chars, []
        yield ChunkPlace(each.chunk_id, text[each.start : start], head)
    yield from own_text(len(text))


class RequestPlanner:
    """Makes requests of cut prompts, under the engine's policies.

    Args:
        engine: Whose model and configuration decide.
    """

    def __init__(self, engine: PromptCache) -> None:
        self._engine = engine
        self._repair = parse_repair(engine.config.repair)

    def plan(
        self,
        cut: Sequence[CutPiece],
        chunk_tokens: Callable[[ChunkPlace], TokenIds],
        *,
        prefixes: Sequence[CorpusPrefix],
        chain: Sequence[ChainLink] = (),
    ) -> Request:
        """The request of a cut prompt.

        Args:
            cut: The prompt.
            chunk_tokens: The tokens of the chunk that stands at a place.
            prefixes: Those that prompts are served from, the default first.
            chain: Entries that hold the prompt's first tokens, in order.

        Raises:
            PromptError: The prompt has no token.
            LayoutError: It does not fit the model's context, or a chunk does not fit its slot.
        """
        config = self._engine.config
        head = head_of(cut)
        known = longest_prefix_of(head, prefixes)
        behind = known or prefixes[0]
        # Under ``module`` a chunk attended nothing, though it may stand where it was encoded.
        sees_context = head == behind.token_ids and bool(behind.context_keys) == bool(head)
        recipes: dict[str, EntryRecipe] = {}
        pieces = [*_head_pieces(head, known, chain)]
        for piece in _behind_head(cut):
            if isinstance(piece, tuple):
                pieces.append(TextPiece(piece))
            elif isinstance(piece, PartText):
                pieces.append(TextPiece(piece.token_ids, label=piece.chunk_id))
            else:
                if (name := _name_of(piece)) not in recipes:
                    token_ids = _entry_tokens(piece, chunk_tokens)
                    recipes[name] = chunk_recipe(self._engine, token_ids, behind)
                address = recipes[name].address
                pieces.append(_entry_piece(piece, address, chunk_tokens, sees_context=sees_context))
        plan = plan_chunks(
            pieces,
            policy=config.position_policy,
            slot_tokens=config.slot_tokens,
            max_position=self._engine.max_position,
        )
        labels = {label for piece in cut for label in _chunks_at(piece)}
        plan = apply_repair(plan, self._repair, lambda part: part.label in labels)
        is_other = config.visibility is Visibility.PREFIX and not sees_context
        read = (part.label for part in plan.cached if part.label in labels)
        remarks = dict.fromkeys(read, MissReason.OTHER_PREFIX) if is_other else {}
        request = Request(
            plan=plan,
            recipes=recipe_table([*(e.recipe for e in chain), *recipes.values()], prefixes),
            template=_TEMPLATE,
            remarks=remarks,
        )
        if self._engine.runner.positions.placement is not Placement.FIXED:
            return request
        return anchored(request, max_position=self._engine.loaded.max_position)


def _head_pieces(
    head: TokenIds, known: CorpusPrefix | None, chain: Sequence[ChainLink]
) -> Iterator[TextPiece | EntryPiece]:
    """What stands before the first chunk: a chain or known prefix as entries, the rest as text."""
    if chain:
        yield from (link.piece for link in chain)
        yield TextPiece(head[chain[-1].end :])
        return
    if known is None or known.recipe is None:
        yield TextPiece(head)
        return
    yield EntryPiece(
        label=_PREFIX_LABEL,
        key=known.recipe.address.key,
        token_ids=known.token_ids,
        encoded_start=0,
        context_is_prefix=True,
        is_prefix=True,
    )
    yield TextPiece(head[len(known.token_ids) :])


def _chunks_at(piece: CutPiece) -> Iterator[str]:
    """The ids of the chunks that a piece is, or is a part of."""
    if isinstance(piece, ScaffoldPlace):
        yield from piece.scaffold.chunk_ids
    elif not isinstance(piece, tuple):
        yield piece.chunk_id


def _name_of(place: ChunkPlace | ScaffoldPlace) -> str:
    """The id of what is read at a place; no chunk has that of a scaffold."""
    return place.scaffold.id if isinstance(place, ScaffoldPlace) else place.chunk_id


def _entry_tokens(
    place: ChunkPlace | ScaffoldPlace, chunk_tokens: Callable[[ChunkPlace], TokenIds]
) -> TokenIds:
    if isinstance(place, ScaffoldPlace):
        return place.joint_ids(chunk_tokens)
    return chunk_tokens(place)


def _entry_piece(
    place: ChunkPlace | ScaffoldPlace,
    address: EntryAddress,
    chunk_tokens: Callable[[ChunkPlace], TokenIds],
    *,
    sees_context: bool,
) -> EntryPiece:
    """What the layout is told of a place that is read from an entry."""
    head = place.head if isinstance(place, ChunkPlace) else None
    return EntryPiece(
        label=_name_of(place),
        key=address.key,
        token_ids=address.token_ids,
        encoded_start=address.start,
        context_is_prefix=sees_context,
        num_read=head.num_read if head else None,
        members=place.rows(chunk_tokens) if isinstance(place, ScaffoldPlace) else (),
    )


def _behind_head(cut: Sequence[CutPiece]) -> Iterator[CutPiece]:
    is_head = True
    for piece in cut:
        is_head = is_head and isinstance(piece, tuple)
        if not is_head:
            yield piece
