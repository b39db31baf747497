"""A model's own chat template, taken apart by rendering it.

No table of role strings exists here. The template is rendered with a sentinel in place of every
message's content; what stands between the sentinels is template text and may hold control tokens,
what stands in their place is content and may not. A second rendering with padded sentinels shows
whether the template trims content. A template that looks *into* the content (some cut a thinking
block out of earlier answers) sees the sentinel instead: content is kept whole.

A model without a template gets a plain format::

    System: ...

    User: ...

    Assistant:
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import product
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from pc_rag.errors import PromptError
from pc_rag.model.conversation import ChatMessage, as_conversation, fold_system, merge_roles
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.answer_memory import AnswerMemory
    from pc_rag.model.conversation import Conversation
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.types import TokenIds

_SENTINEL = "pcRagContent{}End"
_SENTINEL_PATTERN = re.compile(r"pcRagContent(\d+)End")
_PAD = "\n\t \t\n"
"""Stands on both sides of a padded sentinel: newlines outside, so that both kinds of trim show."""
_SEPARATOR = "\n\n"
"""Stands between the messages of the plain format."""
_PLAIN_LABELS = {
    Role.SYSTEM: "System",
    Role.USER: "User",
    Role.ASSISTANT: "Assistant",
    Role.TOOL: "Tool",
}


class PieceKind(StrEnum):
    """Where a piece of a rendered conversation comes from."""

    CONTROL = "control"
    """The chat template: role markers, separators, texts of its own."""
    CONTENT = "content"
    """A message."""
    ANSWER = "answer"
    """A message that the model itself has generated: its tokens are those it generated."""


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A run of a rendered conversation.

    Attributes:
        kind: Where it comes from.
        text: Its text, as the template places it (trimmed if the template trims).
        token_ids: Its tokens; the prompt is the pieces' ids joined, nothing more.
        chunks: Of a content: ``ChatMessage.chunks`` of its message.
    """

    kind: PieceKind
    text: str
    token_ids: TokenIds
    chunks: tuple[str, ...] = ()


class _Trim(IntEnum):
    """What a template cuts off one side of a content."""

    WHITESPACE = 0
    NEWLINES = 1
    NOTHING = 2


_LEFT_REST = {_Trim.WHITESPACE: "", _Trim.NEWLINES: _PAD.lstrip("\n"), _Trim.NOTHING: _PAD}
_RIGHT_REST = {_Trim.WHITESPACE: "", _Trim.NEWLINES: _PAD.rstrip("\n"), _Trim.NOTHING: _PAD}


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A rendered template without its contents.

    Attributes:
        controls: Template text before, between and behind the contents; one more than ``order``.
        order: Index of the message at each place.
        trims: What is cut off the left and the right side at each place.
    """

    controls: tuple[str, ...]
    order: tuple[int, ...]
    trims: tuple[tuple[_Trim, _Trim], ...]


class ChatFormat:
    """Renders conversations into pieces of token ids.

    Args:
        tokenizer: The model's tokenizer with its chat template, if it has one.
        answers: What the model has generated before; assistant messages of just that text keep
            their generated tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, *, answers: AnswerMemory | None = None) -> None:
        self._tokenizer = tokenizer
        self._answers = answers

    @property
    def has_template(self) -> bool:
        """Whether the model brings a template; the plain format is used otherwise."""
        return self._tokenizer.chat_template is not None

    def render(
        self,
        conversation: Conversation | Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[ChatPiece, ...]:
        """Render a conversation.

        Neighbouring messages of one role become one, joined by an empty line. Where the template
        knows no system role, system text is put before the next user message. BOS stands at the
        start once, if the tokenizer or the template wants it there.

        Args:
            conversation: What is said, oldest first.
            add_generation_prompt: End with what opens the assistant's answer.

        Raises:
            PromptError: No messages, or an order of roles that the template refuses.
        """
        merged = merge_roles(as_conversation(conversation).messages)
        if not merged:
            raise PromptError("a conversation needs at least one message; got none")
        try:
            skeleton = self._take_apart(merged, add_generation_prompt=add_generation_prompt)
        except _Refused as refusal:
            folded = fold_system(merged)
            if folded == merged:
                raise _refused_error(merged, refusal) from refusal
            merged = folded
            try:
                skeleton = self._take_apart(merged, add_generation_prompt=add_generation_prompt)
            except _Refused as again:
                raise _refused_error(merged, again) from again
        return self._with_bos(self._fill(skeleton, merged))

    def control_texts(
        self, roles: Sequence[Role], *, add_generation_prompt: bool = False
    ) -> tuple[str, ...] | None:
        """Template text before, between and behind the contents of messages of the given roles.

        Returns:
            One text more than roles; ``None`` where the template refuses the roles, reorders the
            contents or leaves one out.
        """
        messages = tuple(ChatMessage(role, "") for role in roles)
        try:
            skeleton = self._take_apart(messages, add_generation_prompt=add_generation_prompt)
        except _Refused:
            return None
        return skeleton.controls if skeleton.order == tuple(range(len(roles))) else None

    def _take_apart(
        self, messages: tuple[ChatMessage, ...], *, add_generation_prompt: bool
    ) -> _Skeleton:
        roles = tuple(message.role for message in messages)
        if not self.has_template:
            return _plain_skeleton(roles, add_generation_prompt=add_generation_prompt)
        bare = self._render_sentinels(roles, "", add_generation_prompt)
        controls, order = _split(bare)
        if sorted(order) != list(range(len(roles))):
            missing = sorted(set(range(len(roles))) - set(order))
            raise _Refused(
                f"it leaves out the content of message {missing[0] + 1}"
                if missing
                else "it writes a content twice"
            )
        padded, _ = _split(self._render_sentinels(roles, _PAD, add_generation_prompt))
        return _Skeleton(controls, order, _find_trims(controls, padded))

    def _render_sentinels(self, roles: Sequence[Role], pad: str, add_prompt: bool) -> str:  # noqa: FBT001 - private, always by name of its variable
        conversation = [
            {"role": role.value, "content": pad + _SENTINEL.format(index) + pad}
            for index, role in enumerate(roles)
        ]
        try:
            rendered = self._tokenizer.hf_tokenizer.apply_chat_template(
                conversation,
                chat_template=self._tokenizer.chat_template,
                tokenize=False,
                add_generation_prompt=add_prompt,
            )
        except TemplateError as error:  # what a template's raise_exception becomes
            raise _Refused(str(error) or type(error).__name__) from error
        return str(rendered)

    def _fill(self, skeleton: _Skeleton, messages: tuple[ChatMessage, ...]) -> list[ChatPiece]:
        contents = [
            _trimmed(messages[index].content, *trim)
            for index, trim in zip(skeleton.order, skeleton.trims, strict=True)
        ]
        pieces: list[ChatPiece] = []
        for index, control in enumerate(skeleton.controls):
            if control:
                ids = self._tokenizer.encode_template(control, is_first=not pieces)
                pieces.append(ChatPiece(PieceKind.CONTROL, control, ids))
            if index < len(contents) and contents[index]:
                message = messages[skeleton.order[index]]
                pieces.append(self._content(message, contents[index], is_first=not pieces))
        return pieces

    def _content(self, message: ChatMessage, text: str, *, is_first: bool) -> ChatPiece:
        """The piece of a message whose content the template places as ``text``."""
        if message.role is Role.ASSISTANT and self._answers is not None:
            generated = self._answers.token_ids_of(text)
            if generated is not None:
                return ChatPiece(PieceKind.ANSWER, text, generated)
        ids = self._tokenizer.encode_text(text, is_first=is_first)
        return ChatPiece(PieceKind.CONTENT, text, ids, message.chunks)

    def _with_bos(self, pieces: list[ChatPiece]) -> tuple[ChatPiece, ...]:
        bos_ids = self._tokenizer.bos_ids
        if not bos_ids or (pieces and pieces[0].token_ids[: len(bos_ids)] == bos_ids):
            return tuple(pieces)
        text = self._tokenizer.backend.decode(list(bos_ids), skip_special_tokens=False)
        if pieces and pieces[0].kind is PieceKind.CONTROL:
            first = pieces.pop(0)
            text, bos_ids = text + first.text, bos_ids + first.token_ids
        return (ChatPiece(PieceKind.CONTROL, text, bos_ids), *pieces)


class _Refused(Exception):
    """The template cannot render these roles; the message says why."""


def _refused_error(messages: tuple[ChatMessage, ...], reason: Exception) -> PromptError:
    roles = ", ".join(message.role.value for message in messages)
    return PromptError(
        f"the model's chat template refuses a conversation of {roles}: {reason}. Begin with a "
        f"system or user message and let user and assistant take turns"
    )


def _plain_skeleton(roles: Sequence[Role], *, add_generation_prompt: bool) -> _Skeleton:
    opens = [f"{_PLAIN_LABELS[role]}: " for role in roles]
    controls = [opens[0], *(_SEPARATOR + text for text in opens[1:])]
    end = f"{_SEPARATOR}{_PLAIN_LABELS[Role.ASSISTANT]}:" if add_generation_prompt else ""
    return _Skeleton(
        (*controls, end), tuple(range(len(roles))), ((_Trim.NOTHING, _Trim.NOTHING),) * len(roles)
    )


def _split(rendered: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    parts = _SENTINEL_PATTERN.split(rendered)
    return tuple(parts[::2]), tuple(int(index) for index in parts[1::2])


def _find_trims(
    controls: tuple[str, ...], padded: tuple[str, ...]
) -> tuple[tuple[_Trim, _Trim], ...]:
    """What the template cuts, from the rests of the padding beside each control text.

    ::

        padded:   ... sentinel | rest of the right pad | control | rest of the left pad | sentinel
    """
    num_contents = len(controls) - 1
    left = [_Trim.NOTHING] * num_contents
    right = [_Trim.NOTHING] * num_contents
    if len(padded) != len(controls):
        return tuple(zip(left, right, strict=True))
    for index, (control, seen) in enumerate(zip(controls, padded, strict=True)):
        right_rests = _RIGHT_REST if index > 0 else {_Trim.NOTHING: ""}
        left_rests = _LEFT_REST if index < num_contents else {_Trim.NOTHING: ""}
        for (right_trim, right_rest), (left_trim, left_rest) in product(
            right_rests.items(), left_rests.items()
        ):
            if seen == right_rest + control + left_rest:
                if index > 0:
                    right[index - 1] = right_trim
                if index < num_contents:
                    left[index] = left_trim
                break
    return tuple(zip(left, right, strict=True))


def _trimmed(content: str, left: _Trim, right: _Trim) -> str:
    if left is not _Trim.NOTHING:
        content = content.lstrip(None if left is _Trim.WHITESPACE else "\n")
    if right is not _Trim.NOTHING:
        content = content.rstrip(None if right is _Trim.WHITESPACE else "\n")
    return content
