"""One call of a model, and the settings that frameworks give it by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pc_rag.errors import ConfigError
from pc_rag.model.conversation import Conversation
from pc_rag.model.grammar import Grammar
from pc_rag.model.sampling import GenerationConfig
from pc_rag.model.tool_format import tool_call_schema
from pc_rag.serving.schemas import closed_schema

if TYPE_CHECKING:
    from collections.abc import Collection

    from pc_rag.model.conversation import TextPrompt, ToolSpec
    from pc_rag.model.tool_format import ToolFormat

_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "stop_sequences": "stop",
} | {
    name: name
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
}
"""What frameworks call the settings of a generation, and what we call them."""


class ToolChoice(StrEnum):
    """Whether a model may, must or must not call a tool."""

    AUTO = "auto"
    """The model decides."""
    ANY = "any"
    """It must call one of them."""
    NONE = "none"
    """It must not; the tools are not shown to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model.

    Attributes:
        prompt: Plain text, or a conversation, with tools perhaps.
        config: How to choose tokens and when to stop.
        tool_choice: Whether a tool may, must or must not be called. A call that must be made is
            held to the tools' JSON schemas while it is generated.
        tool_name: The tool that must be called, under ``ToolChoice.ANY``; ``None`` for any of them.
        max_tool_calls: Further calls in a reply are reported as invalid; ``None`` for no limit.
        template: Label of the prompt's template in metrics.
        reuse: ``False`` computes every token of the same prompt; ``None`` as configured.
        timeout_seconds: The call fails after this time, looked at between tokens.
        learn_prefix: Encode all chunks behind the prompt's head too, in the background, where the
            reply says that its hits came from behind another.

    Raises:
        ConfigError: A time that is not a positive number, or a value of another type.
    """

    prompt: TextPrompt
    config: GenerationConfig = field(default_factory=GenerationConfig)
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str | None = None
    max_tool_calls: int | None = None
    template: str | None = None
    reuse: bool | None = None
    timeout_seconds: float | None = None
    learn_prefix: bool = False

    def __post_init__(self) -> None:
        timeout = self.timeout_seconds
        is_time = isinstance(timeout, (int, float)) and timeout > 0
        if timeout is not None and not is_time:
            raise ConfigError(
                f"timeout is {timeout!r}; give a number of seconds above 0, or None for no limit"
            )
        for name, kind in (("template", str), ("reuse", bool), ("learn_prefix", bool)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} is {value!r}; give a {kind.__name__}, or leave it out")

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the model may call in this call."""
        if not isinstance(self.prompt, Conversation) or self.tool_choice is ToolChoice.NONE:
            return ()
        return self.prompt.tools

    def shown_prompt(self) -> TextPrompt:
        """The prompt as the model sees it: without tools where none may be called."""
        if isinstance(self.prompt, Conversation) and self.tool_choice is ToolChoice.NONE:
            return replace(self.prompt, tools=())
        return self.prompt

    def held_config(self, tool_format: ToolFormat | None) -> GenerationConfig:
        """The settings, with the grammar of the call that must be made.

        Args:
            tool_format: How the model writes calls; ``None`` where no tools are given.

        Raises:
            ConfigError: A call must be made, and there is no such tool, or another grammar.
        """
        if self.tool_choice is not ToolChoice.ANY:
            return self.config
        if self.config.grammar is not None:
            raise ConfigError(
                "a reply cannot be held to a tool call and to another grammar at once; give either "
                "tool_choice or a response format"
            )
        names = [tool.name for tool in self.tools]
        is_known = self.tool_name is None or self.tool_name in names
        if tool_format is None or not names or not is_known:
            raise ConfigError(
                f"tool_choice asks for a call of {self.tool_name or 'any tool'!r}, but the tools "
                f"given are {', '.join(map(repr, names)) or 'none'}; give that tool, or another "
                "tool_choice"
            )
        prefix, schema, suffix = tool_call_schema(tool_format, self.tools, self.tool_name)
        return replace(
            self.config, grammar=Grammar.json(closed_schema(schema), prefix=prefix, suffix=suffix)
        )


def generation_config(
    *settings: Mapping[str, Any], others: Collection[str] = ()
) -> GenerationConfig:
    """The settings of a generation by the names that frameworks use; later ones win.

    ``None`` means "not given". Known are ``max_tokens`` (``max_new_tokens``,
    ``max_completion_tokens``), ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty``, ``seed``, ``stop`` (``stop_sequences``: a string or several) and
    ``response_format`` (``{"type": "text"}``, ``{"type": "json_object"}``, or ``{"type":
    "json_schema", "json_schema": {"schema": ...}}``).

    Args:
        settings: Names and values.
        others: What else a call may be given, for the message about an unknown name.

    Raises:
        ConfigError: An unknown name, or a value out of range.
    """
    values: dict[str, Any] = {}
    for given in settings:
        for name, value in given.items():
            if value is None:
                continue
            if name == "response_format":
                values["grammar"] = _response_grammar(value)
            elif name in _NAMES:
                values[_NAMES[name]] = value
            else:
                raise ConfigError(
                    f"{name}={value!r} is not a setting of a generation; known are "
                    f"{', '.join(sorted({*_NAMES, 'response_format', *others}))}"
                )
    if "stop" in values:
        values["stop"] = _stop_strings(values["stop"])
    return GenerationConfig(**values)


def _stop_strings(stop: Any) -> tuple[str, ...]:  # noqa: ANN401 - a user gave it
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, Iterable):
        return tuple(stop)
    raise ConfigError(f"stop is {stop!r}; give a string, or several in a list")


def _response_grammar(response_format: Any) -> Grammar | None:  # noqa: ANN401 - a user gave it
    kind = response_format.get("type") if hasattr(response_format, "get") else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json()
    if kind == "json_schema":
        described = response_format.get("json_schema") or {}
        schema = described.get("schema") if hasattr(described, "get") else None
        if isinstance(schema, Mapping):
            return Grammar.json(closed_schema(schema))
    raise ConfigError(
        f"response_format {response_format!r} is unknown; give {{'type': 'json_object'}}, "
        "{'type': 'json_schema', 'json_schema': {'schema': ...}} or {'type': 'text'}"
    )
