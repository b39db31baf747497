"""A rendered conversation as pieces of token ids, built from its texts in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from pc_rag.model.answer_memory import PromptDigest
from pc_rag.types import Role

if TYPE_CHECKING:
    from pc_rag.model.answer_memory import AnswerMemory
    from pc_rag.model.conversation import CachePoint, ChatMessage
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.types import TokenIds


class PieceKind(StrEnum):
    """Where a piece of a rendered conversation comes from."""

    CONTROL = "control"
    """The chat template: role markers, separators, texts of its own."""
    CONTENT = "content"
    """A message; or a string of a tool or of a call that imitates a control token."""
    ANSWER = "answer"
    """A message that the model itself has generated: its tokens are those it generated."""


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A run of a rendered conversation.

    Attributes:
        kind: Where it comes from.
        text: Its text, as the template places it (trimmed if the template trims, escaped if it
            writes JSON).
        token_ids: Its tokens; the prompt is the pieces' ids joined, nothing more.
        chunks: Of a content: ``ChatMessage.chunks`` of its message.
        points: Cache points, by rising offset in ``text``. Inside a text they stand in contents
            only; elsewhere they stand at its ends.
    """

    kind: PieceKind
    text: str
    token_ids: TokenIds
    chunks: tuple[str, ...] = ()
    points: tuple[CachePoint, ...] = ()


class PieceBuilder:
    """Makes the pieces of one conversation. Empty texts are left out.

    Args:
        tokenizer: Makes the tokens.
        answers: What the model has generated before, if it is to be known again.
        is_plain: The conversation is in the plain format, which no template writes.
    """

    def __init__(
        self, tokenizer: TextTokenizer, answers: AnswerMemory | None, *, is_plain: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._is_plain = is_plain
        self._pieces: list[ChatPiece] = []
        self._digest: PromptDigest | None = None
        self._num_digested = 0

    def add_control(self, text: str) -> None:
        """Template text; control tokens in it are parsed."""
        if text:
            self._pieces.append(self._control(text, is_first=not self._pieces))

    def add_content(
        self, text: str, chunks: tuple[str, ...] = (), points: tuple[CachePoint, ...] = ()
    ) -> None:
        """Text of somebody; control tokens in it stay text.

        Args:
            text: As the template places it.
            chunks: See ``ChatPiece``.
            points: See ``ChatPiece``; those in an empty text stand at the end of what is there.
        """
        if text:
            ids = self._tokenizer.encode_text(text, is_first=not self._pieces)
            self._pieces.append(ChatPiece(PieceKind.CONTENT, text, ids, chunks, points))
        elif points and self._pieces:
            last = self._pieces[-1]
            at_end = tuple(replace(point, offset=len(last.text)) for point in points)
            self._pieces[-1] = replace(last, points=last.points + at_end)

    def add_message(
        self, message: ChatMessage, text: str, points: tuple[CachePoint, ...] = ()
    ) -> None:
        """The content of a message.

        Args:
            message: The message.
            text: Its content as the template places it.
            points: Its cache points, by their offset in ``text``.
        """
        is_answer = message.role is Role.ASSISTANT and text and self._add_answer(text, points)
        if not is_answer:
            self.add_content(text, message.chunks, points)

    def finish(self) -> tuple[ChatPiece, ...]:
        """All pieces, with BOS at the start if the tokenizer wants it there and it is not yet."""
        bos_ids, pieces = self._missing_bos_ids, self._pieces
        if not bos_ids:
            return tuple(pieces)
        text = self._tokenizer.backend.decode(list(bos_ids), skip_special_tokens=False)
        points: tuple[CachePoint, ...] = ()
        if pieces and pieces[0].kind is PieceKind.CONTROL:
            first = pieces.pop(0)
            points = tuple(point.shifted(len(text)) for point in first.points)
            text, bos_ids = text + first.text, bos_ids + first.token_ids
        return (ChatPiece(PieceKind.CONTROL, text, bos_ids, points=points), *pieces)

    @property
    def _missing_bos_ids(self) -> TokenIds:
        bos_ids, pieces = self._tokenizer.bos_ids, self._pieces
        has_bos = pieces and pieces[0].token_ids[: len(bos_ids)] == bos_ids
        return () if has_bos else bos_ids

    def _control(self, text: str, *, is_first: bool) -> ChatPiece:
        ids = self._tokenizer.encode_template(text, is_first=is_first)
        return ChatPiece(PieceKind.CONTROL, text, ids)

    def _add_answer(self, text: str, points: tuple[CachePoint, ...]) -> bool:
        """Add an answer with the tokens it was generated as; whether it was generated just here.

        A space that the template puts before contents may be the answer's own: a model behind
        ``Assistant:`` generates it, and decoders of the sentencepiece kind drop it from the text.
        Its tokens are never cut: a cache point inside it moves to its start.
        """
        if self._answers is None:
            return False
        stem, label = self._pieces, ""
        if stem and stem[-1].kind is PieceKind.CONTROL:
            stem, label = stem[:-1], stem[-1].text
        for shown in dict.fromkeys((label, label.removesuffix(" "))):
            opening = [self._control(shown, is_first=not stem)] if shown else []
            digest = self._digest_of(stem)
            for piece in opening:
                digest.extend(piece.token_ids)
            ids = self._answers.token_ids_of(text, behind=digest)
            before = [*stem, *opening]
            if ids and (self._is_plain or shown + self._read(before, ids) == label + text):
                at_ends = tuple(
                    replace(point, offset=0) if point.offset < len(text) else point
                    for point in points
                )
                self._pieces = [*before, ChatPiece(PieceKind.ANSWER, text, ids, points=at_ends)]
                return True
        return False

    def _read(self, before: list[ChatPiece], token_ids: TokenIds) -> str:
        """What tokens say behind others: some decoders drop a space at the very start."""
        context = list(before[-1].token_ids) if before else []
        decode = self._tokenizer.backend.decode
        known = decode(context, skip_special_tokens=False)
        return decode([*context, *token_ids], skip_special_tokens=False).removeprefix(known)

    def _digest_of(self, pieces: list[ChatPiece]) -> PromptDigest:
        """A digest to go on with; earlier pieces are never read again."""
        if self._digest is None:
            self._digest = PromptDigest(self._tokenizer, self._missing_bos_ids)
        for piece in pieces[self._num_digested :]:
            self._digest.extend(piece.token_ids)
        self._num_digested = len(pieces)
        return self._digest.copy()
