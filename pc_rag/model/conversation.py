"""A conversation as values: messages, calls of tools, and the tools themselves."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any, TypeAlias

from pc_rag.errors import PromptError
from pc_rag.pml import Program
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
        PromptError: The name is empty, a text is none, or the arguments are not a JSON object.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    id: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise PromptError("a tool call has no name; name the tool that is called")
        check_text(self.name, "the name of a tool call")
        check_text(self.id, f"the id of a call of {self.name!r}")
        _check_json(self.arguments, f"the arguments of a call of {self.name!r}")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that a model may call.

    Attributes:
        name: Its name.
        description: What it does, for the model.
        parameters: JSON schema of its arguments, an object.

    Raises:
        PromptError: The name is empty, a text is none, or the parameters are not a JSON object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise PromptError("a tool has no name; name it")
        check_text(self.name, "the name of a tool")
        check_text(self.description, f"the description of tool {self.name!r}")
        _check_json(self.parameters, f"the parameters of tool {self.name!r}")


def _check_json(value: object, where: str) -> None:
    if not isinstance(value, Mapping):
        raise PromptError(f"{where} are a {type(value).__name__}; give a JSON object (a mapping)")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where} cannot be said in JSON: {error}") from error
    check_text(text, where)


def check_text(text: object, where: str) -> None:
    """Refuse what no tokenizer takes as text.

    Args:
        text: Anything.
        where: What it is, for the message.

    Raises:
        PromptError: It is no string, or holds half of a character (a lone surrogate).
    """
    if not isinstance(text, str):
        raise PromptError(f"{where} is a {type(text).__name__}; give it as text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where}: character {error.start} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}, which is half of a character; leave it out, or "
            f"decode the text without errors='surrogateescape'"
        ) from error


_TTL = re.compile(r"([0-9]{1,9})([smh])")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_ttl(text: object) -> float:
    """Seconds of a time to live as prompts write it: ``"300s"``, ``"5m"``, ``"1h"``.

    Raises:
        PromptError: It is written otherwise, or is nothing.
    """
    match = _TTL.fullmatch(text) if isinstance(text, str) else None
    seconds = int(match.group(1)) * _UNIT_SECONDS[match.group(2)] if match else 0.0
    if not seconds:
        raise PromptError(
            f"the time to live {text!r} of a cache point is not understood; write a whole number "
            "above 0 and its unit s, m or h, as in '300s', '5m' or '1h'"
        )
    return seconds


@dataclass(frozen=True, slots=True)
class CachePoint:
    """A place in a content; the whole prompt up to it is kept as a reusable entry.

    Attributes:
        offset: Characters of the content before it.
        ttl_seconds: How long the entry is kept after its last use.

    Raises:
        PromptError: The offset is negative, or the time is not a finite number above 0.
    """

    offset: int
    ttl_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not isinstance(self.offset, int) or isinstance(self.offset, bool) or self.offset < 0:
            raise PromptError(
                f"a cache point has offset {self.offset!r}; give the number of characters of the "
                "content that stand before it, 0 or more"
            )
        ttl = self.ttl_seconds
        is_number = isinstance(ttl, (int, float)) and not isinstance(ttl, bool)
        if not is_number or not math.isfinite(ttl) or ttl <= 0:
            raise PromptError(
                f"a cache point has ttl_seconds {ttl!r}; give a finite number of seconds above 0"
            )

    def shifted(self, num_chars: int) -> CachePoint:
        """The same point with more characters before it."""
        return replace(self, offset=self.offset + num_chars)


def _tuple_of(values: object, kind: type, where: str) -> tuple[Any, ...]:
    """Values as a tuple; a string is not taken for a list of letters."""
    items = () if isinstance(values, (str, bytes, Mapping)) else values
    if items is not values or not isinstance(items, Iterable):
        raise PromptError(f"{where} are a {type(values).__name__}; give a list of {kind.__name__}")
    found = tuple(items)
    for item in found:
        if not isinstance(item, kind):
            raise PromptError(
                f"{where} hold a {type(item).__name__}; give a list of {kind.__name__}"
            )
    return found


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
        cache_points: Places in the content, by rising offset. A corpus keeps the whole prompt up
            to each (template, tools, earlier messages, this content's first characters) as an
            entry, which a later prompt that begins the same reads.

    Raises:
        PromptError: The role is unknown, the content, a name or a chunk is not text, a message of
            another role has calls of tools, or cache points fall back or lie behind the content.
    """

    role: Role
    content: str
    chunks: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    cache_points: tuple[CachePoint, ...] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "role", Role(self.role))
        except ValueError as error:
            raise PromptError(
                f"role {self.role!r} is unknown; use one of {', '.join(Role)}"
            ) from error
        of_message = f"of a {self.role} message"
        check_text(self.content, f"the content {of_message}")
        check_text(self.name, f"the name {of_message}")
        check_text(self.tool_call_id, f"the tool_call_id {of_message}")
        chunks = _tuple_of(self.chunks, str, f"the chunks {of_message}")
        for chunk in chunks:
            check_text(chunk, f"a chunk {of_message}")
        calls = _tuple_of(self.tool_calls, ToolCall, f"the tool_calls {of_message}")
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "tool_calls", calls)
        if self.tool_calls and self.role is not Role.ASSISTANT:
            raise PromptError(f"a {self.role} message calls tools; only an assistant's may")
        points = _tuple_of(self.cache_points, CachePoint, f"the cache_points {of_message}")
        object.__setattr__(self, "cache_points", points)
        self._check_points()

    def _check_points(self) -> None:
        offsets = [point.offset for point in self.cache_points]
        if offsets != sorted(offsets):
            raise PromptError(
                f"the cache points of a {self.role} message have offsets {offsets}; give them in "
                "rising order"
            )
        if offsets and offsets[-1] > len(self.content):
            raise PromptError(
                f"a cache point of a {self.role} message has offset {offsets[-1]}, its content has "
                f"{len(self.content)} characters; put it inside the content or at its end"
            )


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat model is asked with.

    Attributes:
        messages: Oldest first.
        tools: What the model may call; only a template that knows tools can show them.

    Raises:
        PromptError: One of them is something else.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()

    def __post_init__(self) -> None:
        messages = _tuple_of(self.messages, ChatMessage, "the messages of a conversation")
        object.__setattr__(self, "messages", messages)
        object.__setattr__(
            self, "tools", _tuple_of(self.tools, ToolSpec, "the tools of a conversation")
        )


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
        hint = (
            "; build one with the program's prompt(...)"
            if isinstance(prompt, Program | GeneratorType)
            else ""
        )
        raise PromptError(
            "a prompt is text, a list of messages or a parsed PML prompt; got a "
            f"{type(prompt).__name__}{hint}"
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


def merge_roles(
    messages: Sequence[ChatMessage], *, joins_names: bool = False
) -> tuple[ChatMessage, ...]:
    """Make one message of every run of one role; contents are joined by an empty line.

    Answers of tools stay apart, as each belongs to its call; and nothing is joined to a message
    that calls tools, whose calls come behind its content.

    Args:
        messages: Oldest first.
        joins_names: Join messages of different speakers too; what they say together has no name.
    """
    merged: list[ChatMessage] = []
    for message in messages:
        last = merged[-1] if merged else None
        has_one_name = last is not None and last.name == message.name
        is_joined = last is not None and _is_joinable(last, message)
        if last is None or not is_joined or not (has_one_name or joins_names):
            merged.append(message)
        else:
            before = last.content + SEPARATOR
            points = tuple(point.shifted(len(before)) for point in message.cache_points)
            merged[-1] = replace(
                last,
                content=before + message.content,
                cache_points=last.cache_points + points,
                chunks=last.chunks + message.chunks,
                tool_calls=message.tool_calls,
                name=message.name if has_one_name else "",
            )
    return tuple(merged)


def _is_joinable(last: ChatMessage, message: ChatMessage) -> bool:
    return last.role is message.role is not Role.TOOL and not last.tool_calls


def fold_system(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Turn system messages into the beginning of the next user message (or a last one)."""
    folded: list[ChatMessage] = []
    name = ""
    for message in reversed(messages):
        if message.role is Role.SYSTEM:
            message = replace(message, role=Role.USER, name=name)  # noqa: PLW2901 - as the user's
        else:
            name = message.name if message.role is Role.USER else ""
        folded.append(message)
    return merge_roles(folded[::-1])
