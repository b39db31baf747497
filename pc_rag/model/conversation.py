"""A conversation as values: messages, calls of tools, and the tools themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pc_rag.errors import PromptError
from pc_rag.types import Role

SEPARATOR = "\n\n"
"""Joins contents of one role, a folded system text to its user message, and plain messages."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's wish to have a tool called.

    Attributes:
        name: The tool.
        arguments: Its arguments, as JSON can say them.
        id: Ties the tool's answer to the call; empty where nobody gave one.

    Raises:
        PromptError: The name is empty, or the arguments are not a JSON object.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    id: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise PromptError("a tool call has no name; name the tool that is called")
        _check_json(self.arguments, f"the arguments of a call of {self.name!r}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that a model may call.

    Attributes:
        name: Its name.
        description: What it does, for the model.
        parameters: JSON schema of its arguments, an object.

    Raises:
        PromptError: The name is empty, or the parameters are not a JSON object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise PromptError("a tool has no name; name it")
        _check_json(self.parameters, f"the parameters of tool {self.name!r}")


def _check_json(value: object, where: str) -> None:
    if not isinstance(value, Mapping):
        raise PromptError(f"{where} are a {type(value).__name__}; give a JSON object (a mapping)")
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise PromptError(f"{where} cannot be said in JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: Who speaks; its name will do.
        content: What is said: plain text, whatever it looks like.
        chunks: Texts of corpus chunks that stand in the content, in order; nothing needs to be
            recognised where they are named.
        tool_calls: Of an assistant's message: the tools it wants called.
        tool_call_id: Of a tool's message: the call it answers.
        name: Of a tool's message: the tool; of others: who speaks, where a template writes it.

    Raises:
        PromptError: The role is unknown, the content is not text, or a message of another role has
            calls of tools.
    """

    role: Role
    content: str
    chunks: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "role", Role(self.role))
        except ValueError as error:
            raise PromptError(
                f"role {self.role!r} is unknown; use one of {', '.join(Role)}"
            ) from error
        if not isinstance(self.content, str):
            raise PromptError(
                f"the content of a {self.role} message is a {type(self.content).__name__}; "
                "give it as text"
            )
        if self.tool_calls and self.role is not Role.ASSISTANT:
            raise PromptError(f"a {self.role} message calls tools; only an assistant's may")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat model is asked with.

    Attributes:
        messages: Oldest first.
        tools: What the model may call; only a template that knows tools can show them.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()


TextPrompt: TypeAlias = str | Conversation | Sequence[ChatMessage]
"""What a model is asked with: plain text, or a conversation."""


def as_conversation(prompt: object) -> Conversation:
    """A conversation as it is, or made of messages, or of mappings with ``role`` and ``content``.

    Raises:
        PromptError: It is neither a conversation nor a sequence of messages.
    """
    if isinstance(prompt, Conversation):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        raise PromptError(
            f"a prompt is text, a list of messages or a parsed PML prompt; got a "
            f"{type(prompt).__name__}"
        )
    return Conversation(tuple(_as_message(message) for message in prompt))


def _as_message(message: object) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if isinstance(message, Mapping) and {"role", "content"} <= message.keys():
        return ChatMessage(message["role"], message["content"])
    raise PromptError(
        f"a message is a ChatMessage, or a mapping with role and content; got {message!r}"
    )


def merge_roles(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Make one message of every run of one role; contents are joined by an empty line.

    Answers of tools stay apart, as each belongs to its call; and nothing is joined to a message
    that calls tools, whose calls come behind its content.
    """
    merged: list[ChatMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or not _is_joinable(last, message):
            merged.append(message)
        else:
            merged[-1] = replace(
                last,
                content=last.content + SEPARATOR + message.content,
                chunks=last.chunks + message.chunks,
                tool_calls=message.tool_calls,
            )
    return tuple(merged)


def _is_joinable(last: ChatMessage, message: ChatMessage) -> bool:
    return last.role is message.role is not Role.TOOL and not last.tool_calls


def fold_system(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Turn system messages into the beginning of the next user message (or a last one)."""
    as_user = (
        replace(message, role=Role.USER) if message.role is Role.SYSTEM else message
        for message in messages
    )
    return merge_roles(tuple(as_user))
