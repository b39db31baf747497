"""A conversation as a chat template is given it: sentinels for contents, JSON-like values, tools.

Only the template may make control tokens. Names, schemas and arguments are written by users,
documents and models; a string among them that imitates a control token is not shown to the
template but stands behind a sentinel, and is put in afterwards as plain text (``template_guard``).
Other strings are shown as they are, since templates look into schemas; whether the template makes
control tokens of them is told by a rendering in which they are hidden too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension

from pc_rag.errors import ConfigError
from pc_rag.model.template_guard import TemplateGuard, short_id
from pc_rag.model.template_skeleton import content_sentinel
from pc_rag.types import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jinja2 import nodes
    from jinja2.parser import Parser

    from pc_rag.model.conversation import ChatMessage, ToolSpec
    from pc_rag.model.tokenizer import TextTokenizer


def check_template(source: str | None) -> None:
    """Refuse a chat template that no conversation can be rendered with.

    Args:
        source: Jinja source; ``None`` is fine.

    Raises:
        ConfigError: It is blank or not Jinja.
    """
    if source is None:
        return
    if not source.strip():
        raise ConfigError(
            "the chat template is blank; give Jinja source, or None for the model's own"
        )
    try:
        # Statements of extensions that transformers renders with; what they do is not needed here.
        environment = Environment(  # noqa: S701 - parsed, never rendered
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.parse(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not Jinja: line {error.lineno}: {error.message}; give the "
            f"source as it stands in a model's chat_template"
        ) from error


class _Generation(Extension):
    """Lets a template mark what the assistant generated, as transformers does."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it on the instance

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_TEMPLATE_FAULTS = (
    TemplateError,  # what raise_exception becomes
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What a template may raise: itself, or by its filters, look-ups and sums."""


class TemplateRefusal(Exception):
    """The template cannot render a conversation; the message says why."""


def render_template(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = False,
) -> str:
    """Render mappings through the model's chat template.

    Args:
        tokenizer: Has the template.
        messages: As ``apply_chat_template`` takes them.
        tools: As ``apply_chat_template`` takes them.
        add_generation_prompt: End with what opens the assistant's answer.

    Raises:
        TemplateRefusal: The template raises, or takes a value for what it is not.
    """
    needs_tools = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
    try:
        rendered = tokenizer.hf_tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=tokenizer.tool_template if needs_tools else tokenizer.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except _TEMPLATE_FAULTS as error:
        raise TemplateRefusal(str(error) or type(error).__name__) from error
    return str(rendered)


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What a template is given in place of a conversation.

    Attributes:
        tools: In the form of ``apply_chat_template``.
        values: Strings that stand behind the sentinels of values, by their number.
        messages: Those that are rendered.
        headers: All of each message but its content.
    """

    tools: tuple[Mapping[str, Any], ...]
    values: tuple[str, ...]
    messages: tuple[ChatMessage, ...]
    headers: tuple[Mapping[str, Any], ...]

    @property
    def has_foreign_strings(self) -> bool:
        """Whether there is more than contents that a template could make control tokens of."""
        return bool(self.tools) or any(self.headers)

    @property
    def shown(self) -> frozenset[int]:
        """Indexes of the messages whose content has to appear.

        An assistant that calls tools may say nothing, and templates tell this from an empty text.
        """
        return frozenset(i for i, m in enumerate(self.messages) if m.content or not m.tool_calls)

    def with_sentinels(self, pad: str = "") -> list[dict[str, Any]]:
        """The messages, a sentinel for each content.

        Args:
            pad: Put on both sides of each.
        """
        shown = self.shown
        contents = [
            pad + content_sentinel(index) + pad if index in shown else ""
            for index in range(len(self.messages))
        ]
        return [
            {"role": message.role.value, "content": content, **header}
            for message, content, header in zip(self.messages, contents, self.headers, strict=True)
        ]


def template_input(
    messages: tuple[ChatMessage, ...],
    tools: tuple[ToolSpec, ...],
    tokenizer: TextTokenizer,
    *,
    has_text_arguments: bool,
    hides_all: bool = False,
) -> TemplateInput:
    """What a template is given in place of messages and tools.

    Args:
        messages: What is said.
        tools: What may be called.
        tokenizer: Tells control tokens.
        has_text_arguments: Give the arguments of a call as JSON text, not as a mapping.
        hides_all: Hide every string but the words of JSON schemas, whatever it reads like.
    """
    guard = TemplateGuard(tokenizer, hides_all=hides_all)
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    headers = []
    for message in messages:
        header: dict[str, Any] = {}
        name = message.name or names.get(message.tool_call_id, "")
        if name:
            header["name"] = guard.protect(name)
        if message.role is Role.TOOL:
            header["tool_call_id"] = guard.identifier(message.tool_call_id)
        if message.tool_calls:
            calls = [
                call_entry(guard.call(call), as_text=has_text_arguments)
                for call in message.tool_calls
            ]
            header["tool_calls"] = calls
        headers.append(header)
    entries = tuple(map(guard.tool, map(tool_entry, tools)))
    return TemplateInput(entries, tuple(guard.values), messages, tuple(headers))


def tool_entry(tool: ToolSpec) -> dict[str, Any]:
    """A tool as templates are given it."""
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def call_entry(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A call as templates are given it.

    Args:
        call: Its ``id``, ``name`` and ``arguments``.
        as_text: Give the arguments as JSON text.
    """
    arguments = call["arguments"]
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def variants(messages: tuple[ChatMessage, ...]) -> Iterator[tuple[ChatMessage, ...]]:
    """A conversation, and then forms of it that say the same to a stricter template.

    Identifiers of calls are made nine letters and digits. Text beside calls becomes a message of
    its own; where that is refused too it is left out, as such templates leave it out by
    themselves.
    """
    seen: list[tuple[ChatMessage, ...]] = []
    for split in (messages, _with_calls_apart(messages), _with_silent_calls(messages)):
        for variant in (split, _with_short_ids(split)):
            if variant not in seen:
                seen.append(variant)
                yield variant


def _with_calls_apart(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    apart: list[ChatMessage] = []
    for message in messages:
        if message.tool_calls and message.content:
            apart.append(replace(message, tool_calls=()))
            message = _silent(message)  # noqa: PLW2901 - its second half
        apart.append(message)
    return tuple(apart)


def _with_silent_calls(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    return tuple(_silent(message) if message.tool_calls else message for message in messages)


def _silent(message: ChatMessage) -> ChatMessage:
    return replace(message, content="", chunks=(), cache_points=())


def _with_short_ids(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    return tuple(
        replace(
            message,
            tool_calls=tuple(replace(c, id=short_id(c.id)) for c in message.tool_calls),
            tool_call_id=short_id(message.tool_call_id) if message.role is Role.TOOL else "",
        )
        for message in messages
    )
