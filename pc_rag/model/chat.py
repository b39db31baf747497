"""A model's own chat template, taken apart by rendering it.

No table of role strings exists here. The template is rendered with a sentinel in place of every
message's content; what stands between the sentinels is template text and may hold control tokens,
what stands in their place is content and may not. A second rendering with padded sentinels shows
whether the template trims content. A template that looks *into* the content (some cut a thinking
block out of earlier answers) sees the sentinel instead: content is kept whole. Tools and calls of
tools go to the template as they are, but for strings that imitate control tokens
(``template_input``); whether it knows them, and how calls are written, is rendered too.

A model without a template gets a plain format::

    System: ...

    User: ...

    Assistant:
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pc_rag.errors import PromptError, UnsupportedModelError
from pc_rag.model.chat_pieces import ChatPiece, PieceBuilder, PieceKind
from pc_rag.model.conversation import (
    SEPARATOR,
    ChatMessage,
    as_conversation,
    fold_system,
    merge_roles,
)
from pc_rag.model.template_input import (
    TemplateInput,
    TemplateRefusal,
    render_template,
    template_input,
    variants,
)
from pc_rag.model.template_skeleton import (
    PAD,
    Place,
    Skeleton,
    find_skeleton,
    has_mark,
    split_values,
)
from pc_rag.model.tool_format import (
    PROBE_NAME,
    PROBE_TOOLS,
    derive_tool_format,
    shows_json_call,
    shows_probe_call,
)
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pc_rag.model.answer_memory import AnswerMemory
    from pc_rag.model.conversation import Conversation, ToolSpec
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.model.tool_format import ToolFormat

__all__ = ["ChatFormat", "ChatPiece", "PieceKind"]

_PLAIN_LABELS = {
    Role.SYSTEM: "System",
    Role.USER: "User",
    Role.ASSISTANT: "Assistant",
    Role.TOOL: "Tool",
}


class ChatFormat:
    """Renders conversations into pieces of token ids.

    Args:
        tokenizer: The model's tokenizer with its chat template, if it has one.
        answers: What the model has generated before; an assistant's message keeps the tokens it
            was generated as, behind just the conversation that it answered.
    """

    def __init__(self, tokenizer: TextTokenizer, *, answers: AnswerMemory | None = None) -> None:
        self._tokenizer = tokenizer
        self._answers = answers

    @property
    def has_template(self) -> bool:
        """Whether the model brings a template; the plain format is used otherwise."""
        return self._tokenizer.chat_template is not None

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        if not self.has_template:
            return False
        try:
            return PROBE_NAME in self._render_probe([{"role": Role.USER.value, "content": "probe"}])
        except TemplateRefusal:
            return False

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls of tools.

        ``None`` where its template knows no tools, or writes calls otherwise than as JSON.
        """
        if not self.knows_tools:
            return None
        as_text = self._has_text_arguments
        return derive_tool_format(self._render_probe, self._tokenizer, as_text=as_text)

    def require_tool_format(self) -> ToolFormat:
        """``tool_format``, where tools are about to be bound.

        Raises:
            UnsupportedModelError: There is none.
        """
        if not self.knows_tools:
            raise _no_tools("shows no tools to the model")
        if self.tool_format is None:
            raise _no_tools("writes calls of tools otherwise than as JSON, which cannot be read")
        return self.tool_format

    def render(
        self,
        conversation: Conversation | Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[ChatPiece, ...]:
        """Render a conversation.

        Neighbouring messages of one role and name become one, joined by an empty line (of one role,
        where the template refuses them otherwise); answers of tools stay apart. Where the template
        knows no system role, system text is put before the next user message. BOS stands at the
        start once, if the tokenizer or the template wants it there. Text beside calls of tools
        becomes a message of its own where the template has no place for it, and is left out where
        it refuses that too.

        Args:
            conversation: What is said, oldest first, and the tools that may be called.
            add_generation_prompt: End with what opens the assistant's answer.

        Raises:
            PromptError: No messages, an order of roles that the template refuses, or a string of a
                tool or a call that it would make a control token of.
            UnsupportedModelError: Tools or calls of tools that the template does not show.
        """
        given = as_conversation(conversation)
        merged = merge_roles(given.messages)
        if not merged:
            raise PromptError("a conversation needs at least one message; got none")
        self._check_tools(merged, given.tools)
        refused: TemplateRefusal | None = None
        folded = fold_system(merged)
        nameless = (merge_roles(each, joins_names=True) for each in (merged, folded))
        for messages in dict.fromkeys((merged, folded, *nameless)):
            merged, refused = messages, None
            for variant in variants(messages):
                try:
                    return self._render(variant, given.tools, add_prompt=add_generation_prompt)
                except TemplateRefusal as refusal:
                    refused = refused or refusal
        raise _refused_error(merged, refused) from refused

    def control_texts(
        self, roles: Sequence[Role], *, add_generation_prompt: bool = False
    ) -> tuple[str, ...] | None:
        """Template text before, between and behind the contents of messages of the given roles.

        Returns:
            One text more than roles; ``None`` where the template refuses the roles, reorders the
            contents or leaves one out.
        """
        prepared = self._prepare(tuple(ChatMessage(role, "") for role in roles), ())
        try:
            skeleton = self._take_apart(prepared, add_prompt=add_generation_prompt)
        except TemplateRefusal:
            return None
        order = [place.message for place in skeleton.places]
        return skeleton.controls if order == list(range(len(roles))) else None

    @cached_property
    def _has_text_arguments(self) -> bool:
        """Whether the template wants the arguments of a call as JSON text, not as a mapping."""
        if shows_json_call(self._render_probe, as_text=False):
            return False
        if shows_json_call(self._render_probe, as_text=True):
            return True
        return not shows_probe_call(self._render_probe, as_text=False)

    @cached_property
    def _shows_calls(self) -> bool:
        return self.has_template and shows_probe_call(
            self._render_probe, as_text=self._has_text_arguments
        )

    def _render_probe(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False
    ) -> str:
        render = partial(
            render_template,
            self._tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
        )
        try:
            return render(tools=PROBE_TOOLS)
        except TemplateRefusal:
            return render()

    def _check_tools(self, messages: tuple[ChatMessage, ...], tools: tuple[ToolSpec, ...]) -> None:
        if tools and not self.knows_tools:
            raise _no_tools("shows no tools to the model")
        if any(message.tool_calls for message in messages) and not self._shows_calls:
            raise _no_tools("leaves out calls of tools, and the conversation has some")

    def _render(
        self, messages: tuple[ChatMessage, ...], tools: tuple[ToolSpec, ...], *, add_prompt: bool
    ) -> tuple[ChatPiece, ...]:
        """Render messages; strings that the template makes control tokens of are hidden from it.

        Single strings may be harmless, and become a control token by what the template does with
        them. A rendering that sees none of them shows which control tokens are the template's own.
        """
        prepared = self._prepare(messages, tools)
        pieces = self._fill(self._take_apart(prepared, add_prompt=add_prompt), prepared)
        if not prepared.has_foreign_strings or not self.has_template:
            return pieces
        hidden = self._prepare(messages, tools, hides_all=True)
        own = self._fill(self._take_apart(hidden, add_prompt=add_prompt), hidden)
        is_own = self._control_ids(pieces) == self._control_ids(own)
        chosen = pieces if is_own else own
        if any(piece.kind is PieceKind.CONTROL and has_mark(piece.text) for piece in chosen):
            raise TemplateRefusal(
                "it rewrites a string of a tool or of a call that reads as a control token"
            )
        return chosen

    def _control_ids(self, pieces: tuple[ChatPiece, ...]) -> list[int]:
        controls = (piece for piece in pieces if piece.kind is PieceKind.CONTROL)
        reserved = self._tokenizer.reserved_ids
        return [i for piece in controls for i in piece.token_ids if i in reserved]

    def _prepare(
        self,
        messages: tuple[ChatMessage, ...],
        tools: tuple[ToolSpec, ...],
        *,
        hides_all: bool = False,
    ) -> TemplateInput:
        has_calls = any(message.tool_calls for message in messages)
        return template_input(
            messages,
            tools,
            self._tokenizer,
            has_text_arguments=has_calls and self._has_text_arguments,
            hides_all=hides_all,
        )

    def _take_apart(self, prepared: TemplateInput, *, add_prompt: bool) -> Skeleton:
        if not self.has_template:
            roles = tuple(message.role for message in prepared.messages)
            return _plain_skeleton(roles, add_generation_prompt=add_prompt)
        bare, padded = (
            render_template(
                self._tokenizer,
                prepared.with_sentinels(pad),
                tools=prepared.tools,
                add_generation_prompt=add_prompt,
            )
            for pad in ("", PAD)
        )
        skeleton = find_skeleton(bare, padded)
        order = [place.message for place in skeleton.places]
        if sorted(order) != sorted(prepared.shown):
            missing = sorted(prepared.shown - set(order))
            raise TemplateRefusal(
                f"it leaves out the content of message {missing[0] + 1}"
                if missing
                else "it writes a content twice"
            )
        return skeleton

    def _fill(self, skeleton: Skeleton, prepared: TemplateInput) -> tuple[ChatPiece, ...]:
        builder = PieceBuilder(self._tokenizer, self._answers, is_plain=not self.has_template)
        for index, control in enumerate(skeleton.controls):
            # Template text and strings that imitate control tokens, in turn.
            for number, text in enumerate(split_values(control, prepared.values.__getitem__)):
                add = builder.add_content if number % 2 else builder.add_control
                add(text)
            if index < len(skeleton.places):
                place = skeleton.places[index]
                message = prepared.messages[place.message]
                points = tuple(
                    replace(point, offset=place.locate(message.content, point.offset))
                    for point in message.cache_points
                )
                builder.add_message(message, place.fit(message.content), points)
        return builder.finish()


def _no_tools(fault: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model's chat template {fault}. Use a model whose chat template knows tools (or give "
        f"one as chat_template), or ask for structured output by a JSON schema instead",
        capability="tools",
    )


def _refused_error(messages: tuple[ChatMessage, ...], reason: Exception | None) -> PromptError:
    roles = ", ".join(message.role.value for message in messages)
    advice = "Begin with a system or user message and let user and assistant take turns"
    if any(message.role is Role.TOOL for message in messages):
        advice += (
            "; let a tool's message follow the assistant's that calls it, and use a model whose "
            "chat template knows tools, or give the tool's answer in a user message"
        )
    return PromptError(
        f"the model's chat template refuses a conversation of {roles}: {reason}. {advice}"
    )


def _plain_skeleton(roles: Sequence[Role], *, add_generation_prompt: bool) -> Skeleton:
    opens = [f"{_PLAIN_LABELS[role]}: " for role in roles]
    controls = [opens[0], *(SEPARATOR + text for text in opens[1:])]
    end = f"{SEPARATOR}{_PLAIN_LABELS[Role.ASSISTANT]}:" if add_generation_prompt else ""
    return Skeleton((*controls, end), tuple(Place(index) for index in range(len(roles))))
